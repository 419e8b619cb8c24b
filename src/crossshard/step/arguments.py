"""Arguments: what the calls of a step refuse."""

from collections.abc import Sequence
from typing import Any

import jax

from crossshard import _jax
from crossshard.errors import ArgumentError, ArgumentTypeError, CrossshardError
from crossshard.model.state import TrainState


def check_not_of_mesh(error: ValueError, axes: tuple[str, ...]) -> None:
    """Raise our own error if JAX refused a loss that shards arrays over the mesh.

    Raises:
      ArgumentError: it did.
    """
    if isinstance(error, CrossshardError) or not _jax.is_of_manual_axes(error):
        return
    raise ArgumentError(
        f"The loss shards an array over the mesh, which JAX refuses "
        f"({str(error).splitlines()[0]:.80}…): inside of a step {', '.join(axes)} are the shard "
        f"axes, and each shard runs the loss on its own, on the full parameters. Leave these "
        f"axes out of with_sharding_constraint and shard_map, pass no mesh to the latter, and "
        f"write flax.linen.unbox(params) for Linen's Partitioned boxes. For a model that is split "
        f"over another axis, write make_train_step(..., mesh=mesh, axis_name=...) with the shard "
        f"axes."
    ) from error


def check_state(state: Any) -> None:
    """Raise unless it is a state that has not been donated.

    Raises:
      ArgumentError: it was donated.
      ArgumentTypeError: it is something else.
    """
    if not isinstance(state, TrainState):
        raise ArgumentTypeError(
            f"A step takes the state that init(params) or the step before returned; got "
            f"{type(state).__name__}."
        )
    # Types and traced values have no buffers.
    count = state.step
    has_buffer = isinstance(count, jax.Array) and not isinstance(count, jax.core.Tracer)
    if has_buffer and count.is_deleted():
        raise ArgumentError(
            "This state has been used: it was donated to a step. Use the state that the step "
            "returned: state, metrics = step(state, batch)."
        )


def refuse_more(more: Sequence[Any]) -> None:
    """Raise for what was passed to a step after the batch.

    Raises:
      ArgumentTypeError: always.
    """
    kinds = ", ".join(type(each).__name__ for each in more)
    raise ArgumentTypeError(
        f"A step takes a state and a batch; got {len(more)} more: {kinds}. Pass all arrays as one "
        f"batch, such as step(state, {{'x': x, 'y': y}}), of which the loss reads batch['x'] and "
        f"batch['y']. Pass a random key to init(params, rng=key): each step and shard derives its "
        f"own from it."
    )
