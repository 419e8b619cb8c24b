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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax
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
_source_info_util.register_inclusion(os.path.join(_OURS, "cli") + os.sep)


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


def opened(jaxpr: Any) -> Any:
    """The open jaxpr of an open or closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> list[Any]:
    """The constants of a closed jaxpr; unique placeholders for those of an open one."""
    return list(getattr(jaxpr, "consts", ())) or [object() for _ in opened(jaxpr).constvars]


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a literal rather than a variable."""
    return isinstance(atom, _core.Literal)


def is_ref(atom: Any) -> bool:
    """Whether an input of an equation is a mutable array."""
    return "Ref" in type(atom.aval).__name__


def has_effect(equation: Any) -> bool:
    """Whether outputs may depend on more than inputs and named axes: on a Ref, on a callback."""
    effects = (type(each).__name__ for each in equation.effects)
    return any(map(is_ref, equation.invars)) or any(name != "NamedAxisEffect" for name in effects)


def jaxprs_within(equation: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation: of a call, branches, a loop's body."""
    values = equation.params.values()
    each = [x for value in values for x in (value if isinstance(value, tuple | list) else [value])]
    return [x for x in each if hasattr(opened(x), "eqns")]


class Call(NamedTuple):
    """An equation that only calls a jaxpr on its inputs."""

    jaxpr: Any


class Cond(NamedTuple):
    """A branch: the first input chooses the jaxpr that is called on the rest."""

    branches: Sequence[Any]


class While(NamedTuple):
    """A while loop.

    Its inputs are the constants of the condition, those of the body, and the carry of both.
    """

    cond: Any
    cond_constants: int
    body: Any
    body_constants: int


class Scan(NamedTuple):
    """A scan: its inputs are constants, the carry, and the arrays that it iterates over.

    ``steps`` is its length, and whether it runs in reverse.
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
    """The jaxprs that an equation runs, and how; ``None`` if it has none or is unknown."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return Cond(params["branches"])
    if name == "while":
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        return While(cond, params["cond_nconsts"], body, params["body_nconsts"])
    if name == "scan":
        steps = params["length"], params["reverse"]
        if "ft_in" in params:  # since JAX 0.11: trees of the constants, carry and arrays
            constant, carry, _ = params["ft_in"].unpack()
            return Scan(params["jaxpr"], len(list(constant)), len(list(carry)), steps)
        return Scan(params["jaxpr"], params["num_consts"], params["num_carry"], steps)
    if name in _CALLS:
        inner = [params[key] for key in ("jaxpr", "call_jaxpr") if key in params]
        if len(inner) == 1 and len(opened(inner[0]).invars) == len(equation.invars):
            return Call(inner[0])
    return None


# What JAX has besides the primitives of lax, and is no kernel.
_NO_KERNELS = frozenset(
    "add_any addupdate closed_call copy_p core_call custom_jvp_call custom_lin custom_linear_solve "
    "custom_vjp_call custom_vjp_call_jaxpr debug_callback debug_print dimension_size empty empty2 "
    "geqp3 geqrf get iota_2x32_shape jit layout_constraint mesh_cast name pjit pvary reciprocal "
    "remat remat2 reshard stack swap threefry2x32 tile unstack".split()
)
# Whose jaxpr says what they compute, whatever runs in its place.
SAID_BY_JAXPR = {"composite": "jaxpr", "custom_vmap_call": "call"}
# How a function is named of which the user says that it computes each row alone.
ROWWISE = "crossshard_rowwise"


def is_rowwise(equation: Any) -> bool:
    """Whether an equation calls a function of which ``crossshard.rowwise`` was said."""
    return str(equation.params.get("name", "")).startswith(ROWWISE)


def is_kernel(equation: Any) -> bool:
    """Whether the code of an equation cannot be walked: a kernel, a callback, a user's own."""
    name = equation.primitive.name
    if name in ("approx_top_k", "ragged_dot_general") or is_rowwise(equation):
        return True
    own = any(hasattr(module, f"{name.replace('-', '_')}_p") for module in (lax, lax.linalg))
    return not own and name not in _NO_KERNELS and not name.startswith("random_")


def name_of(equation: Any) -> str:
    """What an equation runs, with the name of the kernel if it has one."""
    name, params = equation.primitive.name, equation.params
    own = params.get("name") or params.get("target_name")
    if is_rowwise(equation):
        return f"rowwise({str(own).removeprefix(ROWWISE).strip('_')})"
    return f"{name} {own}" if own else str(name)


def precision_of(equation: Any) -> float:
    """The precision of the coarsest floats that an equation takes or makes; 0 if there are none."""
    dtypes = [getattr(x.aval, "dtype", None) for x in (*equation.invars, *equation.outvars)]
    exact = [x for x in dtypes if x is not None and jnp.issubdtype(x, np.inexact)]
    return max((float(jnp.finfo(x).eps) for x in exact), default=0.0)


def temporary_bytes(compiled: Any) -> int:
    """The bytes that a compiled function needs while it runs; 0 if that is not known."""
    return int(getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0))


