"""make_train_step: from a loss and an optimizer to the compiled step of all shards."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax
from crossshard.errors import ArgumentError, ArgumentTypeError, CrossshardError
from crossshard.gradients.incoming import Incoming
from crossshard.gradients.reduction import Reduction
from crossshard.optimizer.cross_shard_optimizer import (
    CrossShardOptimizer,
    pipeline_of,
    refuse_variables_behind,
)
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.plan import WeightUpdate, check_weight_update, plan_update
from crossshard.pipeline.weigh import Weigh
from crossshard.shards.context import check_num_shards
from crossshard.shards.devices import check_number_of_devices, mesh_for
from crossshard.shards.partition import ANY, TPU
from crossshard.train_step.agreement import check_agreement, checksum
from crossshard.train_step.batches import BatchPlacer, check_weight
from crossshard.train_step.compiler_options import compiler_options
from crossshard.train_step.description import describe
from crossshard.train_step.layout import StateLayout, check_key, replicated
from crossshard.train_step.loss import with_rng
from crossshard.train_step.models import check_params, combine, partition
from crossshard.train_step.state import TrainState
from crossshard.train_step.step_function import StepFunction
from crossshard.variables.per_shard import of_all


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    num_shards: int | None = None,
    weight_update: str = WeightUpdate.AUTO,
    weight: str | Callable[[Any], Any] | None = None,
    has_aux: bool = False,
) -> "TrainStep":
    """Build the whole training step of all shards: loss, gradients, reduction, weight update.

    ``state = step.init(params)`` returns the state, ``state, metrics = step(state, batch)`` takes
    a step and donates the state. The parameters equal those of one device with the whole batch,
    however the update is sharded.

    Args:
      loss_fn: ``loss_fn(params, batch)``, or ``loss_fn(params, batch, rng)``, the mean loss of one
        shard's rows of the batch, float[]. ``params`` is the model that ``init`` got: a pytree,
        an Equinox module, or an NNX module, which the loss may write to. ``rng`` is a key of this
        step and shard; it is also passed to an optional parameter (``rng=None``, or a name that
        ends in ``rng`` or ``key``).
      optimizer: an Optax transformation, whose gradients are averaged over the shards; or a
        CrossShardOptimizer with its own reduction and groups.
      mesh: the mesh to run on; all its axes count shards. If ``None``, a mesh of ``num_shards``
        devices.
      num_shards: the number of shards; all devices if ``None``.
      weight_update: ``"sharded"``: each shard updates its slice of the parameters and keeps its
        slice of the optimizer state (ZeRO-1, Xu et al. 2020, arXiv 2004.13336).
        ``"replicated"``: each updates all. ``"auto"``: sharded if the optimizer is proven
        elementwise and it pays.
      weight: the number of examples or tokens of a shard: the name of the batch entry to sum,
        such as a mask, or a function from a shard's batch to float[]. The mean is then
        sum(w · g) / sum(w), and a batch whose rows do not divide is padded with zeros.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.

    Returns:
      A TrainStep.

    Raises:
      ArgumentError: an unknown ``weight_update``, an impossible number of shards, weight with SUM.
      ArgumentTypeError: not a function, not an optimizer, or not a mesh.
      VariableError: the optimizer closes over an NNX variable, as a schedule may.

    >>> import jax.numpy as jnp, optax
    >>> loss_fn = lambda w, batch: ((batch["x"] * w - batch["y"]) ** 2).mean()
    >>> train_step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1)
    >>> state = train_step.init(jnp.float32(0))
    >>> state, metrics = train_step(state, {"x": jnp.ones(4), "y": jnp.ones(4)})
    >>> float(state.params), float(metrics["loss"])
    (0.20000000298023224, 1.0)
    """
    if not callable(loss_fn):
        raise ArgumentTypeError(f"loss_fn must be a function; got {loss_fn!r:.60}.")
    if not isinstance(optimizer, CrossShardOptimizer):
        optimizer = CrossShardOptimizer(optimizer)
    refuse_variables_behind(optimizer)
    where = _jax.with_automatic_axes(_mesh_for(num_shards, mesh))
    loss_fn, takes_rng = with_rng(loss_fn)
    function = StepFunction(
        loss_fn,
        takes_rng,
        has_aux,
        check_weight(weight),
        _check_pipeline(pipeline_of(optimizer), where, weight),
        optimizer.get_name(),
    )
    sharding = check_weight_update(weight_update)
    if sharding is WeightUpdate.AUTO and optimizer.weight_update is WeightUpdate.SHARDED:
        sharding = WeightUpdate.SHARDED
    return TrainStep(function, where, sharding)


def _mesh_for(num_shards: int | None, mesh: Mesh | None) -> Mesh:
    """The mesh of this many shards, or of any number if ``None``.

    Raises:
      ArgumentError: the mesh has another number of devices; there are fewer devices.
      ArgumentTypeError: not a mesh, or not a number.
    """
    if num_shards is None:
        return mesh_for(len(jax.devices()) if mesh is None else 1, mesh)
    found = mesh_for(check_num_shards(num_shards), mesh)
    check_number_of_devices(num_shards, found)
    return found


def _check_pipeline(pipeline: Pipeline, mesh: Mesh, weight: Any) -> Pipeline:
    """The optimizer's pipeline for a step on this mesh, or an error if it does not fit."""
    if weight is not None and pipeline.reduction is Reduction.SUM:
        raise ArgumentError(
            "weight is a shard's weight in a mean, but the optimizer's reduction is SUM. Use MEAN, "
            "or leave weight out and weigh the loss."
        )
    if pipeline.groups is not None:
        pipeline.groups.check_covers(mesh.size)
    if pipeline.over_all_shards:
        # One group of all shards, in any order, is the same as no groups.
        pipeline = dataclasses.replace(pipeline, groups=None)
    if pipeline.axis_name and set(pipeline.axis_name) != set(mesh.axis_names):
        raise ArgumentError(
            f"The optimizer reduces over the axes {list(pipeline.axis_name)}, but the mesh has "
            f"{list(mesh.axis_names)}, and all of them count shards here. Leave axis_name out, or "
            f"pass a mesh of only those axes. For a model that is split over another axis, use "
            f"the optimizer in your own jax.shard_map."
        )
    if pipeline.incoming not in (None, Incoming.LOCAL):
        raise ArgumentError(
            f"The optimizer declares incoming={str(pipeline.incoming)!r}, but a step computes the "
            f"gradients itself, and they are local. Leave incoming out."
        )
    return dataclasses.replace(pipeline, weigh=None if weight is None else Weigh())


