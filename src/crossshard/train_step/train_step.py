"""TrainStep: the compiled step, and its state: created, resharded, exported, evaluated."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from crossshard import _jax
from crossshard.distributed.agreement import check_agreement, checksum, compare, processes_of
from crossshard.distributed.programs import check_same_program
from crossshard.distributed.progress import PROGRESS, entering
from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointWarning
from crossshard.pipeline.plan import WeightUpdate, plan_update
from crossshard.shards.devices import are_of_all_processes
from crossshard.shards.model_axes import OtherAxes, check_fits, only, other_axes_of
from crossshard.shards.partition import ANY, TPU
from crossshard.shards.put import put_whole, put_whole_unless_on, types_on
from crossshard.train_step.arguments import check_not_of_mesh, check_state, refuse_more
from crossshard.train_step.batches import BatchPlacer
from crossshard.train_step.compiler_options import compiler_options
from crossshard.train_step.description import describe, summarize
from crossshard.train_step.divergence import names_of_compared
from crossshard.train_step.donation import Donation
from crossshard.train_step.entries import EntryPlacer
from crossshard.train_step.evaluate import Evaluator
from crossshard.train_step.layout import StateLayout, check_key
from crossshard.train_step.local import Loss
from crossshard.train_step.mesh import number_of_shards
from crossshard.train_step.model_state import check_initial
from crossshard.train_step.models import check_params, combine, partition
from crossshard.train_step.options import adopted, completed
from crossshard.train_step.predict import Predictor
from crossshard.train_step.replay import copy, differing
from crossshard.train_step.state import TrainState
from crossshard.train_step.step_function import StepFunction
from crossshard.train_step.watch import Watch
from crossshard.variables.per_shard import of_all


class TrainStep:
    """A training step of all shards, as ``make_train_step`` returns it.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
    >>> _ = step.init(jnp.float32(3))
    >>> print(step.describe().splitlines()[0])
    local gradient → mean over all shards → update on every shard
    """

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}: {size}" for name, size in self._mesh.shape.items())
        strategy = None if self._latest is None else self._latest[0].plan.strategy
        description = self._function.describe(strategy)
        return f"TrainStep({self._function.loss.name} on {axes}; {description})"

    def __str__(self) -> str:
        shards = number_of_shards(self._mesh, self._axes)
        return summarize(self._function, shards, self._wrt, self._latest)

    def __init__(
        self,
        function: StepFunction,
        mesh: Mesh,
        axes: tuple[str, ...],
        weight_update: WeightUpdate,
        wrt: Any = None,
        *,
        donate: bool = True,
    ):
        self._function = function
        self._wrt = wrt
        self._mesh = mesh
        self._axes = axes
        self._weight_update = weight_update
        loss = function.loss
        names, number = loss.replicated_entries, loss.accumulate_steps
        self._place = (
            EntryPlacer(mesh, axes, loss.weight, names, number)
            if names
            else BatchPlacer(mesh, axes, loss.weight, number)
        )
        of_loss = mesh, axes, loss.weight, names, loss.model_state is not None
        self._evaluate, self._predict = Evaluator(*of_loss), Predictor(*of_loss)
        self._is_watched = are_of_all_processes(mesh) or PROGRESS.is_alone
        self._layouts: dict[Any, StateLayout] = {}
        self._in_processes = len(processes_of(mesh)) > 1
        self._agreed: set[Any] = set()
        self._relaying: dict[Any, Callable[[TrainState], TrainState]] = {}
        self._latest: tuple[StateLayout, TrainState] | None = None
        self._watch = Watch(function, mesh, axes)
        groups = None if function.pipeline.over_all_shards else function.pipeline.groups
        self._options = compiler_options(
            mesh.devices.flat[0].platform, mesh.size if groups is None else groups.size
        )
        self._donate = donate
        self._donation = Donation(mesh)
        self._compiled = jax.jit(
            self._run,
            donate_argnums=(0,) if donate else (),
            compiler_options=self._options or None,
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

    def __call__(
        self, state: TrainState, batch: Any, *more: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """Take one step.

        Args:
          state: the state from ``init`` or the last step; it is donated, unless the step was made
            with ``donate=False``.
          batch: a pytree of arrays, split over the shards along axis 0. If there are several
            processes, each passes its own rows.
          *more: refused: all arrays belong into one batch.

        Returns:
          The next state, and the metrics: ``"loss"``, float[], reduced like the gradients
          (``[shards]`` with groups); with ``weight``, ``"weight"``, float[], the sum of the
          weights of all shards, or of the group; with ``has_aux``, ``"aux"``, ``[shards, …]``, or
          ``[shards, accumulate_steps, …]``, or reduced by ``aux_reduction``; the requested
          ``metrics``; with ``check_divergence``, ``"divergence"``, a ``Divergence``; with
          ``nonfinite``, ``"nonfinite"``, a ``NonfiniteState``; with ``loss_scale``,
          ``"loss_scale"``, float[], the scale of this step. With ``weight``, ``loss_scale`` or
          ``nonfinite``, ``"skipped"``, bool[]: if all weights are 0, or the gradient is not
          finite, parameters, states and step count are unchanged.

        Raises:
          ArgumentError, ArgumentTypeError: the batch cannot be split, or the state is not of this
            step, or a leaf of the batch is a buffer of it, which is donated.
          ProgramMismatchError: another process is about to run another program.
          NonfiniteError: with ``nonfinite``: the call before the last was the ``limit``-th in a row
            that was not finite. ``state`` stays valid.
          DivergenceError: with ``check_divergence``, shards had different copies of an array at the
            call before the last; ``state`` stays valid.
        """
        if more:
            refuse_more(more)
        if not self._is_watched:
            return self._step(state, batch)
        with entering("step"):
            return self._step(state, batch)

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        check_state(state)
        if self._watch.is_on and _jax.at_top_level():
            # Before the state is donated, so that the caller can save it.
            self._watch.look(state.params, lambda: self.compared(state))
            after, metrics = self._run_once(state, batch)
            self._watch.add(metrics)
            return after, metrics
        return self._run_once(state, batch)

    def _run_once(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        # Under jax.grad the backward pass needs the state again, so it is not donated.
        run = self._compiled if _jax.at_top_level() else self._traced
        if self._donate and run is self._compiled:
            self._donation.check(state, batch)
        if self._in_processes or _jax.another_mesh_is_set(self._mesh):
            with _jax.in_place_of_the_users_mesh(self._mesh):
                if self._is_watched and self._in_processes:
                    PROGRESS.take(self._place.rows_of(batch))
                placed = self._place(batch)
                if self._in_processes and run is self._compiled:
                    self._check_program(state, placed)
                return self._explained(run, state, placed)
        # Without a context, which costs a microsecond at every step.
        return self._explained(run, state, self._place(batch))

    def _check_program(self, state: TrainState, batch: Any) -> None:
        """Before the first run of a program, raise unless every process runs the same one."""
        leaves, tree = jax.tree.flatten(batch)
        # With weights each process may pass another number of rows, at any step.
        free = self._function.loss.weight is not None
        key = tree, *((x.shape[free:], x.dtype) for x in leaves), len(self._layouts)
        if key in self._agreed:
            return
        self._agreed.add(key)
        rows = lambda: {"rows": str([x.shape[:1] for x in leaves])}
        if not free or compare("step", rows, self._mesh) is None:
            check_same_program(self._explained(self._compiled.lower, state, batch), self._mesh)

    def _explained(self, compiled: Callable[..., Any], state: Any, batch: Any) -> Any:
        try:
            return compiled(state, batch)
        except ValueError as error:
            check_not_of_mesh(error, self._axes)
            raise

    def finish(self, state: TrainState) -> None:
        """Wait for the last steps, and raise what they have found, as further calls would.

        Call it after the last step, with ``nonfinite`` or ``check_divergence``. If there are
        several processes, all of them call it.

        Args:
          state: the state after the last step; it stays valid.

        Raises:
          NonfiniteError: as a call does.
          DivergenceError: as a call does.

        >>> import jax.numpy as jnp, optax
        >>> from crossshard import NonfiniteError, make_train_step
        >>> loss_fn = lambda w, x: (w * x).mean()
        >>> step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1, nonfinite="raise")
        >>> state, _ = step(step.init(jnp.float32(3)), jnp.array([jnp.nan]))
        >>> try:
        ...     step.finish(state)
        ... except NonfiniteError as error:
        ...     print(str(error).partition(".")[0])
        The gradient of `gradient` is not finite on shard 0
        """
        with entering("finish") if self._is_watched else contextlib.nullcontext():
            self._finish(state)

    def _finish(self, state: TrainState) -> None:
        check_state(state)
        self._watch.look(state.params, lambda: self.compared(state), running=0)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lower the step for arrays, or for their types (see ``abstract_init``).

        The batch is as for a call: if there are several processes, this one's own rows.
        """
        check_state(state)
        with _jax.in_place_of_the_users_mesh(self._mesh):
            return self._explained(self._compiled.lower, state, self._place.abstract(batch))

    def trace(self, state: Any, batch: Any) -> jax.stages.Traced:
        """Trace the step for arrays or types, as ``lower`` does; its ``jaxpr`` can be read."""
        check_state(state)
        with _jax.in_place_of_the_users_mesh(self._mesh):
            return self._explained(self._compiled.trace, state, self._place.abstract(batch))

    def _run(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        layout = self._layout_of(state)
        layout.check(state)
        return self._function(layout, state, batch)

    # State.

    def init(self, params: Any, rng: Any = 0, *, model_state: Any = None) -> TrainState:
        """The state before the first step, on the devices of the mesh.

        Args:
          params: the model that the loss takes: a pytree of arrays, an Equinox module or an NNX
            module. It is copied.
          rng: a PRNG key or a seed; each step and shard derives its own key.
          model_state: the state besides the parameters, where the step has ``model_state``.

        Raises:
          ArgumentError: there is nothing to train, the optimizer would train what is not meant
            to be trained, parameters are sharded, or another process passes something else.
          ArgumentTypeError: a leaf is neither an array nor hashable, or ``rng`` is not a key.
        """
        # What init moves to the devices it is told to move.
        with (
            jax.transfer_guard("allow"),
            entering("init") if self._is_watched else contextlib.nullcontext(),
        ):
            return self._init(params, rng, model_state)

    def _init(self, params: Any, rng: Any, model_state: Any) -> TrainState:
        impl, key = check_key(rng)
        make, arrays, abstract, given = self._initial(params, impl, key, model_state)
        self._check_agreement(
            "init",
            {
                "parameters": arrays[0],
                "the model's other state": arrays[1:],
                "rng": key,
                "optimizer": abstract.opt_state,
            },
        )
        arrays, key = jax.tree.map(lambda x, to: put_whole(x, to.sharding), (arrays, key), given)
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

    def abstract_init(self, params: Any, *, model_state: Any = None) -> TrainState:
        """The types and shardings of ``init``'s state, to ``lower`` without devices."""
        return self._initial(params, *check_key(0), model_state)[2]

    def _initial(
        self, params: Any, impl: Any, key: jax.Array, model_state: Any
    ) -> tuple[Any, Any, TrainState, Any]:
        """A compiled function of arrays and key, the arrays, and the types of result and both."""
        model_state = check_initial(self._function.loss.model_state, params, model_state)
        skeleton, *arrays = partition(params, self._wrt)
        if self._function.loss.model_state is not None:
            arrays[2] = model_state
        # Model state may lie anywhere on a mesh whose axes all count shards.
        of = arrays if len(self._axes) < len(self._mesh.axis_names) else arrays[:2]
        other_axes = other_axes_of(of, self._mesh, self._axes)
        layout = self._layout(arrays[0], other_axes)
        optimizer = self._function.pipeline.optimizer
        check_params(params, arrays[0], arrays[1], optimizer, self._wrt)

        def make(arrays: Any, key: Any) -> TrainState:
            state = layout.initial(skeleton, impl, arrays, key)
            return dataclasses.replace(state, other_axes=other_axes)

        # Of the types that the arrays will have, so that JAX need not trace it again for them.
        given = types_on(self._mesh, (arrays, key), other_axes)
        with _jax.in_place_of_the_users_mesh(self._mesh):
            types = jax.eval_shape(make, *given)
        shardings = layout.shardings(types)
        abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            types,
            shardings,
        )
        self._latest = layout, abstract
        return jax.jit(make, out_shardings=shardings), arrays, abstract, given

    def unshard(self, state: TrainState) -> TrainState:
        """The state replicated over the shards, its arrays in the optimizer's own shapes.

        Use it to save, to inspect, or to ``reshard`` on another number of shards. Arrays stay split
        over axes that do not count shards. The given state stays valid.
        """
        check_state(state)
        layout = self._layout_of(state)
        return self._relaid(layout.unpack, state, layout.unsharded(state))

    def reshard(self, state: TrainState) -> TrainState:
        """Shard an unsharded state for this step, from any number of shards.

        If the number changes, statistics of an NNX module and the state of the preprocessor are
        averaged, and random streams get new keys. If the state is of a step with other options,
        what a new one keeps is made, what one that is gone kept is dropped, and a
        ``CheckpointWarning`` says so.

        Raises:
          ArgumentError: the state is another optimizer's or preprocessor's, or its groups are not
            of this step.
        """
        check_state(state)
        others = [axis for axis in self._mesh.axis_names if axis not in self._axes]
        kept = tuple(only(each, others) for each in state.other_axes)
        state = dataclasses.replace(state, other_axes=kept if any(kept) else ())
        layout = self._layout_of(state)
        state = self._adopted(layout, state)
        layout.check_optimizer(state)
        self._check_agreement("reshard", {"a state": state})
        state = jax.tree.map(put_whole_unless_on, state, layout.unsharded(state))
        if not layout.has_number_of_shards(state):
            if self._grouped:
                raise ArgumentError(
                    f"The state has groups over another number of shards than "
                    f"{layout.number_of_shards}. "
                    f"Choose one shard's parameters with other.model(state, shard=0) and init with "
                    f"them."
                )
            state = layout.on_other_shards(state)
        return self._relaid(layout.pack, state, layout.shardings(state))

    @staticmethod
    def _adopted(layout: StateLayout, state: TrainState) -> TrainState:
        state, what = adopted(layout, state)
        if what:
            text = f"The state is of a step with other options: {'; '.join(what)}."
            warnings.warn(text, CheckpointWarning, stacklevel=3)
        return completed(layout, state)

    def _relaid(self, how: Callable[[Any], Any], state: TrainState, to: TrainState) -> TrainState:
        # A loop that saves would compile it each time. Layouts live as long.
        key = how, jax.tree.structure(state)
        if key not in self._relaying:
            run = lambda state: how(jax.tree.map(jnp.copy, state))
            self._relaying[key] = jax.jit(run, out_shardings=to)
        with _jax.in_place_of_the_users_mesh(self._mesh):
            return self._relaying[key](state)

    def model(self, state: TrainState, shard: int | None = None, *, ema: bool = False) -> Any:
        """The model with the parameters of a state, to evaluate or to export.

        Args:
          state: a state of this step.
          shard: the shard whose model to return. If ``None``, model state that differs between
            shards is averaged if floating (statistics), otherwise taken from the first shard.
          ema: whether to return the moving average of the parameters, in their dtypes.

        Returns:
          The model; ``(params, model_state)`` if the step has ``model_state``.

        Raises:
          ArgumentError: parameters differ between groups, and ``shard`` is ``None``; or there is no
            moving average.
        """
        # Copied, since the next step donates the state.
        arrays = jax.tree.map(jnp.copy, self._of_shard(state, shard, ema))
        model = combine(state.skeleton, *arrays)
        return model if self._function.loss.model_state is None else (model, arrays[2])

    def _of_shard(self, state: TrainState, shard: int | None, ema: bool) -> tuple[Any, Any, Any]:
        """The parameters, the frozen arrays and the model state of a shard, or of all."""
        check_state(state)
        if self._grouped and shard is None:
            raise ArgumentError(
                f"With group_assignment {self._function.pipeline.groups} the parameters differ "
                f"between shards. Choose one: model(state, shard=0)."
            )
        # An index is an array on the host.
        with jax.transfer_guard("allow"):
            params = self._average(state) if ema else state.params
            if self._grouped:
                params = jax.tree.map(lambda x: x[shard], params)
            model_state = state.model_state
            if self._layout_of(state).keeps_per_shard(state.skeleton):
                of_shard = lambda x: of_all(x) if shard is None else x[shard]
                model_state = jax.tree.map(of_shard, model_state)
            return params, state.frozen, model_state

    def evaluate(
        self,
        state: TrainState,
        batches: Iterable[Any],
        metric_fn: Callable[..., Any],
        shard: int | None = None,
        *,
        ema: bool = False,
    ) -> Any:
        """The mean of a metric over all examples of a data set, as on one device.

        Args:
          state: a state of this step.
          batches: an iterable of batches, of any number of rows. If there are several processes,
            each passes its own rows, in as many batches.
          metric_fn: ``metric_fn(model, batch)``, or ``metric_fn(params, model_state, batch)`` if
            the step has ``model_state``: the values of each example, a pytree of ``[rows, …]``,
            which depend on no other example. Pass the same function each time: it is compiled
            once for each shape of a batch.
          shard: the shard whose model to evaluate; see ``model``.
          ema: whether to evaluate the moving average of the parameters.

        Returns:
          The mean of each value over all examples, float64[…]; with ``weight``, weighted by each
          example's own weight, or by that of its parts if the entry has their shape.

        Raises:
          ArgumentError: there is no batch, no example counts, a value is not per example,
            processes pass unequal numbers of batches, parameters differ between groups and
            ``shard`` is ``None``, or there is no moving average.
          ArgumentTypeError: ``batches`` is a single batch, or a value is not a real array.

        >>> import jax.numpy as jnp, optax
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
        >>> batches = [jnp.ones(2), 4 * jnp.ones(1)]
        >>> float(step.evaluate(step.init(jnp.float32(3)), batches, lambda w, x: w * x))
        6.0
        """
        if not callable(metric_fn):
            raise ArgumentTypeError(f"metric_fn must be a function; got {metric_fn!r:.60}.")
        arrays = self._of_shard(state, shard, ema)
        return self._evaluate(metric_fn, state.skeleton, arrays, batches)

    def predict(
        self,
        state: TrainState,
        batches: Iterable[Any],
        predict_fn: Callable[..., Any],
        shard: int | None = None,
        *,
        ema: bool = False,
    ) -> Any:
        """What a function returns for each row of a data set, collected on the host.

        Args:
          state: as for ``evaluate``, like ``batches``, ``shard`` and ``ema``.
          predict_fn: ``predict_fn(model, batch)``, or ``predict_fn(params, model_state, batch)``: a
            pytree of ``[rows, …]``, of which each row depends on no other.

        Returns:
          The pytree with the rows of all batches in their order, numpy ``[rows, …]``. If there are
          several processes, each gets its own rows.

        Raises: as for ``evaluate``; weights do not count here.

        >>> import jax.numpy as jnp, optax
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
        >>> batches = [jnp.ones(2), 4 * jnp.ones(1)]
        >>> step.predict(step.init(jnp.float32(3)), batches, lambda w, x: w * x)
        array([ 3.,  3., 12.], dtype=float32)
        """
        if not callable(predict_fn):
            raise ArgumentTypeError(f"predict_fn must be a function; got {predict_fn!r:.60}.")
        arrays = self._of_shard(state, shard, ema)
        return self._predict(predict_fn, state.skeleton, arrays, batches)

    def _average(self, state: TrainState) -> Any:
        """The moving average of the parameters, in their shapes and dtypes."""
        if self._function.pipeline.ema is None:
            raise ArgumentError(
                "This step keeps no moving average of the parameters. Write "
                "make_train_step(..., ema=0.999)."
            )
        average = optax.tree.get(self.unshard(state).opt_state.inner_state, "ema")
        return jax.tree.map(lambda p, x: x.astype(p.dtype), state.params, average)

    # Description.

    def compared(self, state: TrainState) -> tuple[str, ...]:
        """The names of the arrays that ``check_divergence`` compares, in their order.

        These are the arrays of which all shards, or all of a group, have a copy: not those of which
        each shard has a slice, and not those that are each shard's own.

        Args:
          state: a state of this step, or its types.

        >>> import jax.numpy as jnp, optax
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
        >>> step.compared(step.init(jnp.float32(3)))
        ('step', 'params', 'rng')
        """
        check_state(state)
        return names_of_compared(self._layout_of(state), state)

    def replay(self, state: TrainState, batch: Any) -> dict[str, tuple[int, ...]]:
        """Take a step twice, and tell what of the next state differs, bit by bit.

        It finds arithmetic that is wrong now and then, in slices of which no other shard has a copy
        too. The given state stays valid and is not stepped; there must be memory for two more.

        Args:
          state: a state of this step.
          batch: as for a call.

        Returns:
          The names of the arrays that differ, and for each the shards whose part or copy does;
          empty if none differs.

        >>> import jax.numpy as jnp, optax
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
        >>> step.replay(step.init(jnp.float32(3)), jnp.ones(1))
        {}
        """
        check_state(state)
        if not _jax.at_top_level():
            raise ArgumentError(
                "replay compares two runs on the host, which a function that jax traces cannot. "
                "Call it outside of jax.jit."
            )
        first, again = (self._replayed(state, batch) for _ in range(2))
        with _jax.in_place_of_the_users_mesh(self._mesh):
            return differing(self._layout_of(state), first, again)

    def _replayed(self, state: TrainState, batch: Any) -> TrainState:
        with entering("replay") if self._is_watched else contextlib.nullcontext():
            return self._run_once(copy(state), batch)[0]

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
        params = _of_one(state.params) if self._grouped else state.params
        return self._layout(params, state.other_axes)

    def _layout(self, params: Any, other_axes: tuple[OtherAxes, ...]) -> StateLayout:
        leaves, tree = jax.tree.flatten(params)
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        key = tree, shapes, other_axes
        if key not in self._layouts:
            groups = self._function.pipeline.groups if self._grouped else None
            number = number_of_shards(self._mesh, self._axes) if groups is None else groups.size
            check_fits(params, other_axes, self._mesh)
            # JAX drops axes of size 1 from the shardings of its results.
            several = [axis for axis, size in self._mesh.shape.items() if size > 1]
            lie = tuple(only(own, several) for own in other_axes)
            pipeline = self._function.pipeline
            types = [jax.ShapeDtypeStruct(*each) for each in shapes]
            plan = plan_update(
                pipeline.optimizer,
                params,
                number,
                self._weight_update,
                only_parts=groups is not None,
                # A preprocessor may read them all.
                leave_unread=pipeline.preprocess is None,
                tile=TPU if self._mesh.devices.flat[0].platform == "tpu" else ANY,
                other_axes=lie[: len(leaves)],
            )
            self._layouts[key] = StateLayout(
                self._mesh,
                self._axes,
                plan,
                groups,
                pipeline,
                jax.tree.unflatten(tree, types),
                self._function.loss.model_state,
                lie,
            )
        return self._layouts[key]

    @property
    def _grouped(self) -> bool:
        return not self._function.pipeline.over_all_shards


def layout_of(step: TrainStep, state: TrainState) -> StateLayout:
    """How a state of this step lies on its mesh.

    Raises:
      ArgumentError: the state is another optimizer's, lies as in another step, or was donated.
      ArgumentTypeError: it is not a state.
    """
    check_state(state)
    layout = step._layout_of(state)
    layout.check(state)
    return layout


def loss_of(step: TrainStep) -> Loss:
    """The loss of a step, with what it does to a batch."""
    return step._function.loss


def _of_one(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
