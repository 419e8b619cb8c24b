"""All private or version-dependent JAX API; no other file imports private JAX."""

import ctypes
import enum
import linecache
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
# Since JAX 0.12 every jaxpr has its constants, and a closed one is made of an open one as before.
_ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", _core.Jaxpr)
_OURS, _JAX = (os.path.dirname(file) for file in (__file__, jax.__file__))

# JAX notes the ten innermost lines of user code at most, before 0.10.2, and ours would fill them.
# The lines of the command are kept: they tell that a step is not called by the user's own code.
_source_info_util.register_exclusion(_OURS + os.sep)
_source_info_util.register_inclusion(os.path.join(_OURS, "tools", "cli.py"))


def bound_axes() -> dict[str, int]:
    """The named axes that collectives can use here, outermost first, with their sizes."""
    return dict(_core.get_axis_env().axis_sizes)


def manual_axes() -> frozenset[str]:
    """The bound axes that are mesh axes (of shard_map or pmap) rather than vmap's."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def _axis_type(x: Any, which: str) -> frozenset[str]:
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(getattr(manual, which))
    # Before JAX 0.10.1 the varying axes are an attribute of the aval.
    return frozenset(getattr(aval, "vma", ())) if which == "varying" else frozenset()


def varying_axes(x: Any) -> frozenset[str]:
    """The axes over which ``x`` is varying, from its type."""
    return _axis_type(x, "varying")


def unreduced_axes(x: Any) -> frozenset[str]:
    """The axes over which ``x`` is unreduced, from its type."""
    return _axis_type(x, "unreduced")


def summed_by_type(x: Any) -> Any:
    """An array that is unreduced over explicit mesh axes, summed over these; others unchanged.

    Its value is that sum. A copy that counts as reduced over an axis counts as replicated then.
    """
    spec = getattr(getattr(getattr(x, "aval", None), "sharding", None), "spec", None)
    if spec is None or not (spec.unreduced or spec.reduced):
        return x
    # Split as it is along other axes: XLA compiles sums that are split on the way wrongly
    # (openxla/xla#40034).
    partitions = spec.partitions if hasattr(spec, "partitions") else spec
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*partitions))


def without_unread(jaxpr: Any, number: int | None = None) -> Any:
    """A closed jaxpr with what its outputs, or the first of them, are computed from alone.

    It has the same inputs.
    """
    outputs = [number is None or place < number for place in range(len(jaxpr.jaxpr.outvars))]
    found, _ = _partial_eval.dce_jaxpr(jaxpr.jaxpr, outputs, instantiate=True)
    return _ClosedJaxpr(found, jaxpr.consts)


def with_equations(
    jaxpr: Any,
    constants: dict[Any, Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    equations: Sequence[Any],
) -> Any:
    """A closed jaxpr of these equations, with the effects of another one."""
    names = jaxpr.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    found = _core.Jaxpr(
        list(constants), inputs, outputs, equations, jaxpr.jaxpr.effects, debug_info=names
    )
    return _ClosedJaxpr(found, list(constants.values()))


def pruned(jaxpr: Any, outputs: Sequence[bool]) -> tuple[Any, list[bool]]:
    """What computes some outputs of a closed jaxpr, a closed jaxpr, and which inputs it takes."""
    found, taken = _partial_eval.dce_jaxpr(jaxpr.jaxpr, list(outputs), instantiate=False)
    return _ClosedJaxpr(found, jaxpr.consts), taken


def closed(jaxpr: Any) -> Any:
    """The closed jaxpr of an open one without constants, or of a closed one."""
    return jaxpr if hasattr(jaxpr, "consts") else _ClosedJaxpr(jaxpr, ())


def shard_map(
    function: Callable[..., Any], *, in_specs: Any, out_specs: Any, **where: Any
) -> Callable[..., Any]:
    """``jax.shard_map`` without types, for a function that may read arrays without elements.

    Those are made inside: the compiler of JAX 0.11.2 dies of one that is passed and read.
    """

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        is_empty = [not x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in leaves]
        spread = lambda spec, below: jax.tree.map(lambda _: spec, below)
        specs = tree.flatten_up_to(jax.tree.map(spread, in_specs, args))
        mesh = where.get("mesh") or jax.sharding.get_abstract_mesh()
        shape = lambda x, spec: jax.sharding.NamedSharding(mesh, spec).shard_shape(x.shape)
        pairs = zip(leaves, specs, is_empty, strict=True)
        types = [(shape(x, spec), x.dtype) if no else None for x, spec, no in pairs]

        def on_shard(*given: Any) -> Any:
            passed = iter(given)
            every = [next(passed) if each is None else jnp.zeros(*each) for each in types]
            return function(*tree.unflatten(every))

        passed = [place for place, no in enumerate(is_empty) if not no]
        own = tuple(specs[place] for place in passed)
        how = {"in_specs": own, "out_specs": out_specs, "check_vma": False}
        return jax.shard_map(on_shard, **how, **where)(*(leaves[place] for place in passed))

    return run


def source_of(equation: Any) -> str:
    """``clip_by_global_norm, optax/_src/x.py:81``: the optimizer and its source line, if known."""
    frames = _source_info_util.user_frames(equation.source_info.traceback)
    return _source([(f.file_name, f.start_line, f.function_name) for f in frames])


def sources_of(equation: Any) -> str:
    """As ``source_of``, and if that line is a library's, from which line of the user's own."""
    frames = list(_source_info_util.user_frames(equation.source_info.traceback))
    lines = [(f.file_name, f.start_line, f.function_name) for f in frames]
    own = [line for line in lines if not re.search("(site|dist)-packages", line[0])]
    return ", from ".join(dict.fromkeys(filter(None, map(_source, (lines, own)))))


def code_of(equation: Any) -> str:
    """The line of the user's own code that an equation is from; empty if unknown."""
    frames = _source_info_util.user_frames(equation.source_info.traceback)
    own = [f for f in frames if not re.search("(site|dist)-packages", f.file_name)]
    own = [f for f in own if not f.file_name.startswith(_OURS)]
    return linecache.getline(own[0].file_name, own[0].start_line).strip() if own else ""


def has_source(equation: Any) -> bool:
    """Whether the source line of an equation is known."""
    return equation is not None and bool(source_of(equation))


def source_of_error(error: Exception) -> str:
    """As ``source_of``, for an exception."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    codes = [(frame.f_code, line) for frame, line in frames]
    found = [(code.co_filename, line, code.co_qualname) for code, line in codes]
    return _source([each for each in found if not each[0].startswith(_JAX)])


def _source(frames: list[tuple[str, int, str]]) -> str:
    """From stack frames, innermost first; an optimizer is named by its factory function."""
    frames = [frame for frame in frames if not frame[0].startswith(_OURS)]
    if not frames:
        return ""
    makers = (re.match(r"(\w+)\.<locals>\.update", function) for _, _, function in frames)
    maker = next((f"{found[1]}, " for found in makers if found), "")
    file, line, _ = frames[0]
    return f"{maker}{'/'.join(file.split('/')[-3:])}:{line}"


def has_vma(axis: str) -> bool:
    """Whether types track what varies over this axis (``shard_map`` with ``check_vma=True``)."""
    return axis in varying_axes(lax.axis_index(axis))


def as_varying(x: Any, axes: Iterable[str]) -> Any:
    """``x`` cast to varying over ``axes``, all of which types track."""
    known = varying_axes(x) | unreduced_axes(x)
    missing = tuple(axis for axis in axes if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather(x: Any, name: str, axis: int, *, has_vma: bool) -> Any:
    """All-gather of ``x``, concatenated along ``axis``; invariant if types are tracked."""
    gather = _gather_invariant if has_vma else lax.all_gather
    return gather(x, name, axis=axis, tiled=True)


def is_of_manual_axes(error: ValueError) -> bool:
    """Whether JAX rejects a sharding because its axes are manual, inside a shard_map."""
    return re.search("manual|not found in mesh", str(error), re.IGNORECASE) is not None


def unbound_axis(error: NameError, axes: Iterable[str]) -> str | None:
    """The axis of these that JAX has not found bound; ``None`` if the error is another one."""
    found = re.search(r"unbound axis name: (\w+)", str(error))
    return found[1] if found and found[1] in axes else None


def is_of_varying_types(error: TypeError) -> bool:
    """Whether JAX rejects a loop or branch where types differ only by the axes they vary over."""
    return (
        re.search("so the (manual axis types|varying manual axes) do not", str(error)) is not None
    )


def detected_job(seconds: float) -> tuple[str, str, int, int, tuple[int, ...] | None] | None:
    """The job that JAX finds: by what, address, number of processes, own number, and devices."""
    kinds = [kind for kind in _clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]
    kind = next((kind for kind in kinds if kind.is_env_present()), None)
    if kind is None:
        return None
    detect: Any = kind.auto_detect_unset_distributed_params
    address, number, own, devices = detect(None, None, None, None, None, int(seconds))
    return kind.name or kind.__name__, address, number, own, devices and tuple(devices)


# Seconds, of which JAX takes no infinite number.
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
    """``jax.distributed.initialize`` with nothing left to be found out.

    Raises:
      TimeoutError: the others have not come in so many seconds.
    """
    before = signal.getsignal(signal.SIGTERM)
    raised: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                address,
                number,
                own,
                None if devices is None else list(devices),
                cluster_detection_method="deactivate",
                coordinator_bind_address=bind_address,
                initialization_timeout=_NEVER,
                heartbeat_timeout_seconds=heartbeat_seconds,
            )
        except BaseException as error:
            raised.append(error)

    # When its own time is over, JAX aborts the process instead of raising; Ctrl-C it does not hear.
    connecting = threading.Thread(target=connect, name="crossshard connects", daemon=True)
    connecting.start()
    connecting.join(seconds)
    if connecting.is_alive():
        abandon_coordination()
        raise TimeoutError
    if raised:
        raise raised[0]
    # JAX takes SIGTERM over, also where the caller has a handler for it.
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and before not in (None, signal.SIG_DFL):
        signal.signal(signal.SIGTERM, before)


def has_coordinator() -> bool:
    """Whether the processes of this job can tell each other something without their devices."""
    return _coordinator() is not None


def _coordinator() -> Any:
    return _distributed.global_state.client


def processes_of_job() -> tuple[int, int]:
    """How many processes there are and which of them this is, without starting the backend."""
    state = _distributed.global_state
    return (state.num_processes or 1, state.process_id or 0) if has_coordinator() else (1, 0)


def tell_processes(key: str, value: str) -> None:
    """Write down a value that every process of the job can read, once."""
    _coordinator().key_value_set(key, value)


def told_by_processes(key: str, seconds: float) -> str | None:
    """What a process wrote down; ``None`` if nobody has in so many seconds."""
    try:
        return str(_coordinator().blocking_key_value_get(key, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def tell_again(key: str, value: str) -> None:
    """As ``tell_processes``, in place of what was told before."""
    _coordinator().key_value_set(key, value, allow_overwrite=True)


def forget(folder: str) -> None:
    """Remove what processes wrote down below a folder."""
    _coordinator().key_value_delete(folder)


def told_below(folder: str) -> dict[str, str]:
    """What processes wrote down below a folder, which ends with a slash, by the rest of the key."""
    found = _coordinator().key_value_dir_get(folder)
    return {key.rpartition("/")[2]: value for key, value in found}


def abandon_coordination() -> None:
    """Leave without waiting for the other processes, as ``jax.distributed.shutdown`` does."""
    state = _distributed.global_state
    for name in ("preemption_sync_manager", "client", "service"):
        # Its destructor would wait, too.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(state, name)))
        setattr(state, name, None)


def backend_is_running() -> bool:
    """Whether JAX's backend is initialized, which fixes the number of devices."""
    return _xla_bridge.backends_are_initialized()


def backend_has_begun() -> bool:
    """Whether JAX's backend is initialized or begins to be, where it waits for all processes."""
    # `backends_are_initialized` would wait for the lock.
    return bool(_xla_bridge._backends) or _xla_bridge._backend_lock.locked()


# JAX's own calls whose `backend_config` is the address of a Python object, and that address. JAX
# leaves them out of the keys of its compilation cache, too.
_OF_PYTHON = r"CustomSPMDPartitioning|InspectSharding|xla_\w*python_\w*callback\w*"
_ADDRESS = re.compile(
    rf'(custom_call @(?:{_OF_PYTHON})\(.*?(?<![\w.])backend_config = ")((?:[^"\\\n]|\\.)+)"'
)


def without_addresses(lowered: jax.stages.Lowered) -> str:
    """The text of a lowered program, in which no Python object is named by its address.

    An address is another one in each process. Where JAX tells what is there, its name stands in
    its place: the function that partitions an operation, with the operation's static arguments.
    """
    return _ADDRESS.sub(lambda found: f'{found[1]}{_at_address(found[2])}"', lowered.as_text())


def _at_address(address: str) -> str:
    """What JAX keeps at an address, as far as it can be told in every process alike."""
    known = getattr(_custom_partitioning, "_sharding_callbacks", {})
    found = known.get(address.encode())
    if found is None:
        return "an address"
    return f"{_told(found.partition)} {_told(found.static_args)}"


def _told(value: Any) -> str:
    """A value in words that are the same in every process; of most objects the type alone."""
    if isinstance(value, bool | int | float | complex | str | None):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_told, value))})"
    if isinstance(value, enum.Enum):
        return str(value)
    value = getattr(value, "func", value)  # of a partial function
    of = value if hasattr(value, "__qualname__") else type(value)
    return f"{of.__module__}.{of.__qualname__}"


def needs_devices(error: ValueError) -> bool:
    """Whether JAX refuses a program, which must know its devices, for having two kinds of axes."""
    return "mesh should be the same across the entire program" in str(error)


def at_top_level() -> bool:
    """Whether no function is being traced here."""
    return _core.trace_ctx.is_top_level()


def outside_of_traces() -> AbstractContextManager[object]:
    """Leave all traces."""
    return _core.eval_context()


def bound(equation: Any, given: Sequence[Any]) -> list[Any]:
    """The outputs of an equation for these inputs, under its names and in its context."""
    params = equation.primitive.get_bind_params(equation.params)
    # Before JAX 0.10.2 a pair, with the functions that the primitive calls.
    functions, params = params if isinstance(params, tuple) else ((), params)
    with at_source_of(equation), equation.ctx.manager:
        found = equation.primitive.bind(*functions, *given, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def at_source_of(equation: Any) -> AbstractContextManager[object]:
    """Give what is computed the names and the source line of an equation."""
    source = equation.source_info
    names = _source_info_util.current_name_stack() + source.name_stack
    return _source_info_util.user_context(source.traceback, name_stack=names)
