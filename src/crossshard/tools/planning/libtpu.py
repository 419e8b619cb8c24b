"""Which libtpu is installed, and which one this JAX is released with."""

import importlib.metadata
import re

import jax


def other_libtpu() -> str | None:
    """What to say of a libtpu that is not the one that JAX pins; ``None`` if it is.

    Another one compiles most programs; it fails on some, whose text this XLA cannot read.
    """
    try:
        has = importlib.metadata.version("libtpu")
        lines = importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    pins = (re.match(r"libtpu\s*\(?==\s*([\d.]+)(?:\.\*)?\)?\s*;.*\btpu\b", line) for line in lines)
    wanted = next((pin[1] for pin in pins if pin), None)
    if wanted is None or f"{has}.".startswith(f"{wanted}."):
        return None
    return (
        f"libtpu {has} is installed, and JAX {jax.__version__} is released with {wanted}: "
        f'pip install "crossshard[tpu]"'
    )
