"""The entry point of the command `minidsa`, and no more than that.

A spawned child imports the main module of its parent again before it begins. What a server needs
takes a second of processor time to import, and an engine needs none of it.
"""

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; arguments: those of `sys.argv` if None.

    Always raises SystemExit.
    """
    _open_closed_streams()
    try:
        from .commands import run  # noqa: PLC0415 - for the parent alone

        run(arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _open_closed_streams() -> None:
    """Standard streams that were closed are /dev/null, or sockets would get their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken, which is this one. The engine inherits it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            stream = open(number, mode, closefd=False)  # noqa: SIM115 - as long as the process
            setattr(sys, name, stream)


if __name__ == "__main__":
    main()
