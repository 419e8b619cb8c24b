"""Which piece of each of a program's inputs every device holds."""

import functools
import math

import jax

# For each device, in the order of the program, the number of its piece.
Pieces = tuple[int, ...]


def input_pieces(compiled: jax.stages.Compiled) -> list[Pieces]:
    """For each input that the program uses, the piece that each device holds.

    >>> import jax.numpy as jnp
    >>> input_pieces(jax.jit(lambda w: 2 * w).lower(jnp.zeros(3)).compile())
    [(0,)]
    """
    infos, tree = jax.tree.flatten(compiled.args_info)
    shardings = tree.flatten_up_to(compiled.input_shardings)
    return [
        _pieces(sharding, info.shape)
        for info, sharding in zip(infos, shardings, strict=True)
        # Unused arguments are None.
        if sharding is not None
    ]


def is_whole(pieces: Pieces) -> bool:
    """Whether the input is replicated."""
    return not any(pieces)


@functools.lru_cache
def _pieces(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Pieces:
    if sharding.is_fully_replicated or not math.prod(shape):
        return (0,) * len(sharding.device_set)
    numbers: dict[tuple[int, ...], int] = {}
    # Its start identifies a piece. Slices have no step, and those of unsplit dimensions no start.
    return tuple(
        numbers.setdefault(tuple(each.start or 0 for each in index), len(numbers))
        for index in sharding.devices_indices_map(shape).values()
    )
