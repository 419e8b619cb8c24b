"""Initial: the state of a step before the first batch, made on the devices of its mesh."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax

from crossshard import _check, _jax, _mesh
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement
from crossshard.model.layout import StateLayout, check_key
from crossshard.model.model_state import check_initial
from crossshard.model.models import check_params, partition
from crossshard.model.state import TrainState
from crossshard.shards.model_axes import other_axes_of
from crossshard.shards.put import put_whole, types_on
from crossshard.step.config import StepConfig
from crossshard.step.layouts import Layouts
from crossshard.step.virtual_shards import check_state_is_shared

# XLA takes four times as long for a program with twice as many outputs.
_MOST = 1024


class Initial(NamedTuple):
    """What makes an initial state.

    Attributes:
      layout: its layout.
      types: its types and shardings.
      make: the compiled function of arrays and key.
      arrays: the parameters, the frozen arrays and the model state.
      key: the key.
      given: the types of arrays and key, on the mesh.
    """

    layout: StateLayout
    types: TrainState
    make: Any
    arrays: Any
    key: Any
    given: Any


def prepare(
    config: StepConfig, layouts: Layouts, params: Any, rng: Any, model_state: Any
) -> Initial:
    """What ``init`` needs to make the state of a model; nothing is computed yet.

    Raises:
      ArgumentError, ArgumentTypeError: see ``TrainStep.init``.
    """
    impl, key = check_key(rng)
    mesh, kind = config.mesh, config.loss.model_state
    model_state = check_initial(kind, params, model_state, over_batch=config.loss.is_over_batch)
    skeleton, *arrays = partition(params, config.wrt)
    if kind is not None:
        arrays[2] = model_state
    # Model state may be placed in any way on a mesh whose axes are all shard axes.
    of = arrays if len(config.axes) < len(mesh.axis_names) else arrays[:2]
    other_axes = other_axes_of(of, mesh, config.axes, in_parts=config.in_parts)
    layout = layouts.of_params(arrays[0], other_axes)
    check_params(params, arrays[0], arrays[1], config.pipeline.optimizer, config.wrt)

    def make(arrays: Any, key: Any) -> TrainState:
        state = layout.initial(skeleton, impl, arrays, key)
        return dataclasses.replace(state, other_axes=other_axes)

    # Of the types that the arrays will have, so that JAX need not trace it again for them.
    given = types_on(mesh, (arrays, key), layout.specs_of_arrays(arrays[1]))
    with _mesh.in_place_of_the_users_mesh(mesh):
        types = jax.eval_shape(make, *given)
    if config.loss.virtual_shards is not None:
        check_state_is_shared(types)
    shardings = layout.shardings(types)
    types = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        types,
        shardings,
    )
    return Initial(layout, types, jax.jit(make, out_shardings=shardings), arrays, key, given)


def run(config: StepConfig, initial: Initial) -> TrainState:
    """The initial state.

    Raises:
      ArgumentError: another process has something else.
    """
    parts = {
        "parameters": initial.arrays[0],
        "the model's other state": initial.arrays[1:],
        "rng": initial.key,
        "optimizer": initial.types.opt_state,
    }
    for name, tree in zip(("params", "params", "model_state"), initial.arrays, strict=True):
        _check.arrays(name, tree)
    check_equal_everywhere(config, "init", parts)
    both = (initial.arrays, initial.key)
    arrays, key = jax.tree.map(lambda x, to: put_whole(x, to.sharding), both, initial.given)
    with _mesh.in_place_of_the_users_mesh(config.mesh):
        if len(jax.tree.leaves(initial.types)) <= 2 * _MOST:
            return initial.make(arrays, key)
        return _in_pieces(initial, jax.tree.leaves((arrays, key)))


def _in_pieces(initial: Initial, inputs: list[Any]) -> TrainState:
    """The state from several programs, each of some of its arrays."""
    jaxpr = initial.make.trace(*initial.given).jaxpr
    types, tree = jax.tree.flatten(initial.types)
    made: list[Any] = []
    for start in range(0, len(types), _MOST):
        own = types[start : start + _MOST]
        wanted = [start <= place < start + _MOST for place in range(len(types))]
        pruned, taken = _jax.pruned(jaxpr, wanted)
        run = jax.jit(_jax.as_function(pruned), out_shardings=[x.sharding for x in own])
        made += run(*itertools.compress(inputs, taken))
    return tree.unflatten(made)


def check_equal_everywhere(config: StepConfig, call: str, parts: dict[str, Any]) -> None:
    """Raise unless all processes have the same arrays.

    Raises:
      ArgumentError: some differ.
    """
    check_agreement(
        call,
        lambda: {name: checksum(tree) for name, tree in parts.items()},
        config.mesh,
        "Replicated arrays must be equal in every process: create them from the same seed, or "
        "load the same checkpoint.",
    )
