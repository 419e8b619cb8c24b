"""Program: the compiled step, and the checks before it runs."""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from crossshard import _check, _jax, _mesh
from crossshard._hash import checksum
from crossshard.distributed.agreement import (
    check_agreement,
    check_same_program,
    compare,
    processes_of,
)
from crossshard.distributed.watch import PROGRESS
from crossshard.errors import ArgumentError, CrossshardError
from crossshard.jaxprs.walk import CHECKPOINTS, equations_of, equations_within
from crossshard.model.state import (
    FlatState,
    TrainState,
    check_devices,
    on_devices,
    put_into,
)
from crossshard.pipeline.stages.few_bits import FewBits
from crossshard.shards.batch_axes import resized
from crossshard.shards.devices import are_of_all_processes
from crossshard.step.batches import BatchPlacer, Donation
from crossshard.step.by_numbers import check_by_numbers
from crossshard.step.function import StepConfig
from crossshard.step.losses.loss import types_of
from crossshard.step.over_rows import CopiesCountError, Doubt, UndecidedError
from crossshard.step.state import States

Metrics = dict[str, Any]


class Program:
    """The compiled function of a step, which is compiled anew for each kind of batch.

    Attributes:
      options: the options of XLA that it is compiled with.
      placer: what puts batches on the mesh.
    """

    def __init__(self, config: StepConfig, states: States):
        mesh, loss, groups = config.outer_mesh, config.loss, config.pipeline.groups
        self._config = config
        self._states = states
        self.placer = BatchPlacer(mesh, config.axes, loss)
        # What a trace did not show of the step when it was lowered, by the types of its inputs.
        self._postponed: dict[Any, list[Doubt]] = {}
        self._in_processes = len(processes_of(mesh)) > 1
        self._is_watched = are_of_all_processes(mesh)
        self._agreed: set[Any] = set()
        self._donation = Donation()
        reduce_together = groups.size if config.is_grouped and groups else mesh.size
        self.options: dict[str, bool | int | str] = compiler_options(
            mesh.devices.flat[0].platform,
            reduce_together,
            params_sharded=config.params_sharded,
            beside=any(stage.sends_beside for stage in config.pipeline.stages),
            few_bits=isinstance(config.pipeline.aggregator, FewBits),
            same_bits=loss.virtual_shards is not None,
        )
        self._automatic = _mesh.under_automatic_axes(self._run, mesh, self._specs)
        self._compiled: Any = self._jit(self._automatic)
        # JAX refuses compiler options inside another jit.
        self._traced = jax.jit(self._automatic)
        # With the names of a state, to be read.
        self._nested = jax.jit(self._run_nested)
        # Whether the options may depend on the program, which has not been traced. The same bits on
        # any number of shards take the same options on all of them.
        self._is_open = bool(self.options) and takes_o1() and loss.virtual_shards is None

    def _jit(self, run: Callable[..., Any]) -> Any:
        donated = (0,) if self._config.donate else ()
        return jax.jit(run, donate_argnums=donated, compiler_options=self.options or None)

    # Programs and errors of JAX name the arguments as they are named here.
    def _run(self, state: FlatState, batch: Any) -> tuple[FlatState, Metrics]:
        nested = state.state()
        layout = self._states.layout(nested)
        layout.check(nested)
        after, metrics = self._config.run(layout, nested, batch)
        return FlatState.of(after), metrics

    def _run_nested(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        after, metrics = self._automatic(FlatState.of(state), batch)
        return after.state(), metrics

    def _specs(self, found: tuple[FlatState, Metrics]) -> tuple[FlatState, Metrics]:
        """Return the specs of the next state and the metrics."""
        flat, metrics = found
        state = flat.state()
        layout = self._states.layout(state)
        shardings = FlatState.of(layout.shardings(state))
        specs = FlatState([sharding.spec for sharding in shardings.leaves], flat.structure)
        return specs, self._config.specs_of_metrics(layout, metrics)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take one step; see ``TrainStep``."""
        # Under jax.grad the backward pass needs the state again, so it is not donated.
        is_traced = not _jax.at_top_level()
        if self._config.donate and not is_traced:
            self._donation.check(state, batch)
        flat = FlatState.of(state)
        if self._in_processes or _mesh.another_mesh_is_set(self._config.outer_mesh):
            with _mesh.in_place_of_the_users_mesh(self._config.outer_mesh):
                if self._in_processes:
                    self._compare_given(batch, {} if is_traced else put_into(state, flat))
                return self._placed_and_run(state, flat, batch, is_traced)
        # The context above costs a microsecond at every step.
        return self._placed_and_run(state, flat, batch, is_traced)

    def _compare_given(self, batch: Any, new: dict[str, Any]) -> None:
        """Tell the other processes what this one passes, and compare what is new in its state."""
        if self._is_watched:
            PROGRESS.take(self.placer.rows_of(batch), new)
        if new:
            check_agreement(
                "step",
                lambda: {f"state.{name}": checksum(x) for name, x in new.items()},
                self._config.outer_mesh,
                "Every process must put the same arrays into a state: compute them from what all "
                "of them have, such as the metrics of a step.",
            )

    def _placed_and_run(
        self, state: TrainState, flat: FlatState, batch: Any, is_traced: bool
    ) -> Any:
        try:
            return self._run_placed(state, flat, self._placed(state, batch, is_traced), is_traced)
        except CopiesCountError:
            return self._run_placed(state, flat, self.placer(batch), is_traced)

    def _placed(self, state: TrainState, batch: Any, is_traced: bool) -> Any:
        try:
            return self.placer(batch)
        except ArgumentError:
            if not self._in_processes or is_traced or self.placer.takes_any_rows:
                raise
            # Processes may pass unequal rows if a trace, in this one alone, shows a Mean.
            with contextlib.suppress(Exception):
                self.trace(state, batch)
            if not self.placer.takes_any_rows:
                raise
        if self._is_watched:
            PROGRESS.take(self.placer.rows_of(batch))
        return self.placer(batch)

    def _run_placed(self, state: TrainState, flat: FlatState, batch: Any, is_traced: bool) -> Any:
        record = self._config.loss.record
        record.runs, record.lowers = not is_traced, False
        if self._postponed and not is_traced:
            for doubt in self._postponed.get(types_of((flat, batch)), ()):
                self._remove(doubt, state, batch)
        try:
            if self._in_processes and not is_traced:
                self._check_same(flat, batch)
            if is_traced:
                after, metrics = self._use_compiled(lambda _: self._traced(flat, batch))
                return after.state(), metrics
            self._choose_options(flat, batch)
            after, metrics = self._use_compiled(lambda compiled: compiled(flat, batch))
            return after.state(), metrics
        except UndecidedError as error:
            if is_traced:
                raise
            doubt = error.doubt
        except (CrossshardError, CopiesCountError):
            raise
        except Exception:
            # Checked only now, since to check each array at every step would be slow. If this call
            # has donated the state, its arrays say nothing, and the error stays as it is.
            step = state.step
            is_array = isinstance(step, jax.Array) and not isinstance(step, jax.core.Tracer)
            if not (is_array and step.is_deleted()):
                _check.arrays("state", state)
                _check.arrays("batch", batch)
                check_devices(state, self._config.mesh)
            raise
        self._remove(doubt, state, batch)
        return self._run_placed(state, flat, batch, is_traced)

    def _remove(self, doubt: Doubt, state: TrainState, batch: Any) -> None:
        """Raise unless numbers show what a trace does not; they do so once."""
        shown = self._config.loss.record.by_numbers
        if doubt not in shown:
            check_by_numbers(self._config, self._states.layout(state), state, batch, doubt)
            shown.add(doubt)

    def _settle(self, state: Any, batch: Any, types: Any) -> None:
        """Remove the doubts of a step that was lowered, or keep them for its first call.

        If it was lowered for arrays, their numbers are compared at once: what is compiled from it
        has no first call. Of several processes this one may be the only one that lowers.
        """
        record = self._config.loss.record
        doubts, record.postponed = record.postponed, []
        no_numbers = jax.ShapeDtypeStruct | jax.core.Tracer
        are_types = any(isinstance(x, no_numbers) for x in jax.tree.leaves((state, batch)))
        if doubts and (are_types or self._in_processes):
            key = types_of((FlatState.of(state), types))
            self._postponed.setdefault(key, []).extend(doubts)
        elif doubts:
            placed = self.placer(batch)
            for doubt in doubts:
                self._remove(doubt, state, placed)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lower the program for a state and a batch, or for their types."""
        in_place = _mesh.in_place_of_the_users_mesh(self._config.outer_mesh)
        with in_place, on_devices(state, self._config.mesh):
            flat, types = FlatState.of(state), self.placer.abstract(batch)
            self._config.loss.record.as_lowered()
            self._choose_options(flat, types)
            lowered = self._use_compiled(lambda compiled: compiled.lower(flat, types))
            self._settle(state, batch, types)
        nested = lambda both: (both[0].state(), both[1])
        return _jax.with_trees(lowered, nested)

    def trace(self, state: Any, batch: Any) -> jax.stages.Traced:
        """Trace the program for a state and a batch, or for their types."""
        with _mesh.in_place_of_the_users_mesh(self._config.outer_mesh):
            self._config.loss.record.as_lowered()
            types = self.placer.abstract(batch)
            traced = self._nested.trace(state, types)
            self._settle(state, batch, types)
        return traced

    def _check_same(self, flat: FlatState, batch: Any) -> None:
        """Raise, before the first run of a program, unless every process runs the same one."""
        loss = self._config.loss
        # With weights each process may pass another number of rows, at any step.
        free = self.placer.takes_any_rows
        any_rows = lambda x, axis: jax.ShapeDtypeStruct(resized(x.shape, axis, 0), x.dtype)
        kept = jax.tree.map(any_rows, batch, loss.batch_axes.tree_of(batch)) if free else batch
        leaves, tree = jax.tree.flatten(kept)
        key = tree, *((x.shape, x.dtype) for x in leaves), self._states.number_of_kinds
        if key in self._agreed:
            return
        if loss.record.pads_copies:
            # Where copies count, this process alone starts again, before it talks to others.
            self._traced.trace(flat, batch)
        mesh = self._config.outer_mesh
        rows = lambda: {"rows": str(loss.number_of_rows(batch))}
        if not free or compare("step", rows, mesh) is None:
            lowered = self._use_compiled(lambda compiled: compiled.lower(flat, batch))
            check_same_program(lowered, mesh)
        self._agreed.add(key)

    def _choose_options(self, flat: FlatState, batch: Any) -> None:
        """Add the option that the program of this state and batch asks for, before it compiles."""
        if not self._is_open:
            return
        # JAX keeps the trace for the call that follows, which also tells what is wrong.
        with contextlib.suppress(Exception):
            jaxpr = self._traced.trace(flat, batch).jaxpr
            self._is_open = False
            if scans_checkpoints(jaxpr):
                self.options["optimization_level"] = _O1
                self._compiled = self._jit(self._automatic)

    def _use_compiled(self, use: Callable[[Any], Any]) -> Any:
        """Call ``use`` with the compiled function, or with another one if JAX refuses the first."""
        try:
            return use(self._compiled)
        except ValueError as error:
            _check_not_of_mesh(error, self._config.axes)
            if isinstance(self._compiled, _mesh.OnAutomaticAxes) or not _jax.needs_devices(error):
                raise
        self._compiled = _mesh.OnAutomaticAxes(self._jit(self._run), self._config.outer_mesh)
        return use(self._compiled)


def _check_not_of_mesh(error: ValueError, axes: tuple[str, ...]) -> None:
    """Raise ArgumentError if JAX refused a loss that shards arrays over the mesh."""
    if isinstance(error, CrossshardError) or not _jax.is_of_manual_axes(error):
        return
    raise ArgumentError(
        f"The loss shards an array over the mesh, which JAX refuses "
        f"({str(error).splitlines()[0]:.80}…): inside of a step {', '.join(axes)} are the shard "
        f"axes, and each shard runs the loss on its own, on the full parameters. Leave these "
        f"axes out of with_sharding_constraint and shard_map, and write flax.linen.unbox(params) "
        f"for Linen's Partitioned boxes. A model that is split over another axis takes axis_name= "
        f"with the shard axes."
    ) from error


# The options of the compiler.

# The bytes of gradients that XLA combines into one collective. This is its own default for
# all-reduces.
_COMBINED = 30 << 20
# The GPUs of most hosts.
_OF_A_HOST = 8
# Of YNNPACK, with whose sums XLA for CPUs adds in another order now and then, only the products.
_SUMS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# XLA's number of level O1, and the options that it sets even where a flag says otherwise.
_O1 = 19
_OF_O1 = re.compile(r"^xla_gpu_enable_(pipelined|while_loop|latency_hiding|analytical)")


def compiler_options(
    platform: str,
    shards: int,
    *,
    params_sharded: bool = False,
    beside: bool = False,
    few_bits: bool = False,
    same_bits: bool = False,
) -> dict[str, bool | int | str]:
    """Return the compiler options of a step, without those that the user has set in XLA_FLAGS.

    XLA for GPUs combines reduce-scatters until their *outputs*, of which each shard has 1/N, have
    30 MB. Most models are smaller than N times that, so their gradients would be one reduce-scatter
    after the whole backward pass. With a limit that is measured on gradients, as for all-reduces,
    they overlap with the matrix products of the layers that are left. The scheduler that does this
    is on for the H100, and off for the A100. See ``scans_checkpoints`` for one more option.

    Args:
      platform: the platform of the devices, as ``device.platform``.
      shards: the number of shards that reduce together.
      params_sharded: whether parameters are gathered, too.
      beside: whether a stage communicates at the same time.
      few_bits: whether gradients are sent in few bits.
      same_bits: whether bits must not depend on the number of shards.

    >>> compiler_options("cpu", 8)
    {}
    >>> compiler_options("gpu", 8)["xla_gpu_reduce_scatter_combine_threshold_bytes"]
    3932160
    """
    flags = _users_flags()
    if platform == "cpu" and same_bits:
        return {name: value for name, value in _SUMS.items() if name not in flags}
    if platform != "gpu" or (shards == 1 and not beside):
        return {}
    options: dict[str, bool | int | str] = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _COMBINED // shards,
    }
    # A gradient in few bits is two collectives, of the numbers and of their scales.
    if params_sharded and (shards > _OF_A_HOST or few_bits):
        limit = 4 if few_bits else 3
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = limit
    if beside:
        # Otherwise its collectives and those of the gradients would wait for each other.
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 2
    return {name: value for name, value in options.items() if name not in flags}


