"""All private or version-dependent JAX API; no other file imports private JAX."""

import copy
import ctypes
import enum
import linecache
import math
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import cache_key as _cache_key
from jax._src import clusters as _clusters
from jax._src import core as _core
from jax._src import custom_partitioning as _custom_partitioning
from jax._src import distributed as _distributed
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import parallel as _parallel

# The name has an underscore since JAX 0.11.
_NAMES = ("all_gather_invariant", "_all_gather_invariant")
_gather_invariant = next(getattr(_parallel, name) for name in _NAMES if hasattr(_parallel, name))
# Since JAX 0.12 every jaxpr has its constants; a closed one is still made from an open one.
_ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", _core.Jaxpr)
_OURS, _JAX = (os.path.dirname(file) for file in (__file__, jax.__file__))

# Before 0.10.2 JAX records at most the ten innermost lines of user code, and ours would fill them.
# The lines of the command are kept: they show that the user's own code does not call the step.
_source_info_util.register_exclusion(_OURS + os.sep)
_source_info_util.register_inclusion(os.path.join(_OURS, "tools", "cli.py"))


def bound_axes() -> dict[str, int]:
    """Return the named axes that collectives can use here, outermost first, with their sizes."""
    return dict(_core.get_axis_env().axis_sizes)


def sizes_of_axes(sizes: Mapping[str, int]) -> AbstractContextManager[None]:
    """Bind named axes with other sizes inside, for a trace that is only read."""
    found: AbstractContextManager[None] = _core.extend_axis_env_nd(sizes.items())
    return found


def default_optimization_level() -> bool:
    """Return whether the user has left JAX's level of optimization as it is."""
    return getattr(jax.config, "jax_optimization_level", "UNKNOWN") == "UNKNOWN"


def manual_axes() -> frozenset[str]:
    """Return the bound axes that are mesh axes (of shard_map or pmap) rather than vmap's."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def _axis_type(x: Any, which: str) -> frozenset[str]:
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(getattr(manual, which))
    # Before JAX 0.10.1 the varying axes are an attribute of the aval.
    return frozenset(getattr(aval, "vma", ())) if which == "varying" else frozenset()


def varying_axes(x: Any) -> frozenset[str]:
    """Return the axes over which ``x`` is varying, from its type."""
    return _axis_type(x, "varying")


def unreduced_axes(x: Any) -> frozenset[str]:
    """Return the axes over which ``x`` is unreduced, from its type."""
    return _axis_type(x, "unreduced")


def summed_by_type(x: Any) -> Any:
    """Sum an array over the explicit mesh axes over which its type is unreduced.

    Its value is that sum already. An array whose type is reduced over an axis becomes replicated
    over it. Other arrays are returned unchanged.
    """
    spec = getattr(getattr(getattr(x, "aval", None), "sharding", None), "spec", None)
    if spec is None or not (spec.unreduced or spec.reduced):
        return x
    # Along other axes it stays sharded as it is: XLA miscompiles sums that also change these
    # (openxla/xla#40034).
    partitions = spec.partitions if hasattr(spec, "partitions") else spec
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*partitions))


def without_unread(jaxpr: Any, places: Collection[int] | None = None) -> Any:
    """Drop the equations that the outputs of a closed jaxpr, or those at some places, do not need.

    It keeps all inputs.
    """
    outputs = [places is None or place in places for place in range(len(jaxpr.jaxpr.outvars))]
    found, _ = _partial_eval.dce_jaxpr(jaxpr.jaxpr, outputs, instantiate=True)
    return _ClosedJaxpr(found, jaxpr.consts)


def share_programs_between_cpus() -> None:
    """Let each process of this machine take what process 0 has compiled for the CPUs of all.

    JAX's compilation cache, to which only process 0 writes, tells processes of CPUs apart, and
    the devices on which one of them works alone. What is loaded runs on the devices of the process
    that loads it.
    """
    hash_devices, hash_accelerators = _cache_key._hash_devices, _cache_key._hash_accelerator_config
    hash_options = _cache_key._hash_serialized_compile_options

    def of_kinds(hash_object: Any, devices: Any) -> None:
        on_cpu = all(device.platform == "cpu" for device in devices.flat)
        (hash_devices if on_cpu else hash_accelerators)(hash_object, devices)

    def of_any_device(
        hash_object: Any, options: Any, strip_device_assignment: bool = False
    ) -> None:
        # As JAX does for GPUs.
        strip = strip_device_assignment or jax.default_backend() == "cpu"
        hash_options(hash_object, options, strip_device_assignment=strip)

    setattr(_cache_key, "_hash_accelerator_config", of_kinds)  # noqa: B010
    setattr(_cache_key, "_hash_serialized_compile_options", of_any_device)  # noqa: B010


def with_trees(lowered: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a lowered function whose arguments, and whose results, are those that it converts to.

    ``convert`` takes a tuple, and returns one of the same leaves.
    """
    args, kwargs = lowered.args_info
    results = lowered.out_tree.unflatten(range(lowered.out_tree.num_leaves))
    again = copy.copy(lowered)
    again.args_info = convert(args), kwargs
    again.out_tree = jax.tree.structure(convert(results))
    return again


