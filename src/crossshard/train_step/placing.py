"""Where the state of a step lies on the mesh: whole, in parts, or one for each shard."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.collectives.parts import Cut
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.optimizer.weight_update import Plan, map_cuts
from crossshard.shards.groups import GroupAssignment
from crossshard.train_step.models import Skeleton
from crossshard.train_step.state import TrainState
from crossshard.variables.random_streams import own_stream


@dataclasses.dataclass(frozen=True)
class Placing:
    """How a state lies on the mesh.

    Attributes:
      mesh: the mesh, every axis of which counts shards.
      plan: how parameters and optimizer state are cut.
      groups: the groups whose parameters differ; ``None`` where all shards have the same.
    """

    mesh: Mesh
    plan: Plan
    groups: GroupAssignment | None

    def specs(self, state: TrainState) -> TrainState:
        """The spec of every array of a state."""
        whole, each = PartitionSpec(), PartitionSpec(self.mesh.axis_names)
        shared = whole if self.groups is None else each
        others = each if state.skeleton.is_nnx else whole

        def cut(cut: Cut, leaf: Any) -> PartitionSpec:
            del leaf
            return cut.spec(self.mesh.axis_names) if self.groups is None else each

        return dataclasses.replace(
            state,
            step=whole,
            params=jax.tree.map(lambda _: shared, state.params),
            opt_state=map_cuts(cut, self.plan.state, state.opt_state),
            others=jax.tree.map(lambda _: others, state.others),
            rng=whole,
        )

    def shardings(self, state: TrainState) -> TrainState:
        """The sharding of every array of a state."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(state))

    def check(self, state: TrainState) -> None:
        """Raise unless a state is one of this step.

        Raises:
          ArgumentError: its optimizer state is another rule's or laid out otherwise, or what is
            stored as ``[shards, …]`` is of other shards.
        """
        self.check_rule(state)
        lead = () if self.groups is None else (self.mesh.size,)
        opt_state = [
            (*lead, *(cut.stored_shape if self.groups is None else cut.part_shape))
            for cut in self.plan.state
        ]
        self._check_shapes("The optimizer state", state.opt_state, opt_state)
        for what, tree, each in (
            ("The state's parameters", state.params, self.groups is not None),
            ("What the module has besides parameters", state.others, state.skeleton.is_nnx),
        ):
            if each:
                shapes = [(self.mesh.size, *leaf.shape[1:]) for leaf in jax.tree.leaves(tree)]
                self._check_shapes(what, tree, shapes)

    def check_rule(self, state: TrainState) -> None:
        """Raise unless a state is of this step's rule, and grouped if this step is."""
        if state.grouped != (self.groups is not None):
            raise ArgumentError(
                f"The state is of a step {'with' if state.grouped else 'without'} groups that part "
                f"ways, and this step is one {'without' if state.grouped else 'with'} them. Choose "
                f"parameters with other.model(state) and init with them."
            )
        structure = jax.tree.structure(state.opt_state)
        if structure != self.plan.structure:
            raise ArgumentError(
                f"The optimizer state is another rule's: expected {self.plan.structure}, got "
                f"{structure}."
            )

    @staticmethod
    def _check_shapes(what: str, tree: Any, expected: list[tuple[int, ...]]) -> None:
        given = [leaf.shape for leaf in jax.tree.leaves(tree)]
        if given != expected:
            raise ArgumentError(
                f"{what} was laid out by another step: the arrays have shapes {given}, and here "
                f"they have {expected}. Write step.reshard(other.unshard(state))."
            )

    def of_one_shard(self, state: TrainState) -> TrainState:
        """What one shard sees of a state, inside a map over the mesh."""
        return self._map_each(lambda x: x[0], state)

    def of_all_shards(self, state: TrainState) -> TrainState:
        """The reverse: one shard's state as it leaves that map."""
        return self._map_each(lambda x: x[None], state)

    def _map_each(self, function: Callable[[Any], Any], state: TrainState) -> TrainState:
        """A function of every array that is stored as ``[shards, …]``."""
        if self.groups is not None:
            params, opt_state = jax.tree.map(function, (state.params, state.opt_state))
            state = dataclasses.replace(state, params=params, opt_state=opt_state)
        if state.skeleton.is_nnx:
            state = dataclasses.replace(state, others=jax.tree.map(function, state.others))
        return state

    def initial(
        self,
        inner: optax.GradientTransformation,
        skeleton: Skeleton,
        rng_impl: Any,
        arrays: Any,
        rng: Any,
    ) -> TrainState:
        """The state before the first step, from parameters and others that all shards have."""
        # Copied, since a step uses the buffers of its state again, and two must not be one.
        params, others = jax.tree.map(strong_copy, arrays)
        opt_state = jax.tree.map(strong_copy, inner.init(params))
        if self.groups is not None:
            params, opt_state = jax.tree.map(self._on_each, (params, opt_state))
        if skeleton.is_nnx:
            others = self.spread(others)
        return self.laid_out(
            TrainState(
                jnp.int32(0),
                params,
                opt_state,
                others,
                jnp.copy(rng),
                skeleton,
                rng_impl,
                self.groups is not None,
            )
        )

    def laid_out(self, state: TrainState) -> TrainState:
        """A state whose arrays have the shapes that the parameters have, as it is stored."""
        return self._map_opt_state(self._stored, state)

    def whole(self, state: TrainState) -> TrainState:
        """The reverse of ``laid_out``."""
        return self._map_opt_state(self._whole, state)

    def _map_opt_state(self, function: Callable[[Cut, Any], Any], state: TrainState) -> TrainState:
        opt_state = map_cuts(function, self.plan.state, state.opt_state)
        return dataclasses.replace(state, opt_state=opt_state)

    def _stored(self, cut: Cut, whole: jax.Array) -> jax.Array:
        if self.groups is None:
            return cut.stored(whole)
        if cut.number == 1:
            return whole
        parts = jax.vmap(cut.stored)(whole).reshape(self.mesh.size, cut.number, *cut.part_shape)
        return parts[np.arange(self.mesh.size), self.groups.position_of]

    def _whole(self, cut: Cut, stored: jax.Array) -> jax.Array:
        if self.groups is None:
            return cut.whole(stored)
        if cut.number == 1:
            return stored
        of_groups = stored[self.groups.members].reshape(-1, *cut.stored_shape)
        return jax.vmap(cut.whole)(of_groups)[self.groups.group_of]

    def _on_each(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (self.mesh.size, *x.shape))

    def spread(self, others: Any) -> Any:
        """What all shards have of a module besides its parameters, as ``[shards, …]``.

        Each shard gets random streams of its own.
        """

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, nnx.RngKey) or self.mesh.size == 1:
                return jax.tree.map(self._on_each, leaf)
            keys = self._on_each(leaf.get_raw_value())
            return leaf.replace(jax.vmap(own_stream)(keys, jnp.arange(self.mesh.size)))

        return jax.tree.map(one, others, is_leaf=_is_variable)


