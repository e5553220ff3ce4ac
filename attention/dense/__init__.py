"""Backends that attend to every visible token."""
