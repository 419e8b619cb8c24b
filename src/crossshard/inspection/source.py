"""Which line of a program's own authors an instruction comes from."""

import re
from collections.abc import Sequence
from pathlib import Path

_OURS = f"{Path(__file__).parents[1]}/"

# What a training script calls, and the standard library in between: lines that are not its own.
_LIBRARIES = re.compile(
    r"/(site|dist)-packages/(crossshard|equinox|flax|jax|optax)/"
    r"|/lib/python3[^/]*/(?!site-packages/|dist-packages/)"
)


def users_line(candidates: Sequence[Sequence[str]]) -> str | None:
    """The first line that is the user's; where there is none, the innermost of all.

    Args:
      candidates: per instruction that may say it, its lines as ``file:line``, innermost first.

    >>> flax, own = "/lib/python3.11/site-packages/flax/nnx/norm.py:9", "train.py:12"
    >>> users_line([[], [flax, own, "main.py:3"]])
    'train.py:12'
    """
    lines = [line for each in candidates for line in each]
    return next((line for line in lines if not _is_library(line)), next(iter(lines), None))


def _is_library(line: str) -> bool:
    return line.startswith(_OURS) or _LIBRARIES.search(line) is not None