def of_all(x: jax.Array) -> jax.Array:
    """What stands for all shards of what each has: the mean of statistics, else the first's."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    # Not the mean of equal numbers, which rounds.
    return jnp.where((x == x[0]).all(0), x[0], x.mean(0))


def strong_copy(x: Any) -> jax.Array:
    """A copy with a type of its own: weak ones would be compiled for, and then strong ones."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jnp.copy(x)
    return jnp.copy(jnp.asarray(x, x.dtype))


def replicated(mesh: Mesh, x: Any) -> jax.Array:
    """An array that every process has, whole on every device of the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    if jax.process_count() == 1 or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))


def check_key(rng: Any) -> tuple[Any, jax.Array]:
    """What kind of key it is, and its data, of a key or a seed.

    Raises:
      ArgumentTypeError: it is neither.
    """
    dtype = getattr(rng, "dtype", None)
    if isinstance(rng, int | np.integer) and not isinstance(rng, bool):
        rng = jax.random.key(rng)
    elif dtype == jnp.uint32 and rng.ndim == 1:  # as jax.random.PRNGKey makes them
        rng = jax.random.wrap_key_data(jnp.asarray(rng))
    elif dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or rng.shape != ():
        raise ArgumentTypeError(
            f"rng must be a seed or a key such as jax.random.key(0); got {rng!r:.60} "
            f"({type(rng).__name__})."
        )
    return jax.random.key_impl(rng), jax.random.key_data(rng)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
