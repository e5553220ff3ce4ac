"""HTTP, text and the command line: everything that never touches a tensor."""
