"""`--devices`: virtual CPU devices for a command."""

import argparse
import os

import jax

import crossshard


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
    crossshard.cpu_devices(number)
    if not os.environ.get("JAX_PLATFORMS"):
        # Otherwise JAX prefers the machine's accelerators.
        jax.config.update("jax_platforms", "cpu")