def says(equation: Any) -> str:
    """All that the parameters of an equation say, but for the values of constants."""
    grid = equation.params.get("grid_mapping")
    blocks = [str((each.block_shape, each.index_map_jaxpr)) for each in _blocks(grid)]
    consts = [list(map(id, getattr(x, "consts", ()))) for x in jaxprs_within(equation)]
    return f"{equation.primitive.name} {equation.params} {blocks} {consts}"


def _blocks(grid: Any) -> Sequence[Any]:
    return () if grid is None else grid.block_mappings


class Block(NamedTuple):
    """How the steps of a grid choose the blocks of an array.

    Attributes:
      sizes: how many slices a block has along each axis; ``None`` if that is not fixed.
      walks: of an axis whose block is that of a step's own number, the dimension of the grid.
      depends: for each axis, the dimensions of the grid that choose the block.
    """

    sizes: tuple[int | None, ...]
    walks: dict[int, int]
    depends: tuple[frozenset[int], ...]


class Grid(NamedTuple):
    """The grid of a kernel.

    Attributes:
      lengths: of its dimensions.
      before: how many inputs choose blocks, and have none.
      blocks: of the other inputs, and of the outputs.
      alone: the dimensions whose steps are programs of their own, so that nothing is kept between
        them, and which do not read their number, either.
      code: what a step runs, as text.
    """

    lengths: tuple[Any, ...]
    before: int
    blocks: tuple[Block, ...]
    alone: frozenset[int]
    code: str


def grid_of(equation: Any) -> Grid | None:
    """The grid of a ``pallas_call``; ``None`` if it is another one than is known here."""
    params, grid = equation.params, equation.params["grid_mapping"]
    try:
        if grid.num_dynamic_grid_bounds:
            return None
        body, lengths = opened(params["jaxpr"]), tuple(grid.grid)
        vmapped = list(grid.vmapped_dims)
        parallel = getattr(params["compiler_params"], "dimension_semantics", None) or ()
        own = [place for place in range(len(lengths)) if place not in vmapped]
        keeps = bool(grid.scratch_avals or params["input_output_aliases"])
        reads = {
            each.params["axis"]
            for each in _equations_below(body)
            if each.primitive.name in ("program_id", "num_programs")
        }
        # By number or by name; what vmap adds has neither, and is no step that anything sees.
        said = dict(zip(own, map(str, parallel), strict=False))
        alone = {
            place
            for number, place in enumerate(own)
            if number not in reads and (not keeps or "parallel" in said.get(place, "").lower())
        }
        code = str((body, params["compiler_params"], grid.scratch_avals, grid.num_index_operands))
        blocks = tuple(map(_block, grid.block_mappings))
    except (AttributeError, KeyError):
        return None
    return Grid(lengths, grid.num_index_operands, blocks, frozenset({*alone, *vmapped}), code)


def _equations_below(jaxpr: Any) -> Iterable[Any]:
    for equation in opened(jaxpr).eqns:
        yield equation
        for each in jaxprs_within(equation):
            yield from _equations_below(each)


def _block(block: Any) -> Block:
    kinds = [type(each).__name__ for each in block.block_shape]
    known = all(kind in ("Blocked", "Squeezed") for kind in kinds)
    sizes = [getattr(each, "block_size", 1) if known else None for each in block.block_shape]
    maps = opened(block.index_map_jaxpr)
    of: dict[Any, frozenset[int]] = {}
    for place, variable in enumerate(maps.invars):
        of[variable] = frozenset({place} if np.ndim(variable.aval) == 0 else ())
    read = lambda atom: frozenset() if is_literal(atom) else of.get(atom, frozenset())
    for equation in maps.eqns:
        found = frozenset().union(*map(read, equation.invars))
        of |= dict.fromkeys(equation.outvars, found)
    numbers = {variable: place for place, variable in enumerate(maps.invars)}
    walks = {
        axis: numbers[atom]
        for axis, atom in enumerate(maps.outvars)
        if not is_literal(atom) and atom in numbers
    }
    return Block(tuple(sizes), walks, tuple(map(read, maps.outvars)))