def takes_o1() -> bool:
    """Return whether the user has set neither a level of optimization nor what O1 sets."""
    return _jax.default_optimization_level() and not any(map(_OF_O1.search, _users_flags()))


def scans_checkpoints(jaxpr: Any) -> bool:
    """Return whether XLA for GPUs is to compile a program at level O1.

    O1 unrolls loops by two and gathers parameters one turn ahead. Where a ``lax.scan`` runs layers
    with ``jax.checkpoint``, kernels of a program for H100s then move 4 to 7% fewer bytes, and with
    sharded parameters 86% of what it sends is behind matrix products, not 80%. Without a checkpoint
    they move 30% more, since the loop carries what the backward pass reads. Within another loop,
    such as one over microbatches, the program no longer says how often it runs.
    """
    scans = [each for each in equations_of(jaxpr) if each.primitive.name == "scan"]
    of_layers = [
        scan
        for scan in scans
        if any(each.primitive.name in CHECKPOINTS for each in equations_within(scan))
    ]
    inner = {id(each) for scan in scans for each in equations_within(scan)}
    return bool(of_layers) and not any(id(scan) in inner for scan in of_layers)


def _users_flags() -> set[str]:
    """Return the names of the options in XLA_FLAGS, or in the file that it names."""
    text = os.environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        with contextlib.suppress(OSError):
            text = Path(text).read_text(encoding="utf-8")
    return set(re.findall(r"(?:^|\s)--(\w+)", text))
