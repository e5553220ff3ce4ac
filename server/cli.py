"""The entry point of the command `minidsa`, and no more than that.

A spawned child imports the main module of its parent again before it begins. What a server needs
takes a second of processor time to import, and an engine needs none of it.
"""

import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; arguments: those of `sys.argv` if None.

    Always raises SystemExit.
    """
    try:
        from .commands import run  # noqa: PLC0415 - for the parent alone

        run(arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