def called(equation: Any) -> Any:
    """The closed jaxpr that an equation only calls, and may be written out; else ``None``."""
    call = control_flow(equation)
    again = equation.primitive.name in ("checkpoint", "remat", "remat2")
    return closed(call.jaxpr) if isinstance(call, Call) and not again else None


def with_jaxprs(equation: Any, change: Callable[[Any], Any]) -> Any:
    """An equation in whose parameters each closed jaxpr is changed."""

    def one(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(one, value)) if type(value) in (tuple, list) else value
        if isinstance(value, _ClosedJaxpr):
            return change(value)
        if isinstance(value, _core.Jaxpr) and not value.constvars:
            return change(closed(value)).jaxpr
        return value

    return equation.replace(params={name: one(x) for name, x in equation.params.items()})


def broadcast_equation(atom: Any, shape: tuple[int, ...], like: Any) -> Any:
    """An equation that broadcasts an atom to a shape, from where another equation is."""

    def broadcast(x: Any) -> Any:
        first = len(shape) - x.ndim
        return jax.lax.broadcast_in_dim(x, shape, range(first, len(shape)))

    (found,) = jax.make_jaxpr(broadcast)(
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    ).eqns
    outputs = [_core.Var(found.outvars[0].aval)]
    return found.replace(invars=[atom], outvars=outputs, source_info=like.source_info)


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


def variable_like(atom: Any) -> Any:
    """A new variable of the type of another one."""
    return _core.Var(atom.aval)


def pruned(jaxpr: Any, outputs: Sequence[bool]) -> tuple[Any, list[bool]]:
    """What computes some outputs of a closed jaxpr, a closed jaxpr, and which inputs it takes."""
    found, taken = _partial_eval.dce_jaxpr(jaxpr.jaxpr, list(outputs), instantiate=False)
    return _ClosedJaxpr(found, jaxpr.consts), taken


def as_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function."""
    found: Callable[..., list[Any]] = _core.jaxpr_as_fun(jaxpr)
    return found


def closed(jaxpr: Any) -> Any:
    """The closed jaxpr of an open one without constants, or of a closed one."""
    return jaxpr if hasattr(jaxpr, "consts") else _ClosedJaxpr(jaxpr, ())


def inlined(equation: Any) -> Any:
    """The closed jaxpr of a ``jit`` that says nothing about shardings; ``None`` for all else."""
    if equation.primitive.name not in ("jit", "pjit"):
        return None
    params = equation.params
    placed = [*params["in_shardings"], *params["out_shardings"]]
    free = all(type(each).__name__ == "UnspecifiedValue" for each in placed)
    return params["jaxpr"] if free else None


def is_checkpoint(equation: Any) -> bool:
    """Whether an equation is a ``jax.checkpoint``."""
    return equation.primitive.name in ("checkpoint", "remat", "remat2")


def options_of_scan(equation: Any) -> dict[str, Any]:
    """How a scan is to be compiled, as ``lax.scan`` takes it."""
    names = ("unroll", "_split_transpose")
    return {name: equation.params[name] for name in names if name in equation.params}


def shard_map_parts(equation: Any) -> tuple[frozenset[str], Sequence[Any], Any]:
    """The mesh axes, input specs and jaxpr of a traced ``shard_map``."""
    params = equation.params
    return frozenset(params["mesh"].axis_names), params["in_specs"], params["jaxpr"]


def shard_map(
    function: Callable[..., Any], *, in_specs: Any, out_specs: Any, **where: Any
) -> Callable[..., Any]:
    """``jax.shard_map`` without types, for a function that may read arrays without elements.

    Those are made inside: the compiler of JAX 0.11.2 dies of one that is passed and read.
    """

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        spread = lambda spec, below: jax.tree.map(lambda _: spec, below)
        specs = tree.flatten_up_to(jax.tree.map(spread, in_specs, args))
        is_empty = [not x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in leaves]
        mesh = where.get("mesh") or jax.sharding.get_abstract_mesh()
        pairs = zip(leaves, specs, is_empty, strict=True)
        types = [(_shape_on_shard(x, spec, mesh), x.dtype) if no else None for x, spec, no in pairs]

        def on_shard(*given: Any) -> Any:
            passed = iter(given)
            every = [next(passed) if each is None else jnp.zeros(*each) for each in types]
            return function(*tree.unflatten(every))

        passed = [place for place, no in enumerate(is_empty) if not no]
        mapped = jax.shard_map(
            on_shard,
            in_specs=tuple(specs[place] for place in passed),
            out_specs=out_specs,
            check_vma=False,
            **where,
        )
        return mapped(*(leaves[place] for place in passed))

    return run


def _shape_on_shard(x: Any, spec: Any, mesh: Any) -> tuple[int, ...]:
    return jax.sharding.NamedSharding(mesh, spec).shard_shape(x.shape)


def has_own_derivative(equation: Any) -> bool:
    """Whether autodiff takes the user's rule for an equation, not what its jaxpr says."""
    return equation.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))


