"""Says what to write where a loop or branch in a loss mixes what varies with what does not."""

from collections.abc import Iterator
from contextlib import contextmanager

from crossshard import _jax
from crossshard.errors import ArgumentTypeError
from crossshard.shards.axes import Shards


@contextmanager
def explained_types(shards: Shards) -> Iterator[None]:
    """Trace a loss; where JAX compares types in vain, say how to make them equal.

    Raises:
      ArgumentTypeError: a carry starts equal on all shards and ends varying, or the outputs of
        branches differ so.
    """
    try:
        yield
    except TypeError as error:
        if not shards.has_vma or not _jax.is_of_varying_types(error):
            raise
        axes = shards.axes if len(shards.axes) > 1 else shards.axes[0]
        cast = f"jax.lax.pcast(jnp.zeros(()), {axes!r}, to='varying')"
        raise ArgumentTypeError(
            f"A loop or branch in the loss has a value that is equal on all shards, such as "
            f"jnp.zeros(()), where the other is varying over {axes!r}: the first carry and the "
            f"next, or the outputs of two branches. shard_map(check_vma=True) tells them apart. "
            f"Write {cast} for the former, or pass check_vma=False to that shard_map, under which "
            f"the gradients here are the same."
        ) from error
