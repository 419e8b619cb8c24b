"""What becomes of rows where random numbers are drawn: each needs a key of its own.

A primitive that is not in the table is not known, and nothing is said of what it draws of rows.
"""

import functools
from collections.abc import Sequence

from crossshard.jaxprs.primitives import KEYS
from crossshard.jaxprs.row_facts import Fact, Free, Obstacle, Pair, Rows, power_of

SAME_NOISE = "noise from a key that is the same on every shard"

# What makes more of a key than there was: a number, or keys.
_DRAWS = frozenset({"random_bits", "random_gamma", "random_split"})


@functools.cache
def is_random(name: str) -> bool:
    """Whether the name of a primitive says that it is about random numbers."""
    return any(word in name for word in ("random", "rng", "threefry"))


def drawn(pair: Pair, inputs: Sequence[Fact], axis: int | None = None) -> list[Fact] | Obstacle:
    """The facts of the outputs.

    Args:
      pair: the equations, of a primitive that is random.
      inputs: the facts of what they take, rows or free of the batch.
      axis: the axis along which the outputs grow, if no input has rows.
    """
    number, place = len(pair.one.outvars), KEYS.get(pair.name)
    if place is None or not all(isinstance(fact, Free | Rows) for fact in inputs):
        return pair.undecided(f"{pair.name}, of which nothing is known")
    if power_of(pair, inputs) != 0:
        return pair.undecided(f"{pair.name} of the number of rows")
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    axes = {fact.axis for fact in rows} if axis is None else {axis}
    if len(axes) > 1 or not all(fact.is_plain for fact in rows):
        return pair.undecided(f"{pair.name} of keys in two orders")
    (axis,) = axes
    key = inputs[place]
    if isinstance(key, Free) and pair.name in _DRAWS and not key.own:
        return pair.compared(SAME_NOISE)
    # One key draws another number for each row; keys of rows that are equal draw the same.
    constant = bool(rows) and all(fact.constant for fact in rows)
    constant = constant and (isinstance(key, Rows) or pair.name not in _DRAWS)
    return [Rows(axis, constant=constant)] * number
