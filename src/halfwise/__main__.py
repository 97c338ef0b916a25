"""The entry point of the command `halfwise`, and of `python -m halfwise`.

Exit codes: 0 fine, 1 the work failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from halfwise.errors import HalfwiseError, UsageError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    An error that halfwise raises on purpose becomes one message on stderr. Any other exception is a fault of the
    program and keeps its traceback.

    Args:
        arguments: the command line without the program's name. Default: `sys.argv[1:]`.

    >>> main(["--help"])  # doctest: +SKIP
    0
    """
    try:
        from halfwise.cli import app

        app(args=arguments, prog_name="halfwise")
    except SystemExit as done:  # typer always ends so, after its own messages about bad usage
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except HalfwiseError as error:
        print(f"halfwise: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("halfwise: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
