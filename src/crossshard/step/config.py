"""StepConfig: what a step is made of; of it, the layouts of its states, and the first of these."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from crossshard import _check, _jax, _mesh
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.model.layout import StateLayout
from crossshard.model.model_state import check_initial
from crossshard.model.models import check_params, partition
from crossshard.model.state import TrainState
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.update.plan import Planner, WeightUpdate
from crossshard.shards.cut import check_fits, only, other_axes_of
from crossshard.shards.devices import number_of_shards, put_whole, shards_on, types_on
from crossshard.step.losses.loss import StepLoss
from crossshard.step.step_function import StepFunction

# XLA takes four times as long for a program with twice as many outputs.
_MOST = 1024


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a step is made of.

    Attributes:
      function: the computation.
      mesh: the mesh, with ``AxisType.Auto`` axes, on which the step computes.
      outer_mesh: the mesh as the user made it, on which states, batches and metrics lie.
      axes: its shard axes.
      weight_update: where the weights are updated.
      in_parts: whether the parameters rest in parts.
      wrt: what chooses the trained parameters; ``None`` for all.
      donate: whether a call overwrites its state.
    """

    function: StepFunction
    mesh: Mesh
    outer_mesh: Mesh
    axes: tuple[str, ...]
    weight_update: WeightUpdate
    in_parts: bool = False
    wrt: Any = None
    donate: bool = True

    @property
    def loss(self) -> StepLoss:
        """The loss, with what it does to a batch."""
        return self.function.loss

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the gradients."""
        return self.function.pipeline

    @property
    def number_of_shards(self) -> int:
        """The number of shards."""
        return number_of_shards(self.mesh, self.axes)

    @property
    def is_grouped(self) -> bool:
        """Whether each group has its own parameters."""
        return not self.pipeline.over_all_shards


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


class Layouts:
    """The layout of each kind of state that a step has met, and the first state."""

    def __init__(self, config: StepConfig):
        self._config = config
        self._known: dict[Any, StateLayout] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of_state(self, state: TrainState) -> StateLayout:
        """The layout of a state, or of its types."""
        params = state.params
        if self._config.is_grouped:
            params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
        return self.of_params(params, state.other_axes)

    def of_params(self, params: Any, other_axes: tuple[PartitionSpec, ...]) -> StateLayout:
        """The layout of a state with such parameters.

        Args:
          params: one set of parameters.
          other_axes: how arrays are split over the other axes.
        """
        leaves, tree = jax.tree.flatten(params)
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        key = tree, shapes, other_axes
        if key not in self._known:
            types = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*each) for each in shapes])
            # What is traced here runs under another mesh than the user may have set.
            with _mesh.without_mesh():
                self._known[key] = self._plan(params, types, other_axes)
        return self._known[key]

    def _plan(self, params: Any, types: Any, other_axes: tuple[PartitionSpec, ...]) -> StateLayout:
        config = self._config
        mesh, pipeline = config.mesh, config.pipeline
        shards = shards_on(mesh, config.axes, pipeline.groups if config.is_grouped else None)
        check_fits(params, other_axes, mesh)
        # JAX drops axes of size 1 from the shardings of its results.
        several = [axis for axis, size in mesh.shape.items() if size > 1]
        split = tuple(only(each, several) for each in other_axes)
        planner = Planner(
            pipeline.optimizer,
            params,
            shards,
            mesh,
            config.weight_update,
            config.in_parts,
            # A preprocessor may read them all.
            leave_unread=pipeline.preprocess is None,
            other_axes=split[: len(jax.tree.leaves(params))],
            virtual_shards=config.loss.same_bits,
        )
        model_state = config.loss.model_state
        return StateLayout(
            mesh,
            shards,
            *planner.plan(),
            pipeline,
            types,
            model_state,
            split,
            has_one_state=config.loss.has_one_state,
        )

    # The first state.

    def prepare(self, params: Any, rng: Any, model_state: Any) -> Initial:
        """What ``init`` needs to make the state of a model; nothing is computed yet.

        Raises:
          ArgumentError, ArgumentTypeError: see ``TrainStep.init``.
        """
        config, (impl, key) = self._config, check_key(rng)
        mesh, kind = config.mesh, config.loss.model_state
        has_one = config.loss.has_one_state
        model_state = check_initial(kind, params, model_state, has_one_state=has_one)
        skeleton, *arrays = partition(params, config.wrt)
        if kind is not None:
            arrays[2] = model_state
        # Model state may be placed in any way on a mesh whose axes are all shard axes.
        of = arrays if len(config.axes) < len(mesh.axis_names) else arrays[:2]
        other_axes = other_axes_of(of, mesh, config.axes, in_parts=config.in_parts)
        layout = self.of_params(arrays[0], other_axes)
        check_params(params, arrays[0], config.pipeline.optimizer, config.wrt)

        def make(arrays: Any, key: Any) -> TrainState:
            state = layout.initial(skeleton, impl, arrays, key)
            return dataclasses.replace(state, other_axes=other_axes)

        # Of the types that the arrays will have, so that JAX need not trace it again for them.
        given = types_on(mesh, (arrays, key), layout.specs_of_arrays(arrays[1]))
        with _mesh.in_place_of_the_users_mesh(mesh):
            types = jax.eval_shape(make, *given)
        config.loss.check_state(types)
        shardings = layout.shardings(types)
        types = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            types,
            shardings,
        )
        return Initial(layout, types, jax.jit(make, out_shardings=shardings), arrays, key, given)

    def first(self, initial: Initial) -> TrainState:
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
        check_equal_everywhere(self._config, "init", parts)
        both = (initial.arrays, initial.key)
        arrays, key = jax.tree.map(lambda x, to: put_whole(x, to.sharding), both, initial.given)
        with _mesh.in_place_of_the_users_mesh(self._config.mesh):
            if len(jax.tree.leaves(initial.types)) <= 2 * _MOST:
                return initial.make(arrays, key)
            return _in_pieces(initial, jax.tree.leaves((arrays, key)))


def check_key(rng: Any) -> tuple[Any, jax.Array]:
    """The implementation and the data of a key, from a key or a seed.

    Raises:
      ArgumentError: the seed is too large.
      ArgumentTypeError: ``rng`` is neither a key nor a seed.
    """
    dtype = getattr(rng, "dtype", None)
    if isinstance(rng, int | np.integer) and not isinstance(rng, bool):
        if not -(1 << 63) <= rng < 1 << 63:
            raise ArgumentError(f"rng must be a seed of at most 64 bits, with its sign; got {rng}.")
        rng = jax.random.key(rng)
    elif dtype == jnp.uint32 and rng.ndim == 1:  # as jax.random.PRNGKey makes them
        rng = jax.random.wrap_key_data(jnp.asarray(rng))
    elif dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or rng.shape != ():
        raise ArgumentTypeError(
            f"rng must be a seed or a key such as jax.random.key(0); got {_check.shown(rng)} "
            f"({type(rng).__name__})."
        )
    return jax.random.key_impl(rng), jax.random.key_data(rng)


def _in_pieces(initial: Initial, inputs: list[Any]) -> TrainState:
    """The state from several programs, each of some of its arrays."""
    jaxpr = initial.make.trace(*initial.given).jaxpr
    types, tree = jax.tree.flatten(initial.types)
    made: list[Any] = []
    for start in range(0, len(types), _MOST):
        own = types[start : start + _MOST]
        wanted = [start <= place < start + _MOST for place in range(len(types))]
        pruned, taken = _jax.pruned(jaxpr, wanted)
        run = jax.jit(jaxpr_as_fun(pruned), out_shardings=[x.sharding for x in own])
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
