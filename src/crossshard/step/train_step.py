"""TrainStep: the compiled step, and its state: created, resharded, exported, evaluated."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from crossshard import _check, _jax, _mesh
from crossshard._annotations import Key, PyTree
from crossshard._check import is_inexact
from crossshard.distributed.watch import PROGRESS, entering, for_now
from crossshard.errors import ArgumentError, ArgumentTypeError, DivergenceError, NonfiniteError
from crossshard.gradients.status import leaf_name
from crossshard.guards import copy_state, differing, names_of_compared, report_divergence
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState, check_is_state, check_state, on_devices
from crossshard.pipeline.stages.nonfinite import NonfiniteState
from crossshard.shards.devices import are_of_all_processes
from crossshard.step.batches import BatchPlacer
from crossshard.step.describe import describe
from crossshard.step.function import StepConfig, to_read
from crossshard.step.nonfinite_origin import NonfiniteOrigin, find
from crossshard.step.over_data import OverData, ToRead
from crossshard.step.prefetch import Prefetch
from crossshard.step.program import Program
from crossshard.step.state import States

# Steps that may still run while the host goes on. All processes look at the same step, so that all
# of them raise in the same call.
_IN_FLIGHT = 2


class TrainStep:
    """A training step of all shards, as ``make_train_step`` returns it.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
    >>> state = step.init(jnp.float32(3))
    >>> print(step.describe().splitlines()[0])
    local gradient → mean over all shards → update on every shard
    >>> step.compared(state), step.replay(state, jnp.ones(1))
    (('step', 'params', 'rng'), {})
    """

    def __init__(self, config: StepConfig):
        self._config = config
        self._states = States(config)
        self._program = Program(config, self._states)
        # What the last steps have found; it is checked two calls later.
        self._found: collections.deque[dict[str, Any]] = collections.deque()
        self._has_checks = config.sentinel is not None or config.pipeline.nonfinite is not None
        self._is_watched = are_of_all_processes(config.mesh) or PROGRESS.is_alone
        # The layout and the types of the last ``init``, for the descriptions.
        self._latest: tuple[StateLayout, TrainState] | None = None

    @functools.cached_property
    def _over_data(self) -> OverData:
        return OverData(self._config, self._entering)

    def __repr__(self) -> str:
        config = self._config
        axes = ", ".join(f"{name}: {size}" for name, size in config.mesh.shape.items())
        arrays = None if self._latest is None else self._latest[0].arrays
        return f"TrainStep({config.loss.name} on {axes}; {config.describe(arrays)})"

    @property
    def mesh(self) -> Mesh:
        """The mesh that the step runs on."""
        return self._config.outer_mesh

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """The options that the step is compiled with, here or by ``lower(...).compile()``.

        On GPUs they overlap communication with matrix products; on CPUs ``virtual_shards`` needs
        one. Those that you have set in XLA_FLAGS are left out. The level of a scan over
        checkpoints is among them once the step has been called or lowered. Within your own
        ``jax.jit`` JAX takes only that one's:
        ``jax.jit(run, compiler_options=step.compiler_options)``.
        """
        return dict(self._program.options)

    def __call__(
        self, state: TrainState, batch: PyTree, *more: object
    ) -> tuple[TrainState, dict[str, PyTree]]:
        """Take one step.

        Args:
          state: the state from ``init`` or the last step; it is donated, unless the step was made
            with ``donate=False``.
          batch: a pytree of arrays, split over the shards along axis 0, or as ``batch_axis`` says.
            If there are several processes, each passes its own rows.
          *more: refused: all arrays belong in one batch.

        Returns:
          The next state, and the metrics: ``"loss"``, float[], reduced like the gradients
          (``[shards]`` with groups); with ``weight``, ``"weight"``, float[], the sum of the
          weights of all shards, or of the group; of a loss that returns a ``Mean``, ``"terms"``
          and ``"counts"``, by name, the mean and the count of each term; with ``has_aux``,
          ``"aux"``, ``[shards, …]``, or ``[shards, accumulate_steps, …]``, or reduced by
          ``aux_reduction``; the requested ``metrics``; with ``check_divergence``, ``"divergence"``,
          a ``Divergence``; with ``nonfinite``, ``"nonfinite"``, a ``NonfiniteState``; with
          ``loss_scale``, ``"loss_scale"``, float[], the scale of this step. With ``weight``, a
          ``Mean``, ``loss_scale`` or ``nonfinite``, ``"skipped"``, bool[]: if all weights or counts
          are 0, or the gradient is not finite, parameters, states and step count are unchanged.

        Raises:
          ArgumentError, ArgumentTypeError: the batch cannot be split, or the state is not of this
            step, or a leaf of the batch is a buffer of it, which is donated.
          ProgramMismatchError: another process is about to run another program.
          NonfiniteError: with ``nonfinite``: the call before the last was the last of
            ``max_consecutive`` in a row that were not finite. ``state`` stays valid.
          DivergenceError: with ``check_divergence``, shards had different copies of an array at the
            call before the last; ``state`` stays valid.
        """
        if more:
            raise ArgumentTypeError(
                f"A step takes a state and a batch; got {len(more)} more. Pass all arrays as one "
                f"batch, such as step(state, {{'x': x, 'y': y}}), and a key to init(params, rng)."
            )
        with self._entering("step"):
            check_is_state(state)
            if not (self._has_checks and _jax.at_top_level()):
                return self._program(state, batch)
            # Before the state is donated, so that the caller can still save it.
            self._check_found(state, _IN_FLIGHT - 1)
            after, metrics = self._program(state, batch)
            names = metrics.keys() & {"divergence", "nonfinite"}
            self._found.append({name: metrics[name] for name in names})
            return after, metrics

    def own_rows(self, rows: int) -> np.ndarray:
        """Return which rows of a global batch this process passes to the step.

        With ``virtual_shards`` that do not divide over the shards, the first processes pass more.

        Args:
          rows: the number of rows that all processes pass together.

        Returns:
          The places of the rows, int[own rows], in their order.

        Raises:
          ArgumentError: they do not divide over the shards and their microbatches.

        >>> import jax.numpy as jnp, optax
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
        >>> step.own_rows(4)
        array([0, 1, 2, 3])
        """
        return self._program.placer.own_rows(rows)

    def _check_found(self, state: TrainState, running: int) -> None:
        """Raise what steps have found, except the last ``running`` ones, which may still run."""
        config, nonfinite = self._config, self._config.pipeline.nonfinite
        while len(self._found) > running:
            metrics = self._found.popleft()
            if config.sentinel is not None and metrics["divergence"].diverged:
                names = self.compared(state)
                try:
                    report_divergence(
                        metrics["divergence"], config.sentinel, names, config.mesh, config.axes
                    )
                except DivergenceError:
                    # A caller that goes on from a checkpoint is not told of the same steps again.
                    self._found.clear()
                    raise
            if nonfinite is None:
                continue
            found = metrics["nonfinite"]
            # All devices have the same copy, or all shards.
            number = int(np.ravel(jax.device_get(found.in_a_row.addressable_data(0)))[0])
            if number >= nonfinite.max_consecutive:
                # As above.
                self._found.clear()
                raise _not_finite(found, number, state)

    def _outside(self, tree: Any) -> Any:
        """Move arrays of this step to the mesh as the user made it."""
        return jax.tree.map(lambda x: _mesh.on_mesh(x, self._config.outer_mesh), tree)

    def _entering(
        self, call: str, *, counts: bool = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context that tells the other processes that this one is in a call."""
        if not self._is_watched:
            return contextlib.nullcontext()
        return entering(call) if counts else for_now(call)

    def prefetch(self, batches: Iterable[PyTree], size: int = 2) -> Prefetch:
        """Read the next batches in a thread, and put them on the devices while a step runs.

        It yields the batches in their order, as a call of the step, ``evaluate`` or ``predict``
        takes them. Rows of numpy arrays are on the devices; what has to be padded is left to the
        call, and so is, if there are several processes, the first batch of each kind. An error of
        the loader is raised in the loop. The thread ends with the loop, also when a ``break`` or an
        error ends it.

        Args:
          batches: an iterable of batches: a list, a generator, a loader. Only its ``iter`` is
            called in this thread. If there are several processes, each passes its own rows.
          size: how many batches are read ahead at most.

        Returns:
          An iterator. If ``batches`` has ``get_state`` and ``set_state``, as Grain's iterators do,
          so has this one, with the state after the last batch that was taken: pass it to
          ``Checkpoints.save`` as ``data``.

        Raises:
          ArgumentError: ``size`` is less than 1.
          ArgumentTypeError: ``batches`` is a single batch, or ``size`` is no int.

        >>> import numpy as np, optax
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
        >>> state, loader = step.init(np.float32(3)), (np.ones(4, np.float32) for _ in range(5))
        >>> for batch in step.prefetch(loader):
        ...     state, metrics = step(state, batch)
        >>> int(state.step)
        5
        """
        return Prefetch(batches, size, self._program.placer.ahead())

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
        >>> from crossshard import make_train_step
        >>> from crossshard.errors import NonfiniteError
        >>> loss_fn = lambda w, x: (w * x).mean()
        >>> step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1, nonfinite="raise")
        >>> state, _ = step(step.init(jnp.float32(3)), jnp.array([jnp.nan]))
        >>> try:
        ...     step.finish(state)
        ... except NonfiniteError as error:
        ...     print(str(error).partition(".")[0])
        The gradient is not finite on shard 0
        """
        with self._entering("finish"):
            check_is_state(state)
            self._check_found(state, 0)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lower the step for arrays, or for their types (see ``abstract_init``).

        The batch is as for a call: if there are several processes, this one's own rows.

        Raises:
          LossError: the loss is refused, as in a call. What only numbers decide is compared if
            state and batch are arrays, in one process; else ``describe()`` says what is open.
        """
        check_state(state)
        return self._program.lower(state, batch)

    def trace(self, state: TrainState, batch: PyTree) -> jax.stages.Traced:
        """Trace the step for arrays or types, as ``lower`` does; its ``jaxpr`` can be read."""
        check_state(state)
        return self._program.trace(state, batch)

    # State.

    def init(self, params: PyTree, rng: Key = 0, *, model_state: PyTree = None) -> TrainState:
        """Return the state before the first step, on the devices of the mesh.

        Args:
          params: the model that the loss takes: a pytree of arrays, an Equinox module or an NNX
            module. It is copied. With ``params="sharded"`` each device gets only its slices, from
            arrays of the host or from arrays that are sharded over devices already, as
            ``jax.jit(make, out_shardings=...)`` returns them.
          rng: a PRNG key or a seed; each step and shard derives its own key.
          model_state: the state besides the parameters, where the step has ``model_state``.

        Raises:
          ArgumentError: there is nothing to train, the optimizer would train what is not meant
            to be trained, parameters are split over the shard axes, or another process passes
            something else.
          ArgumentTypeError: a leaf is neither an array nor hashable, or ``rng`` is not a key.
          ProgramMismatchError: the optimizer's own ``init`` makes something else in another one.
        """
        # The caller asks init to move arrays to the devices.
        with jax.transfer_guard("allow"), self._entering("init"):
            prepared = self._states.prepare(params, rng, model_state)
            self._latest = prepared.layout, prepared.types
            return self._outside(self._states.first(prepared))

    def abstract_init(
        self, params: PyTree, rng: Key = 0, *, model_state: PyTree = None
    ) -> TrainState:
        """Return the types and shardings of ``init``'s state, to ``lower`` without devices."""
        prepared = self._states.prepare(params, rng, model_state)
        self._latest = prepared.layout, prepared.types
        return self._outside(prepared.types)

    def unshard(self, state: TrainState) -> TrainState:
        """Replicate a state over the shards, its arrays in the optimizer's own shapes.

        Use it to save, to inspect, or to ``reshard`` on another number of shards. Arrays stay split
        over other axes. The given state stays valid. Every device gets all of the state. It may be
        too large for that with ``params="sharded"``: ``reshard`` then takes it as it is, and
        ``Checkpoints`` saves and restores it slice by slice.
        """
        with self._on_step_mesh(state) as state:
            return self._outside(self._states.unshard(state))

    def reshard(self, state: TrainState) -> TrainState:
        """Shard an unsharded state for this step, from any number of shards.

        A state of a step with ``params="sharded"`` is taken as it is, too: its arrays have their
        own shapes, and none is gathered on a device unless this step replicates it.

        If the number of shards changes, statistics of an NNX module and the state of the
        preprocessor are averaged, and random streams get new keys. The same happens between a loss
        over the shards' rows and one over the batch, which has one state for all. What error
        feedback holds back keeps its sum. With ``sync_every`` new workers begin with the average of
        the others; groups become workers with the average as what they share. If the state is of a
        step with other options, the state of new options is made, that of options that are gone is
        dropped, and a ``CheckpointWarning`` says so.

        Raises:
          ArgumentError: the state of the optimizer or of the preprocessor has another form, shards
            of one group here differ in it, or its arrays are flattened and padded, as
            ``weight_update="sharded"`` alone stores them; or another process passes another state.
          ProgramMismatchError: what a new option keeps would be made otherwise in another process.
        """
        with self._on_step_mesh(state) as state, self._entering("reshard"):
            moved = self._states.reshard(state)
            self._latest = self._states.layout(moved), jax.eval_shape(lambda x: x, moved)
            return self._outside(moved)

    def model(self, state: TrainState, shard: int | None = None, *, ema: bool = False) -> PyTree:
        """Return the model with the parameters of a state, to evaluate or to export.

        Args:
          state: a state of this step.
          shard: the shard whose model to return. If ``None``, floats of the model state that differ
            between shards are averaged (statistics), random streams are those of the first shard,
            and ``nnx.metrics.Average`` and ``Welford`` those of all rows; with ``sync_every`` the
            parameters are those after the last synchronisation.
          ema: whether to return the moving average of the parameters, in their dtypes.

        Returns:
          The model; ``(params, model_state)`` if the step has ``model_state``. With
          ``params="sharded"`` its arrays are sharded over the devices, as those of the state.

        Raises:
          ArgumentError: ``shard`` is ``None``, and parameters differ between groups, or an integer
            or flag of the model state between shards; or there is no moving average.
        """
        with self._on_step_mesh(state) as state:
            return self._states.model(state, self._states.arrays(state, shard, ema))

    @contextlib.contextmanager
    def _on_step_mesh(self, state: TrainState) -> Iterator[TrainState]:
        """Yield a state on the step's mesh with automatic axes, while this mesh is set."""
        check_state(state, or_types=False)
        inside: TrainState = _inside(state)
        mesh = self._config.mesh
        with _mesh.in_place_of_the_users_mesh(mesh), on_devices(state, mesh):
            yield inside

    def _to_read(self, state: TrainState, shard: int | None, ema: bool) -> ToRead:
        with self._on_step_mesh(state) as state:
            arrays = self._states.arrays(state, shard, ema)
            return state.skeleton, to_read(self._states.layout(state), state), arrays

    def evaluate(
        self,
        state: TrainState,
        batches: Iterable[PyTree],
        metric_fn: Callable[..., PyTree],
        shard: int | None = None,
        *,
        ema: bool = False,
    ) -> PyTree:
        """Return the mean of a metric over all examples of a data set, as on one device.

        Sharded parameters are gathered where the metric uses them, as in the loss.

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
          ProgramMismatchError: the function of another process computes something else.

        >>> import jax.numpy as jnp, optax
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
        >>> batches = [jnp.ones(2), 4 * jnp.ones(1)]
        >>> float(step.evaluate(step.init(jnp.float32(3)), batches, lambda w, x: w * x))
        6.0
        """
        _check.function("metric_fn", metric_fn)
        model = self._to_read(state, shard, ema)
        with on_devices(state, self._config.mesh):
            return self._over_data.evaluate(metric_fn, model, batches)

    def predict(
        self,
        state: TrainState,
        batches: Iterable[PyTree],
        predict_fn: Callable[..., PyTree],
        shard: int | None = None,
        *,
        ema: bool = False,
    ) -> PyTree:
        """Call a function on each row of a data set, and collect the results on the host.

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
        _check.function("predict_fn", predict_fn)
        model = self._to_read(state, shard, ema)
        with on_devices(state, self._config.mesh):
            return self._over_data.predict(predict_fn, model, batches)

    # Description.

    def compared(self, state: TrainState) -> tuple[str, ...]:
        """Return the names of the arrays that ``check_divergence`` compares, in their order.

        These are the arrays of which all shards, or all shards of a group, have a copy: no arrays
        that are sharded, and none of which each shard has its own.

        Args:
          state: a state of this step, or its types.
        """
        check_state(state)
        return names_of_compared(self._states.layout(state), state)

    def replay(self, state: TrainState, batch: PyTree) -> dict[str, tuple[int, ...]]:
        """Take a step twice, and return which arrays of the next state differ, bit by bit.

        It finds arithmetic that is wrong now and then, also in slices of which no other shard has a
        copy. The given state stays valid and is not stepped; there must be memory for two more.

        Args:
          state: a state of this step.
          batch: as for a call.

        Returns:
          The names of the arrays that differ, and for each the shards whose slice or copy differs;
          empty if none differs.
        """
        check_state(state, or_types=False)
        if not _jax.at_top_level():
            raise ArgumentError("replay compares runs on the host. Call it outside of jax.jit.")
        with self._entering("replay"):
            run = lambda: _inside(self._program(copy_state(_inside(state)), batch)[0])
            first, again = run(), run()
        with _mesh.in_place_of_the_users_mesh(self._config.mesh):
            return differing(self._states.layout(state), first, again)

    def find_nonfinite(self, state: TrainState, batch: PyTree) -> NonfiniteOrigin | None:
        """Find where the first NaN or infinity of a step comes from: the line, the shard, the rows.

        Call it after a step that was not finite, with the state from before it. The loss, the
        gradient and the optimizer's update are computed again on one device, shard after shard and
        one equation at a time. What is not finite is followed back to the first equation that made
        it of finite numbers, or to the array that it came in with. An infinity that only constants
        make, as a mask does, is not taken for the fault.

        If there are several processes, each looks at its own shards, and none waits for another;
        unless parameters are sharded, which all processes then gather in the same call.

        Args:
          state: the state before the step; it stays valid. Steps that are skipped return it.
          batch: the batch of the step, as for a call.

        Returns:
          A ``NonfiniteOrigin``, which prints as text; ``None`` if all is finite here.

        Raises:
          ArgumentError: the state was donated; or the loss is over the batch of several processes.

        >>> import jax.numpy as jnp, optax
        >>> from crossshard import make_train_step
        >>> loss_fn = lambda w, x: jnp.where(x > 0, jnp.log(w * x), 0).mean()
        >>> step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1, donate=False)
        >>> found = step.find_nonfinite(step.init(jnp.float32(3)), jnp.array([1.0, 0.0]))
        >>> found.result, found.phase, found.primitive, found.rows
        ('the gradient', 'backward pass', 'div', (1,))
        """
        if not _jax.at_top_level():
            raise ArgumentError("find_nonfinite runs on the host. Call it outside of jax.jit.")
        if isinstance(state, TrainState) and getattr(state.step, "is_deleted", bool)():
            raise ArgumentError(
                "find_nonfinite takes the step again, from the state before it, and the arrays of "
                "this state are gone: it was donated to a step. Restore a checkpoint or a snapshot "
                "from before the step. For the next time: with nonfinite='skip' the state that the "
                "step returns is the one before it; with donate=False each state stays valid."
            )
        check_state(state, or_types=False)
        self._program.placer.abstract(batch)
        layout, unshard = layout_of(self, state), lambda: _inside(self.unshard(state))
        is_here = lambda x: x.is_fully_addressable or x.is_fully_replicated
        with self._entering("find_nonfinite", counts=False):
            whole = all(map(is_here, jax.tree.leaves((state.params, state.frozen))))
            return find(
                self._config, layout, _inside(state) if whole else unshard(), batch, unshard
            )

    def describe(self) -> str:
        """Describe the pipeline, the weight update and its reason, and the arrays with their sizes.

        Raises:
          ArgumentError: none of ``init``, ``abstract_init`` and ``reshard`` has been called.
        """
        return describe(self._config, *latest_of(self))


def _not_finite(found: NonfiniteState, number: int, state: TrainState) -> NonfiniteError:
    """Return the error for ``number`` steps in a row, which names what the last of them found."""
    what, of_state = found.describe(state.params, state.model_state), _first_nan(state)
    then = (
        "Parameters and state hold nothing of it: save them, and look at the batch of that step: "
        "step.find_nonfinite(state, batch) names the line and the rows."
    )
    if of_state:
        then = f"{of_state} of the state is NaN, whatever the batch is: restore a checkpoint."
    many = f"Something was not finite in {number} steps in a row; in the last of them "
    return NonfiniteError(f"{many + what if number > 1 else what[0].upper() + what[1:]}. {then}")


def _first_nan(state: TrainState) -> str:
    """Return the name of the first array of a state with NaN on this process; empty if none."""
    # Metrics are of the last step, and infinities may be meant, such as the best loss so far.
    opt_state = state.opt_state._replace(metrics=())
    # Frozen arrays are as they were given.
    state = dataclasses.replace(state, opt_state=opt_state, frozen=())
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if not is_inexact(x):
            continue
        # With numpy: JAX refuses an array on one device while a mesh of several is set.
        parts = [part.data for part in x.addressable_shards] if isinstance(x, jax.Array) else [x]
        if any(np.isnan(np.asarray(part)).any() for part in parts):
            return leaf_name(path)
    return ""


def _inside(tree: Any) -> Any:
    """Move arrays from the user's mesh to the same mesh with automatic axes."""
    return jax.tree.map(lambda x: _mesh.on_mesh(x, None), tree)