def rule_of_derivative(equation: Any, *, backward: bool) -> Any:
    """The jaxpr of a function's own derivative, by what is inexact of its inputs.

    Args:
      equation: a call of the function.
      backward: whether it takes the cotangents of the outputs that are inexact, and returns those
        of the inputs; otherwise the tangents of the inputs, and returns those of the outputs. Then
        come the outputs themselves, which such a function may compute in another way.
    """
    is_inexact = lambda atom: jnp.issubdtype(atom.aval.dtype, np.inexact)
    type_of = lambda atom: jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    varied = [place for place, atom in enumerate(equation.invars) if is_inexact(atom)]
    number = len(equation.invars)

    def rule(*args: Any) -> Any:
        given, slopes = list(args[:number]), list(args[number:])

        def call(*values: Any) -> list[Any]:
            replaced = dict(zip(varied, values, strict=True))
            found = bound(equation, [replaced.get(at, x) for at, x in enumerate(given)])
            return [x for x, atom in zip(found, equation.outvars, strict=True) if is_inexact(atom)]

        primals = [given[place] for place in varied]
        if not backward:
            outputs, found = jax.jvp(call, primals, slopes)
            return *found, *outputs
        outputs, pull = jax.vjp(call, *primals)
        return *pull(slopes), *outputs

    sloped = equation.outvars if backward else equation.invars
    atoms = [*equation.invars, *filter(is_inexact, sloped)]
    return jax.make_jaxpr(rule)(*map(type_of, atoms))


def solvers_of(equation: Any) -> list[tuple[Any, list[int]]]:
    """The jaxprs of a ``custom_linear_solve`` that multiply and solve, and their inputs."""
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    found, first, right = [], 0, range(sum(lengths), len(equation.invars))
    for jaxpr, length in zip(jaxprs, lengths, strict=True):
        if jaxpr is not None:
            found.append((jaxpr, [*range(first, first + length), *right]))
        first += length
    return found


def passes_on(loop: Scan, place: int) -> bool:
    """Whether what a scan carries in a place is the same in every turn."""
    body = opened(loop.body)
    return body.outvars[place] is body.invars[loop.constants + place]


def is_key(loop: Scan, place: int) -> bool:
    """Whether what a scan carries in a place is a PRNG key, of a type or of old."""
    dtype = opened(loop.body).invars[loop.constants + place].aval.dtype
    return bool(jnp.issubdtype(dtype, dtypes.prng_key) or dtype == np.uint32)


def names_axes(equation: Any) -> bool:
    """Whether an equation is a collective over named axes, rather than over those of vmap."""
    params = equation.params
    if "axes" not in params and "axis_name" not in params:
        return False
    return any(isinstance(name, str) for name in jax.tree.leaves(named_axes(equation)))


def untyped_axes(equation: Any, names: tuple[str, ...]) -> frozenset[Any]:
    """The axes of an equation, if it is one of these collectives, without types."""
    if equation.primitive.name not in names or equation.params.get("axis_index_groups"):
        return frozenset()
    axes = equation.params["axes" if "axes" in equation.params else "axis_name"]
    return frozenset(axes if isinstance(axes, tuple | list) else (axes,))


def named_axes(equation: Any) -> tuple[Any, ...]:
    """The axes of a collective, possibly nested; positional axes of vmap are included."""
    return equation.params.get("axes", ()), equation.params.get("axis_name", ())


# Equation parameters about the shape or sharding of an array, not about the computation.
_OF_SHAPE = frozenset({"shape", "sharding", "broadcast_dimensions", "out_sharding"})


def same_but_for_shapes(one: Any, other: Any) -> bool:
    """Whether two equations of one primitive are equal except for the shapes of arrays."""
    left, right = one.params, other.params
    # Both come from one function, so their other parameters compare by value.
    return all(
        key in _OF_SHAPE or left[key] is right[key] or left[key] == right[key] for key in left
    )


def keeps_order(equation: Any) -> bool:
    """Whether an equation only reshapes or broadcasts, and keeps the order of elements."""
    reshapes = equation.primitive.name in ("broadcast_in_dim", "reshape")
    return reshapes and equation.params.get("dimensions") is None


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
