"""Export: the parameters and the model of a state, of one shard or of all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossshard import _check, _mesh
from crossshard.errors import ArgumentError
from crossshard.model.models import combine
from crossshard.model.state import TrainState
from crossshard.shards.cut import of_all
from crossshard.step.config import StepConfig


def model_of(state: TrainState, arrays: tuple[Any, Any, Any], config: StepConfig) -> Any:
    """The model of such arrays, copied, since the next step donates the state."""
    # Before they are a model: a tree.map over an NNX module tears apart what it has tied.
    arrays = jax.tree.map(lambda x: _mesh.on_mesh(jnp.copy(x), config.outer_mesh), arrays)
    model = combine(state.skeleton, *arrays)
    return model if config.loss.model_state is None else (model, arrays[2])


def arrays_of(
    state: TrainState,
    shard: int | None,
    config: StepConfig,
    unshard: Callable[[TrainState], TrainState] | None,
) -> tuple[Any, Any, Any]:
    """The parameters, the frozen arrays and the model state of a shard, or of all.

    Args:
      state: a state of the step.
      shard: the shard; ``None`` for what all have, as after the last synchronisation, and the mean
        of statistics.
      config: what the step is made of.
      unshard: given, the moving average of the parameters is taken, from the state that this
        returns, in which it has its own shapes.

    Raises:
      ArgumentError: groups have other parameters and no shard is chosen, there is no such shard,
        or there is no average.
    """
    if shard is not None:
        shard = _check.index("shard", shard, config.number_of_shards, "shards")
    joins = config.pipeline.joins_groups and shard is None
    if config.is_grouped and shard is None and not joins:
        raise ArgumentError(
            f"With group_assignment {config.pipeline.groups} the parameters differ between "
            f"shards. Choose one: model(state, shard=0)."
        )
    # An index is an array on the host.
    with jax.transfer_guard("allow"):
        params = state.params if unshard is None else _average(state, config, unshard)
        if joins:
            params = config.pipeline.exported(state.opt_state, state.params)
        elif config.is_grouped:
            params = jax.tree.map(lambda x: x[shard], params)
        model_state = state.model_state
        if state.per_shard:
            of_shard = lambda x: of_all(x) if shard is None else x[shard]
            model_state = jax.tree.map(of_shard, model_state)
        return params, state.frozen, model_state


def _average(
    state: TrainState, config: StepConfig, unshard: Callable[[TrainState], TrainState]
) -> Any:
    """The moving average of the parameters, in their shapes and dtypes."""
    if config.pipeline.ema is None:
        raise ArgumentError(
            "This step keeps no moving average of the parameters. Write "
            "make_train_step(..., ema=0.999)."
        )
    # What rests in parts has its own shapes, and is not made whole.
    whole = unshard(state)
    average = optax.tree.get(whole.opt_state.inner_state, "ema")
    return jax.tree.map(lambda p, x: x.astype(p.dtype), state.params, average)