class TrainStep:
    """A training step of all shards, as ``make_train_step`` returns it.

    >>> import jax.numpy as jnp, optax
    >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
    >>> _ = step.init(jnp.float32(3))
    >>> print(step.describe().splitlines()[0])
    local gradient → mean over all shards → update on every shard
    """

    def __repr__(self) -> str:
        loss = getattr(
            self._function.loss_fn, "__qualname__", type(self._function.loss_fn).__name__
        )
        axes = ", ".join(f"{name}: {size}" for name, size in self._mesh.shape.items())
        strategy = None if self._latest is None else self._latest[0].plan.strategy
        return f"TrainStep({loss} on {axes}; {self._function.pipeline.describe(strategy)})"

    def __init__(self, function: StepFunction, mesh: Mesh, weight_update: WeightUpdate):
        self._function = function
        self._mesh = mesh
        self._weight_update = weight_update
        self._place = BatchPlacer(mesh, function.weight)
        self._layouts: dict[Any, StateLayout] = {}
        self._latest: tuple[StateLayout, TrainState] | None = None
        groups = None if function.pipeline.over_all_shards else function.pipeline.groups
        self._options = compiler_options(
            mesh.devices.flat[0].platform, mesh.size if groups is None else groups.size
        )
        self._compiled = jax.jit(
            self._run, donate_argnums=0, compiler_options=self._options or None
        )
        # JAX refuses options for what runs inside another jit.
        self._traced = jax.jit(self._run)

    @property
    def mesh(self) -> Mesh:
        """The mesh that the step runs on."""
        return self._mesh

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The options that the step is compiled with, here or by ``lower(...).compile()``.

        Those of GPUs that bring the communication beside the matrix products, unless you have set
        them in XLA_FLAGS; empty on other devices. Within a ``jax.jit`` of your own JAX takes only
        that one's: ``jax.jit(run, compiler_options=step.compiler_options)``.
        """
        return dict(self._options)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one step.

        Args:
          state: the state from ``init`` or the last step; it is donated.
          batch: a pytree of arrays, split over the shards along axis 0. If there are several
            processes, each passes its own rows.

        Returns:
          The next state, and the metrics: ``"loss"``, float[], reduced like the gradients
          (``[shards]`` with groups); with ``weight``, ``"weight"``, float[], the sum of the
          weights of all shards, or of the group: if it is 0, parameters and optimizer state are
          unchanged; with ``has_aux``, ``"aux"``, ``[shards, …]``.

        Raises:
          ArgumentError, ArgumentTypeError: the batch cannot be split, or the state is not of this
            step.
        """
        _check_state(state)
        # Under jax.grad the backward pass needs the state again, so it is not donated.
        run = self._compiled if _jax.at_top_level() else self._traced
        if _jax.another_mesh_is_set(self._mesh):
            with _jax.in_place_of_the_users_mesh(self._mesh):
                return self._explained(run, state, self._place(batch))
        # Without a context, which costs a microsecond at every step.
        return self._explained(run, state, self._place(batch))

    def _explained(self, compiled: Callable[..., Any], state: Any, batch: Any) -> Any:
        try:
            return compiled(state, batch)
        except ValueError as error:
            _check_not_of_mesh(error)
            raise

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lower the step for arrays, or for their types (see ``abstract_init``).

        The batch is as for a call: if there are several processes, this one's own rows.
        """
        _check_state(state)
        with _jax.in_place_of_the_users_mesh(self._mesh):
            return self._explained(self._compiled.lower, state, self._place.abstract(batch))

    def _run(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        layout = self._layout_of(state)
        layout.check(state)
        return self._function(layout, state, batch)

    # State.

    def init(self, params: Any, rng: Any = 0) -> TrainState:
        """The state before the first step, on the devices of the mesh.

        Args:
          params: the model that the loss takes: a pytree of arrays, an Equinox module or an NNX
            module. It is copied.
          rng: a PRNG key or a seed; each step and shard derives its own key.

        Raises:
          ArgumentError: there is nothing to train, the optimizer would train what is not meant
            to be trained, parameters are sharded, or another process passes something else.
          ArgumentTypeError: a leaf is neither an array nor hashable, or ``rng`` is not a key.
        """
        impl, key = check_key(rng)
        make, arrays, abstract = self._initial(params, impl, key)
        self._check_agreement(
            "init",
            {
                "parameters": arrays[0],
                "the model's other state": arrays[1],
                "rng": key,
                "optimizer": abstract.opt_state,
            },
        )
        arrays, key = jax.tree.map(lambda x: replicated(self._mesh, x), (arrays, key))
        with _jax.in_place_of_the_users_mesh(self._mesh):
            return make(arrays, key)

    def _check_agreement(self, call: str, given: dict[str, Any]) -> None:
        check_agreement(
            call,
            lambda: {name: checksum(tree) for name, tree in given.items()},
            self._mesh,
            "Replicated arrays must be equal in every process: create them from the same seed, or "
            "load the same checkpoint.",
        )

    def abstract_init(self, params: Any) -> TrainState:
        """The types and shardings of ``init``'s state, to ``lower`` without devices."""
        _, _, abstract = self._initial(params, *check_key(0))
        return abstract

    def _initial(self, params: Any, impl: Any, key: jax.Array) -> tuple[Any, Any, TrainState]:
        """A compiled function of arrays and key, the arrays, and the types of its result."""
        skeleton, *arrays = partition(params)
        layout = self._layout(arrays[0])
        check_params(params, arrays[0], self._function.pipeline.optimizer)

        def make(arrays: Any, key: Any) -> TrainState:
            return layout.initial(skeleton, impl, arrays, key)

        # Of the types that the arrays will have, so that JAX need not trace it again for them.
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.result_type(x), sharding=everywhere),
            (arrays, key),
        )
        with _jax.in_place_of_the_users_mesh(self._mesh):
            types = jax.eval_shape(make, *given)
        shardings = layout.shardings(types)
        abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            types,
            shardings,
        )
        self._latest = layout, abstract
        return jax.jit(make, out_shardings=shardings), arrays, abstract

    def unshard(self, state: TrainState) -> TrainState:
        """The state replicated on every device, its arrays in the optimizer's own shapes.

        Use it to save, to inspect, or to ``reshard`` on another number of shards. The given state
        stays valid.
        """
        _check_state(state)
        layout = self._layout_of(state)
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        return self._relaid(layout.unpack, state, jax.tree.map(lambda _: everywhere, state))

    def reshard(self, state: TrainState) -> TrainState:
        """Shard an unsharded state for this step, from any number of shards.

        If the number changes, statistics of an NNX module and the state of the preprocessor are
        averaged, and random streams get new keys.

        Raises:
          ArgumentError: the state is another optimizer's, or its groups are not of this step.
        """
        _check_state(state)
        layout = self._layout_of(state)
        layout.check_optimizer(state)
        self._check_agreement("reshard", {"a state": state})
        state = jax.tree.map(lambda x: replicated(self._mesh, x), state)
        if not layout.has_number_of_shards(state):
            if self._grouped:
                raise ArgumentError(
                    f"The state has groups over another number of shards than {self._mesh.size}. "
                    f"Choose one shard's parameters with other.model(state, shard=0) and init with "
                    f"them."
                )
            state = layout.on_other_shards(state)
        return self._relaid(layout.pack, state, layout.shardings(state))

    def _relaid(self, how: Callable[[Any], Any], state: TrainState, to: TrainState) -> TrainState:
        with _jax.in_place_of_the_users_mesh(self._mesh):
            return jax.jit(lambda state: how(jax.tree.map(jnp.copy, state)), out_shardings=to)(
                state
            )

    def model(self, state: TrainState, shard: int | None = None) -> Any:
        """The model with the parameters of a state, to evaluate or to export.

        Args:
          state: a state of this step.
          shard: the shard whose model to return. If ``None``, per-shard arrays of an NNX module are
            averaged if floating (statistics), otherwise taken from the first shard.

        Raises:
          ArgumentError: parameters differ between groups, and ``shard`` is ``None``.
        """
        _check_state(state)
        params, model_state = state.params, state.model_state
        if self._grouped and shard is None:
            raise ArgumentError(
                f"With group_assignment {self._function.pipeline.groups} the parameters differ "
                f"between shards. Choose one: model(state, shard=0)."
            )
        if self._grouped:
            params = jax.tree.map(lambda x: x[shard], params)
        if state.skeleton.is_nnx:
            of_shard = lambda x: of_all(x) if shard is None else x[shard]
            model_state = jax.tree.map(of_shard, model_state)
        # Copied, since the next step donates the state.
        return combine(state.skeleton, *jax.tree.map(jnp.copy, (params, model_state)))

    # Description.

    def describe(self) -> str:
        """The pipeline, the weight update with its reason, and the arrays with their sizes.

        Raises:
          ArgumentError: neither ``init`` nor ``abstract_init`` has been called.
        """
        if self._latest is None:
            raise ArgumentError(
                "How the weights are updated depends on the parameters: call init(params), or "
                "abstract_init(params), first."
            )
        return describe(self._function, *self._latest)

    def _layout_of(self, state: TrainState) -> StateLayout:
        return self._layout(_of_one(state.params) if self._grouped else state.params)

    def _layout(self, params: Any) -> StateLayout:
        leaves, tree = jax.tree.flatten(params)
        key = tree, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if key not in self._layouts:
            groups = self._function.pipeline.groups if self._grouped else None
            number = self._mesh.size if groups is None else groups.size
            pipeline = self._function.pipeline
            plan = plan_update(
                pipeline.optimizer,
                params,
                number,
                self._weight_update,
                only_parts=groups is not None,
                tile=TPU if self._mesh.devices.flat[0].platform == "tpu" else ANY,
            )
            self._layouts[key] = StateLayout(self._mesh, plan, groups, pipeline)
        return self._layouts[key]

    @property
    def _grouped(self) -> bool:
        return not self._function.pipeline.over_all_shards


def _of_one(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)


def _check_not_of_mesh(error: ValueError) -> None:
    """Raise our own error if JAX refused a loss that shards arrays over the mesh."""
    if isinstance(error, CrossshardError) or not _jax.is_of_manual_axes(error):
        return
    raise ArgumentError(
        f"The loss shards an array over the mesh, which JAX refuses "
        f"({str(error).splitlines()[0]:.80}…): inside of a step every axis of the mesh counts "
        f"shards, and each shard runs the loss on its own, on the full parameters. Leave out "
        f"with_sharding_constraint and shard_map, and write flax.linen.unbox(params) for Linen's "
        f"Partitioned boxes. For a model that is split over an axis, use a CrossShardOptimizer in "
        f"your own jax.shard_map."
    ) from error


def _check_state(state: Any) -> None:
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