def config_of(step: TrainStep) -> StepConfig:
    """Return the configuration of a step."""
    return step._config


def placer_of(step: TrainStep) -> BatchPlacer:
    """Return what puts the batches of a step on its mesh."""
    return step._program.placer


def latest_of(step: TrainStep) -> tuple[StateLayout, TrainState]:
    """Return the layout and the types of the last state that a step has made.

    Raises:
      ArgumentError: it has made none.
    """
    if step._latest is None:
        raise ArgumentError(
            "What a step does depends on the parameters: call init(params), or "
            "abstract_init(params), first."
        )
    return step._latest


def entering_of(
    step: TrainStep, call: str, *, counts: bool = True
) -> contextlib.AbstractContextManager[Any]:
    """Return a context that tells the other processes of a step that this one is in a call.

    ``call`` is its name, and ``counts`` tells whether all of them make it.
    """
    return step._entering(call, counts=counts)


def collected(step: TrainStep, state: TrainState) -> TrainState:
    """Return a state without the rows of ``Owners``: arrays in their own shapes, or slices."""
    with _mesh.in_place_of_the_users_mesh(step._config.mesh):
        return step._states.collected(_inside(state))


def with_params(step: TrainStep, state: TrainState, params: Any, frozen: Any) -> TrainState:
    """Return a state with other parameters, unsharded ones; what follows them is made anew."""
    with _mesh.in_place_of_the_users_mesh(step._config.mesh):
        return step._outside(step._states.with_params(_inside(state), params, frozen))


def layout_of(step: TrainStep, state: TrainState) -> StateLayout:
    """Return the layout of a state of this step.

    Raises:
      ArgumentError: the state is another optimizer's, placed as in another step, or was donated.
      ArgumentTypeError: it is not a state.
    """
    check_state(state)
    layout = step._states.layout(state)
    layout.check(state)
    return layout
