"""The layouts of a program's inputs: which piece of each every device holds."""

import functools
import math

import jax

# For each device, in the order of the program, the number of its piece.
Layout = tuple[int, ...]


def input_layouts(compiled: jax.stages.Compiled) -> list[Layout]:
    """For each input that the program uses, the piece that each device holds.

    >>> import jax.numpy as jnp
    >>> input_layouts(jax.jit(lambda w: 2 * w).lower(jnp.zeros(3)).compile())
    [(0,)]
    """
    infos, tree = jax.tree.flatten(compiled.args_info)
    shardings = tree.flatten_up_to(compiled.input_shardings)
    return [
        _layout(sharding, info.shape)
        for info, sharding in zip(infos, shardings, strict=True)
        # Unused arguments are None.
        if sharding is not None
    ]


def is_whole(layout: Layout) -> bool:
    """Whether the input is replicated."""
    return not any(layout)


@functools.lru_cache
def _layout(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Layout:
    if sharding.is_fully_replicated or not math.prod(shape):
        return (0,) * len(sharding.device_set)
    numbers: dict[tuple[int, ...], int] = {}
    # Its start identifies a piece. Slices have no step, and those of unsplit dimensions no start.
    return tuple(
        numbers.setdefault(tuple(each.start or 0 for each in index), len(numbers))
        for index in sharding.devices_indices_map(shape).values()
    )
