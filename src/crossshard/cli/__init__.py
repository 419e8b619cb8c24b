"""The command line, `crossshard`."""

import sys
from collections.abc import Sequence

import crossshard


def main(arguments: Sequence[str] | None = None) -> int:
    """Say which version this is; the exit code, 2 if anything else was asked.

    Args:
      arguments: the words after ``crossshard``; those of this process if ``None``.
    """
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"crossshard {crossshard.__version__}")
        return 0
    print("crossshard: the only option is --version.", file=sys.stderr)
    return 2
