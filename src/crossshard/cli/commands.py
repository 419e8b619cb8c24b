"""A command's parser: its name, its texts, and the function that runs it."""

import argparse
from collections.abc import Callable
from typing import Any


def add_command(
    commands: Any,
    name: str,
    what: str,
    description: str,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """The parser of a new command, for its own arguments.

    Args:
      commands: the commands of ``crossshard``.
      name: of the command.
      what: a line for the list of commands.
      description: what ``--help`` says before the arguments.
      epilog: what it says after them.
      run: runs it with the parsed arguments and returns the exit code.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser
