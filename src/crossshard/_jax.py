"""All that differs between JAX versions, or that JAX does not export; nothing else imports it."""

import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
from jax import lax
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.lax import parallel as _parallel

# From JAX 0.11 on its name has an underscore.
_NAMES = ("all_gather_invariant", "_all_gather_invariant")
_gather_equal = next(getattr(_parallel, name) for name in _NAMES if hasattr(_parallel, name))
_OURS, _JAX = (os.path.dirname(file) for file in (__file__, jax.__file__))
_TREES = os.path.join(_JAX, "_src", "tree_util.py")


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
    # Up to JAX 0.10.0 the varying axes stand on the aval itself.
    return frozenset(getattr(aval, "vma", ())) if which == "varying" else frozenset()


def varying_axes(x: Any) -> frozenset[str]:
    """The axes over which the type of ``x`` says that it differs."""
    return _axis_type(x, "varying")


def unreduced_axes(x: Any) -> frozenset[str]:
    """The axes over which the type of ``x`` says that a sum is still to be taken."""
    return _axis_type(x, "unreduced")


def opened(jaxpr: Any) -> Any:
    """A jaxpr without the constants that may be closed with it."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> list[Any]:
    """The values of a jaxpr's constants; where it is open, objects that equal nothing else."""
    return list(getattr(jaxpr, "consts", ())) or [object() for _ in opened(jaxpr).constvars]


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a number written into it, rather than a variable."""
    return isinstance(atom, _core.Literal)


def is_ref(atom: Any) -> bool:
    """Whether an input of an equation is a mutable array."""
    return "Ref" in type(atom.aval).__name__


class Call(NamedTuple):
    """An equation that only calls a jaxpr, on its own inputs."""

    jaxpr: Any


class Cond(NamedTuple):
    """A branch: its first input chooses the jaxpr that is called on the others."""

    branches: Sequence[Any]


class While(NamedTuple):
    """A loop, and how many of its inputs only the condition or only the body reads.

    Its inputs are those of the condition, those of the body, and the carry, which both read.
    """

    cond: Any
    cond_constants: int
    body: Any
    body_constants: int


class Scan(NamedTuple):
    """A scan: its inputs are constants, the carry, and the arrays that it takes apart.

    ``steps`` is how many there are, and whether they go backwards.
    """

    body: Any
    constants: int
    carried: int
    steps: tuple[int, bool]


_CALLS = frozenset(
    "jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr".split()
)


def control_flow(equation: Any) -> Call | Cond | While | Scan | None:
    """What jaxprs an equation runs, and how; ``None`` if it runs none, or none known here."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return Cond(params["branches"])
    if name == "while":
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        return While(cond, params["cond_nconsts"], body, params["body_nconsts"])
    if name == "scan":
        steps = params["length"], params["reverse"]
        if "ft_in" in params:  # from JAX 0.11 on: trees of what is constant, carried, taken apart
            constant, carry, _ = params["ft_in"].unpack()
            return Scan(params["jaxpr"], len(list(constant)), len(list(carry)), steps)
        return Scan(params["jaxpr"], params["num_consts"], params["num_carry"], steps)
    if name in _CALLS:
        inner = [params[key] for key in ("jaxpr", "call_jaxpr") if key in params]
        if len(inner) == 1 and len(opened(inner[0]).invars) == len(equation.invars):
            return Call(inner[0])
    return None


def shard_map_parts(equation: Any) -> tuple[frozenset[str], Sequence[Any], Any]:
    """Of a traced ``shard_map``: the axes of its mesh, the specs of its inputs, its jaxpr."""
    params = equation.params
    return frozenset(params["mesh"].axis_names), params["in_specs"], params["jaxpr"]


# After these every shard along their axes has the same; after any other collective it may not.
_EQUALIZING = frozenset({"psum", "pmax", "pmin", "all_gather"})


def equalizes(equation: Any) -> bool:
    """Whether an equation is a collective after which all shards along its axes have the same."""
    ungrouped = equation.params.get("axis_index_groups") is None
    return equation.primitive.name in _EQUALIZING and ungrouped


def named_axes(equation: Any) -> tuple[Any, ...]:
    """The axes that a collective names, in whatever nesting; positions of a vmap among them."""
    return equation.params.get("axes", ()), equation.params.get("axis_name", ())


# Parameters that say how large an array is or where it lies, not what is computed.
_OF_SHAPE = frozenset({"shape", "sharding", "broadcast_dimensions", "out_sharding"})


def same_but_for_shapes(one: Any, other: Any) -> bool:
    """Whether two equations of one primitive compute the same, but for the shapes of arrays."""
    ours, theirs = one.params, other.params
    # Both come from one function, so what they hold besides shapes compares by value.
    return all(
        key in _OF_SHAPE or ours[key] is theirs[key] or ours[key] == theirs[key] for key in ours
    )


def keeps_order(equation: Any) -> bool:
    """Whether an equation only reshapes or broadcasts, and leaves the elements in their order."""
    reshapes = equation.primitive.name in ("broadcast_in_dim", "reshape")
    return reshapes and equation.params.get("dimensions") is None


def source_of(equation: Any) -> str:
    """``clip_by_global_norm, optax/_src/x.py:81``: the rule and the line, where they are known."""
    frames = _source_info_util.user_frames(equation.source_info.traceback)
    return _source([(f.file_name, f.start_line, f.function_name) for f in frames])


def source_of_error(error: Exception) -> str:
    """The same of an exception."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    codes = [(frame.f_code, line) for frame, line in frames]
    found = [(code.co_filename, line, code.co_qualname) for code, line in codes]
    return _source([each for each in found if not each[0].startswith(_JAX)])


def asked_by_jax() -> bool:
    """Whether JAX asks the caller for a text, for a message of its own, and nobody through it."""
    frame = sys._getframe(1)
    # A key's path is made into a text by functions of JAX that anyone may call.
    while frame.f_back and frame.f_code.co_filename.startswith((_OURS, _TREES)):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_JAX)


def _source(frames: list[tuple[str, int, str]]) -> str:
    """Of frames, innermost first; a rule is named by the function that made its update."""
    frames = [frame for frame in frames if not frame[0].startswith(_OURS)]
    if not frames:
        return ""
    makers = (re.match(r"(\w+)\.<locals>\.update", function) for _, _, function in frames)
    maker = next((f"{found[1]}, " for found in makers if found), "")
    file, line, _ = frames[0]
    return f"{maker}{'/'.join(file.split('/')[-3:])}:{line}"


def has_vma(axis: str) -> bool:
    """Whether types say what varies over this axis (``shard_map`` with ``check_vma=True``)."""
    return axis in varying_axes(lax.axis_index(axis))


def as_varying(x: Any, axes: Iterable[str]) -> Any:
    """``x`` typed as varying over ``axes``, over each of which types tell."""
    known = varying_axes(x) | unreduced_axes(x)
    missing = tuple(axis for axis in axes if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather(x: Any, name: str, axis: int, *, has_vma: bool) -> Any:
    """The shards' ``x`` side by side along ``axis``; typed as invariant where types tell."""
    gather = _gather_equal if has_vma else lax.all_gather
    return gather(x, name, axis=axis, tiled=True)


def is_of_manual_axes(error: ValueError) -> bool:
    """Whether JAX says that an array cannot be laid out over axes inside of a shard_map."""
    return re.search("manual|not found in mesh", str(error), re.IGNORECASE) is not None


def has_coordinator() -> bool:
    """Whether the processes of this job can tell each other something without their devices."""
    return _coordinator() is not None


def _coordinator() -> Any:
    return _distributed.global_state.client


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


def backend_is_running() -> bool:
    """Whether JAX has started its devices, after which their number is fixed."""
    return _xla_bridge.backends_are_initialized()


def at_top_level() -> bool:
    """Whether no function is being traced here."""
    return _core.trace_ctx.is_top_level()


def another_mesh_is_set(mesh: jax.sharding.Mesh) -> bool:
    """Whether ``jax.set_mesh`` has put another mesh in force, which shard_map would refuse."""
    in_force = jax.sharding.get_abstract_mesh()
    return not in_force.empty and in_force != mesh.abstract_mesh


def in_place_of_the_users_mesh(mesh: jax.sharding.Mesh) -> AbstractContextManager[object]:
    """Put ``mesh`` in force if ``jax.set_mesh`` has set another."""
    if not another_mesh_is_set(mesh):
        return nullcontext()
    if at_top_level():
        return jax.set_mesh(mesh)
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def with_automatic_axes(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The same devices and names, with axes over which XLA spreads what is not said."""
    types = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)
