"""What all commands share: their parsers, virtual devices, and exit codes."""

import argparse
import os
from collections.abc import Callable
from typing import Any

import jax

from crossshard.shards.devices import cpu_devices

FINE = 0
BROKEN = 1
REFUSED = 2
# 128 plus the number of the signal, as in shells.
INTERRUPTED = 130
NOT_READ = 141


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


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Add the argument to a command's parser."""
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="create N virtual CPU devices before JAX starts, as crossshard.cpu_devices does",
    )


def make_devices(number: int | None) -> None:
    """Create virtual CPU devices, if any were asked for, and make JAX use them."""
    if number is None:
        return
    cpu_devices(number)
    if not os.environ.get("JAX_PLATFORMS"):
        # Otherwise JAX prefers the machine's accelerators.
        jax.config.update("jax_platforms", "cpu")
