"""The entry point of the command `minidsa`, and no more than that.

A spawned child imports the main module of its parent again before it begins. What a server needs
takes a second of processor time to import, and an engine needs none of it.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; arguments: those of `sys.argv` if None.

    Always raises SystemExit.
    """
    from .commands import run  # noqa: PLC0415 - for the parent alone

    run(arguments)


if __name__ == "__main__":
    main()