def with_equations(
    jaxpr: Any,
    constants: dict[Any, Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    equations: Sequence[Any],
) -> Any:
    """Build a closed jaxpr from equations, with the effects of another one."""
    names = jaxpr.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    found = _core.Jaxpr(
        list(constants), inputs, outputs, equations, jaxpr.jaxpr.effects, debug_info=names
    )
    return _ClosedJaxpr(found, list(constants.values()))


def pruned(jaxpr: Any, outputs: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Return a closed jaxpr that computes only some of the outputs, and which inputs it takes."""
    found, taken = _partial_eval.dce_jaxpr(jaxpr.jaxpr, list(outputs), instantiate=False)
    return _ClosedJaxpr(found, jaxpr.consts), taken


def closed(jaxpr: Any) -> Any:
    """Close a jaxpr that has no constants; a closed one is returned as it is."""
    return jaxpr if hasattr(jaxpr, "consts") else _ClosedJaxpr(jaxpr, ())


def shard_map(
    function: Callable[..., Any], *, in_specs: Any, out_specs: Any, **where: Any
) -> Callable[..., Any]:
    """Wrap a function in ``jax.shard_map`` without types; it may read arrays without elements.

    These are made inside: the compiler of JAX 0.11.2 crashes on one that is passed and read.
    """

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        is_empty = [not x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in leaves]
        spread = lambda spec, below: jax.tree.map(lambda _: spec, below)
        specs = tree.flatten_up_to(jax.tree.map(spread, in_specs, args))
        mesh = where.get("mesh") or jax.sharding.get_abstract_mesh()

        # JAX's own ``shard_shape`` knows no mesh of which another ``shard_map`` has taken an axis.
        def shape(x: Any, spec: Any) -> tuple[int, ...]:
            along = (*spec, *[None] * (x.ndim - len(spec)))
            axes = [each if isinstance(each, tuple) else (each,) for each in along]
            ways = [math.prod(mesh.shape[axis] for axis in each if axis) for each in axes]
            return tuple(size // way for size, way in zip(x.shape, ways, strict=True))

        pairs = zip(leaves, specs, is_empty, strict=True)
        types = [(shape(x, spec), x.dtype) if empty else None for x, spec, empty in pairs]

        def on_shard(*given: Any) -> Any:
            passed = iter(given)
            every = [next(passed) if each is None else jnp.zeros(*each) for each in types]
            return function(*tree.unflatten(every))

        passed = [place for place, empty in enumerate(is_empty) if not empty]
        own = tuple(specs[place] for place in passed)
        how = {"in_specs": own, "out_specs": out_specs, "check_vma": False}
        return jax.shard_map(on_shard, **how, **where)(*(leaves[place] for place in passed))

    return run


def source_of(equation: Any) -> str:
    """Return an equation's optimizer and line: ``clip_by_global_norm, optax/_src/x.py:81``.

    Either is left out if it is not known.
    """
    frames = _source_info_util.user_frames(equation.source_info.traceback)
    return _source([(f.file_name, f.start_line, f.function_name) for f in frames])


def sources_of(equation: Any) -> str:
    """Return ``source_of``, and, if that is a library's line, the line of the user's own code."""
    frames = list(_source_info_util.user_frames(equation.source_info.traceback))
    lines = [(f.file_name, f.start_line, f.function_name) for f in frames]
    own = [line for line in lines if not re.search("(site|dist)-packages", line[0])]
    return ", from ".join(dict.fromkeys(filter(None, map(_source, (lines, own)))))


def code_of(equation: Any) -> str:
    """Return the line of the user's own code that an equation is from; empty if unknown."""
    frames = _source_info_util.user_frames(equation.source_info.traceback)
    own = [f for f in frames if not re.search("(site|dist)-packages", f.file_name)]
    own = [f for f in own if not f.file_name.startswith(_OURS)]
    return linecache.getline(own[0].file_name, own[0].start_line).strip() if own else ""


def frames_of(equations: Iterable[Any]) -> list[tuple[str, int, str]]:
    """Return the file, line and function of the stack frames of an equation, innermost first.

    JAX records for an equation the frames within the function that it was traced in, so pass those
    of the calls and loops around it, too, innermost first.
    """
    traces = [each.source_info.traceback for each in equations]
    frames = [frame for each in traces for frame in _source_info_util.user_frames(each)]
    return [(f.file_name, f.start_line, f.function_name) for f in frames]


def is_of_library(file: str) -> bool:
    """Return whether a file is in an installed package, or in this one."""
    return file.startswith(_OURS) or re.search("(site|dist)-packages", file) is not None


def has_source(equation: Any) -> bool:
    """Return whether the source line of an equation is known."""
    return equation is not None and bool(source_of(equation))


def source_of_error(error: Exception) -> str:
    """Return where an exception was raised, in the form of ``source_of``."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    codes = [(frame.f_code, line) for frame, line in frames]
    found = [(code.co_filename, line, code.co_qualname) for code, line in codes]
    return _source([each for each in found if not each[0].startswith(_JAX)])


def _source(frames: list[tuple[str, int, str]]) -> str:
    """Describe the innermost of some stack frames; a factory function names its optimizer."""
    frames = [frame for frame in frames if not frame[0].startswith(_OURS)]
    if not frames:
        return ""
    makers = (re.match(r"(\w+)\.<locals>\.update", function) for _, _, function in frames)
    maker = next((f"{found[1]}, " for found in makers if found), "")
    file, line, _ = frames[0]
    return f"{maker}{'/'.join(file.split('/')[-3:])}:{line}"


def has_vma(axis: str) -> bool:
    """Return whether types track what varies over this axis, as under ``check_vma=True``."""
    return axis in varying_axes(lax.axis_index(axis))


def as_varying(x: Any, axes: Iterable[str]) -> Any:
    """Cast ``x`` to varying over ``axes``, all of which types must track."""
    known = varying_axes(x) | unreduced_axes(x)
    missing = tuple(axis for axis in axes if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather(x: Any, name: str, axis: int, *, has_vma: bool) -> Any:
    """Gather ``x`` along ``axis``; the result is invariant if types are tracked."""
    gather = _gather_invariant if has_vma else lax.all_gather
    return gather(x, name, axis=axis, tiled=True)


def is_of_manual_axes(error: ValueError) -> bool:
    """Return whether JAX rejects a sharding because its axes are manual, inside a shard_map."""
    return re.search("manual|not found in mesh", str(error), re.IGNORECASE) is not None


def unbound_axis(error: NameError, axes: Iterable[str]) -> str | None:
    """Return which of these axes JAX found unbound; ``None`` if the error is another one."""
    found = re.search(r"unbound axis name: (\w+)", str(error))
    return found[1] if found and found[1] in axes else None


def is_of_varying_types(error: TypeError) -> bool:
    """Return whether JAX rejects a loop or branch whose types differ only in varying axes."""
    return (
        re.search("so the (manual axis types|varying manual axes) do not", str(error)) is not None
    )


def detected_job(seconds: float) -> tuple[str, str, int, int, tuple[int, ...] | None] | None:
    """Return the job that JAX detects: cluster, address, process count, own number, devices."""
    kinds = [kind for kind in _clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]
    kind = next((kind for kind in kinds if kind.is_env_present()), None)
    if kind is None:
        return None
    detect: Any = kind.auto_detect_unset_distributed_params
    address, number, own, devices = detect(None, None, None, None, None, int(seconds))
    return kind.name or kind.__name__, address, number, own, devices and tuple(devices)


# In seconds: JAX takes no infinite timeout.
_NEVER = 10**6


def start_coordination(
    address: str,
    number: int,
    own: int,
    *,
    devices: Sequence[int] | None,
    bind_address: str,
    seconds: float,
    heartbeat_seconds: int,
) -> None:
    """Call ``jax.distributed.initialize`` with every argument given, so that it detects nothing.

    Raises:
      TimeoutError: the other processes have not connected within ``seconds``.
    """
    before = signal.getsignal(signal.SIGTERM)
    connect = lambda: jax.distributed.initialize(
        address,
        number,
        own,
        None if devices is None else list(devices),
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind_address,
        initialization_timeout=_NEVER,
        heartbeat_timeout_seconds=heartbeat_seconds,
    )
    # After a timeout of its own JAX aborts the process instead of raising, and it ignores Ctrl-C.
    try:
        within(seconds, connect)
    except TimeoutError:
        abandon_coordination()
        raise
    # JAX replaces the handler of SIGTERM, even if the caller has set one.
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and before not in (None, signal.SIG_DFL):
        signal.signal(signal.SIGTERM, before)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns; raise TimeoutError and leave it alone if it takes longer."""
    returned: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    calling = threading.Thread(target=run, name="crossshard connects", daemon=True)
    calling.start()
    calling.join(seconds)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError
    return returned[0]


def has_coordinator() -> bool:
    """Return whether the processes of this job can exchange values without their devices."""
    return _coordinator() is not None


def _coordinator() -> Any:
    return _distributed.global_state.client


def coordinator_address() -> str | None:
    """Return the address of the coordinator to which this process is connected, if it is."""
    return _distributed.global_state.coordinator_address if has_coordinator() else None


def processes_of_job() -> tuple[int, int]:
    """Return the number of processes and this one's index, without starting the backend."""
    state = _distributed.global_state
    return (state.num_processes or 1, state.process_id or 0) if has_coordinator() else (1, 0)


def kv_set(key: str, value: str) -> None:
    """Publish a value under a new key, for every process of the job to read."""
    _coordinator().key_value_set(key, value)


def kv_get(key: str, seconds: float) -> str | None:
    """Wait for a published value; return ``None`` if there is none after ``seconds``."""
    try:
        return str(_coordinator().blocking_key_value_get(key, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def kv_overwrite(key: str, value: str) -> None:
    """Publish a value, in place of the one that was published under the same key."""
    _coordinator().key_value_set(key, value, allow_overwrite=True)


def kv_delete(folder: str) -> None:
    """Delete the values that were published below a folder."""
    _coordinator().key_value_delete(folder)


def kv_get_dir(folder: str) -> dict[str, str]:
    """Return the values published below a folder, ending with a slash, by the rest of the key."""
    found = _coordinator().key_value_dir_get(folder)
    return {key.rpartition("/")[2]: value for key, value in found}


def abandon_coordination() -> None:
    """Leave the job without waiting for others, which ``jax.distributed.shutdown`` would do."""
    state = _distributed.global_state
    for name in ("preemption_sync_manager", "client", "service"):
        # Kept alive, since its destructor would wait, too.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(state, name)))
        setattr(state, name, None)


def backend_is_running() -> bool:
    """Return whether JAX's backend is initialized, which fixes the number of devices."""
    return _xla_bridge.backends_are_initialized()


def backend_has_begun() -> bool:
    """Return whether JAX's backend is initialized, or is being so and waits for all processes."""
    # `backends_are_initialized` would wait for the lock.
    return bool(_xla_bridge._backends) or _xla_bridge._backend_lock.locked()


# JAX's own calls whose `backend_config` is the address of a Python object, and that address. JAX
# leaves them out of the keys of its compilation cache, too.
_OF_PYTHON = r"CustomSPMDPartitioning|InspectSharding|xla_\w*python_\w*callback\w*"
_ADDRESS = re.compile(
    rf'(custom_call @(?:{_OF_PYTHON})\(.*?(?<![\w.])backend_config = ")((?:[^"\\\n]|\\.)+)"'
)


def without_addresses(lowered: jax.stages.Lowered) -> str:
    """Return the text of a lowered program without the addresses of Python objects.

    Addresses differ between processes. Where JAX knows the object, its name replaces the address:
    the function that partitions an operation, with the operation's static arguments.
    """
    return _ADDRESS.sub(lambda found: f'{found[1]}{_at_address(found[2])}"', lowered.as_text())


def _at_address(address: str) -> str:
    """Describe the object at an address, in words that are the same in every process."""
    known = getattr(_custom_partitioning, "_sharding_callbacks", {})
    found = known.get(address.encode())
    if found is None:
        return "an address"
    return f"{_stable_repr(found.partition)} {_stable_repr(found.static_args)}"


def _stable_repr(value: Any) -> str:
    """Describe a value in words that are the same in every process; most objects by their type."""
    if isinstance(value, bool | int | float | complex | str | None):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_stable_repr, value))})"
    if isinstance(value, enum.Enum):
        return str(value)
    value = getattr(value, "func", value)  # of a partial function
    of = value if hasattr(value, "__qualname__") else type(value)
    return f"{of.__module__}.{of.__qualname__}"


def needs_devices(error: ValueError) -> bool:
    """Return whether JAX refuses two kinds of axes in a program that must know its devices."""
    return "mesh should be the same across the entire program" in str(error)


def at_top_level() -> bool:
    """Return whether no function is being traced here."""
    return _core.trace_ctx.is_top_level()


def outside_of_traces() -> AbstractContextManager[object]:
    """Leave all traces."""
    return _core.eval_context()


def bound(equation: Any, given: Sequence[Any]) -> list[Any]:
    """Evaluate an equation on these inputs, under its names and in its context."""
    params = equation.primitive.get_bind_params(equation.params)
    # Before JAX 0.10.2 this is a pair, with the functions that the primitive calls.
    functions, params = params if isinstance(params, tuple) else ((), params)
    with at_source_of(equation), equation.ctx.manager:
        found = equation.primitive.bind(*functions, *given, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def at_source_of(equation: Any) -> AbstractContextManager[object]:
    """Give the operations that are traced inside the names and the source line of an equation."""
    source = equation.source_info
    names = _source_info_util.current_name_stack() + source.name_stack
    return _source_info_util.user_context(source.traceback, name_stack=names)
