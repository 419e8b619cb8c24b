"""Finds the line of user code that a collective or an error comes from."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

_OURS = f"{Path(__file__).parents[2]}/"
# The frames that call our command are not user code.
_COMMAND = f"{_OURS}tools/cli/"

# The libraries that a training script calls, and the standard library.
_LIBRARIES = re.compile(
    r"/(site|dist)-packages/(equinox|flax|jax|jaxtyping|optax)/"
    r"|/lib/python3[^/]*/(?!site-packages/|dist-packages/)"
    r"|^<frozen "
)


def users_line(lines: Iterable[str]) -> str | None:
    """The first line in user code, outside crossshard and other libraries.

    Args:
      lines: as ``file:line``, innermost first.

    >>> users_line(["/lib/python3.11/site-packages/flax/nnx/norm.py:9", "train.py:12", "main.py:3"])
    'train.py:12'
    """
    return next((line for line in lines if not (_is_ours(line) or _LIBRARIES.search(line))), None)


def source_of(lines: Iterable[str]) -> str | None:
    """The line of user code, or if there is none, the first outside crossshard.

    ``None`` for a step of crossshard's that its command has lowered.
    """
    called = list(itertools.takewhile(lambda line: not line.startswith(_COMMAND), lines))
    return users_line(called) or next((line for line in called if not _is_ours(line)), None)


def _is_ours(line: str) -> bool:
    return line.startswith(_OURS) or "-packages/crossshard/" in line
