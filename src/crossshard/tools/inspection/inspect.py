"""``inspect``: a communication report on a lowered or compiled step."""

import dataclasses
import itertools
import math
import numbers
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from crossshard import TrainState, _check
from crossshard._annotations import PyTree
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools.inspection.collectives import collectives
from crossshard.tools.inspection.hlo import Groups, Module, parse
from crossshard.tools.inspection.report import UNKNOWN, Communication, Memory

# The names of the axes of a program's mesh with their sizes, in the order of its devices.
Axes: TypeAlias = tuple[tuple[str, int], ...]


class _HoldsLowered(Protocol):
    """What ``nnx.jit(step).lower(…)`` returns."""

    @property
    def lowered(self) -> jax.stages.Lowered: ...


class _HoldsCompiled(Protocol):
    """What ``nnx.jit(step).lower(…).compile()`` returns."""

    @property
    def compiled(self) -> jax.stages.Compiled: ...


Program: TypeAlias = (
    jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled | _HoldsLowered | _HoldsCompiled
)


class HasLower(Protocol):
    """A function of ``jax.jit`` or ``nnx.jit``, or a ``TrainStep``."""

    def lower(self, *args: Any, **kwargs: Any) -> Program:
        """The program for these arguments."""


def inspect(
    program: Program,
    parameters: PyTree | int | None = None,
    *,
    axis_name: str | Sequence[str] | None = None,
) -> Communication:
    """Report every collective of a compiled step, its bytes, and the lower bound.

    It works for any JAX step. N shards that average gradients of P bytes of parameters each send at
    least 2(N−1)/N · P. An all-reduce of the gradients sends that; so does a reduce-scatter of the
    gradients with an all-gather of the parameters, before or after the update. P is counted in the
    parameters' dtype, so sending a wider dtype raises the ratio.

    The program of a ``TrainStep`` knows its parameters and its shard axes. Of any other, pass what
    it trains as ``parameters``; without them there is no bound. The bound is that of one update: a
    program of several steps sends it as often, and so does one that gathers parameters again.

    N is the number of shards that the collectives connect. Devices that differ only along other
    mesh axes than ``axis_name``, over which layers are split, are one shard; what they send to each
    other is not compared with the bound, and of layers that are split over them one device's part
    counts.

    Of a conditional, the branch that sends most counts; a loop of unknown length counts once. What
    ``nonfinite=`` sends only where a gradient is not finite does not count.

    Args:
      program: a ``jax.stages.Lowered`` or ``Traced``, which is compiled, or a ``Compiled``; also
        those of ``nnx.jit``.
      parameters: what the program trains, as a pytree of arrays or ``jax.ShapeDtypeStruct``, with
        their shardings if they are split over devices; or the bytes of one shard.
      axis_name: the mesh axes that split the batch; by default those of a ``TrainStep``, or all.

    Returns:
      The report: print it, read its attributes, or call ``to_json()``.

    Raises:
      ArgumentTypeError: ``program`` is not a lowered or compiled step, or the parameters are not
        arrays.
      ArgumentError: the program has no text, or text that is not HLO, or its mesh lacks the axis.

    >>> import jax, jax.numpy as jnp
    >>> report = inspect(jax.jit(lambda w: w - 0.1 * w).lower(jnp.zeros(3)))
    >>> report.collectives, report.bytes_sent, report.memory.argument
    ((), 0, 12)
    """
    compiled: Any = _unwrapped(program)
    if isinstance(compiled, jax.stages.Traced):
        compiled = compiled.lower()
    if isinstance(compiled, jax.stages.Lowered):
        compiled = compiled.compile()
    if not isinstance(compiled, jax.stages.Compiled):
        name = getattr(program, "__name__", None)
        raise ArgumentTypeError(
            f"inspect takes a lowered or compiled step, such as jax.jit({name or 'step'})"
            f".lower(*args); got {type(program).__name__}{f' {name}' if name else ''}."
        )
    text = compiled.as_text()
    if text is None:
        raise ArgumentError("The compiled program has no HLO text; compile it again.")
    inputs = _inputs(compiled)
    axes = _mesh_axes(inputs)
    states = [each for each in inputs if isinstance(each, TrainState)]
    of_data = _axes_of_data(axis_name, axes, inputs if states else ())
    found: Mapping[str, int] = {}
    if parameters is not None:
        found = named_bytes(parameters, of_data)
    elif states:
        found = _counted(states[0].params, of_data)
        if states[0].grouped:
            # Each shard has its own.
            shards = jax.tree.leaves(states[0].params)[0].shape[0]
            found = {dtype: total // shards for dtype, total in found.items()}
    stats = compiled.memory_analysis()
    memory = stats and Memory(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        temp=stats.temp_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
    )
    return report_on(parse(text), found, memory, axes, of_data)


def report_on(
    module: Module,
    parameters: Mapping[str, int] | None = None,
    memory: Memory | None = None,
    axes: Axes = (),
    of_data: Collection[str] = (),
) -> Communication:
    """The report on a parsed program, of whose mesh's ``axes`` those ``of_data`` split the batch.

    All of them do if it is empty.
    """
    if math.prod(size for _, size in axes) != module.devices:
        axes = ()
    found = []
    for each in collectives(module):
        along = _axes_of(each.groups, axes)
        within = bool(along and of_data) and not {*along} & {*of_data}
        found.append(dataclasses.replace(each, axes=along, within_shard=within))
    sending = {each.groups for each in found if each.bytes_sent}
    return Communication(
        collectives=tuple(found),
        devices=module.devices,
        shards=joined_shards(sending, module.devices, axes, of_data),
        parameters=dict(parameters or {}),
        memory=memory,
    )


def _axes_of(groups: Groups, axes: Axes) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ.

    >>> _axes_of(((0, 1), (2, 3)), (("data", 2), ("model", 2)))
    ('model',)
    """
    if not axes:
        return ()
    sizes = [size for _, size in axes]
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.array(np.unravel_index(list(group), sizes))
        differ |= (places != places[:, :1]).any(axis=1)
    return tuple(name for (name, _), along in zip(axes, differ, strict=True) if along)


def joined_shards(
    joining: Iterable[Groups], devices: int, axes: Axes, of_data: Collection[str]
) -> int:
    """The largest number of shards that groups connect, directly or through others.

    Args:
      joining: the groups of some collectives.
      devices: the number of devices.
      axes: those of the mesh; empty if unknown.
      of_data: the axes that split the batch, all if empty: other devices are one shard.

    >>> joined_shards([((0, 1), (2, 3)), ((0, 2), (1, 3))], 8, (), ())
    4
    >>> joined_shards([((0, 1, 2, 3),)], 4, (("data", 2), ("model", 2)), ["data"])
    2
    """
    sizes = [size for _, size in axes] or [devices]
    kept = [not of_data or name in of_data for name, _ in axes] or [True]
    places = np.indices(sizes).reshape(len(sizes), -1)[kept]
    shard = np.unique(places, axis=1, return_inverse=True)[1].ravel()
    leader = np.arange(shard.max() + 1)
    for group in itertools.chain.from_iterable(joining):
        leaders = np.unique(leader[shard[list(group)]])
        if len(leaders) > 1:
            leader[np.isin(leader, leaders)] = leaders[0]
    return max(Counter(leader.tolist()).values())


def named_bytes(parameters: Any, of_data: Collection[str] = ()) -> Mapping[str, int]:
    """The bytes of one shard's copy of the given parameters, by dtype.

    They are a number of bytes, or a pytree of arrays or ``jax.ShapeDtypeStruct``. Scalars are not
    counted, like their collectives. The axes ``of_data`` split the batch; all do if it is empty.

    >>> import numpy as np
    >>> dict(named_bytes({"w": np.zeros((3, 4), np.float32), "scale": np.zeros((), np.float32)}))
    {'f32': 48}
    """
    is_number = isinstance(parameters, numbers.Integral) and not isinstance(parameters, bool)
    found = {UNKNOWN: int(parameters)} if is_number else _counted(parameters, of_data)
    total = sum(found.values())
    if total <= 0:
        raise ArgumentError(
            "parameters must be arrays, not only scalars, or their number of bytes; got "
            f"{str(parameters)[:80]}, which has {total} bytes to reduce."
        )
    return found


def is_program(step: Any) -> bool:
    """Whether this is a traced, lowered or compiled program of JAX or Flax."""
    stages = jax.stages.Lowered | jax.stages.Compiled | jax.stages.Traced
    return isinstance(_unwrapped(step), stages)


def program_of(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
    """A step lowered for its arguments, or a program itself, which takes none.

    A step is a function, with ``jax.jit`` or without, or anything that has ``lower``.
    """
    if is_program(step):
        if args or kwargs:
            raise ArgumentTypeError(
                f"{type(step).__name__} is a program that already has its arguments; leave out the "
                f"{len(args) + len(kwargs)} given."
            )
        return step
    # Strings also have a method lower.
    if hasattr(step, "lower") and not isinstance(step, str | bytes | bytearray):
        return step.lower(*args, **kwargs)
    if not callable(step):
        raise ArgumentTypeError(
            "A step is a function, an object with a method lower, or a lowered or compiled "
            f"program; got {type(step).__name__}."
        )
    return jax.jit(step).lower(*args, **kwargs)


def _unwrapped(program: Any) -> Any:
    # Flax wraps what JAX lowers and compiles.
    return getattr(program, "compiled", getattr(program, "lowered", program))


def _inputs(compiled: jax.stages.Compiled) -> list[Any]:
    """The types of a program's arguments, with the shardings of those that it uses.

    The state of a ``TrainStep`` is one of them.
    """
    infos, tree = jax.tree.flatten(compiled.args_info)
    # Those of unused arguments are None.
    shardings = tree.flatten_up_to(compiled.input_shardings)
    types = [
        jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)
        for info, sharding in zip(infos, shardings, strict=True)
    ]
    is_state = lambda each: isinstance(each, TrainState)
    return jax.tree.leaves(tree.unflatten(types), is_leaf=is_state)


def _mesh_axes(inputs: Sequence[Any]) -> Axes:
    """The axes of the mesh that a program's inputs are on; empty if unknown.

    The program numbers the devices of one slice of a TPU after those of the other, and a mesh in
    another order is as good as unknown.
    """
    shardings = [each.sharding for each in jax.tree.leaves(list(inputs))]
    meshes = [each.mesh for each in shardings if isinstance(each, NamedSharding)]
    if not meshes:
        return ()
    found = max(meshes, key=lambda mesh: len(mesh.axis_names))
    slices = [getattr(device, "slice_index", 0) for device in found.devices.flat]
    return tuple(found.shape.items()) if slices == sorted(slices) else ()


def _axes_of_data(given: Any, axes: Axes, inputs: Sequence[Any]) -> tuple[str, ...]:
    """The mesh axes that split the batch: those given, else those of a step, else all."""
    names = tuple(name for name, _ in axes)
    if given is None:
        beside = [each for each in inputs if not isinstance(each, TrainState)]
        split = {name for each in beside for name in _split_over(each)}
        return tuple(name for name in names if name in split) or names
    named = (given,) if isinstance(given, str) else given
    if not names:
        raise ArgumentError(
            f"axis_name={_check.shown(given)} names an axis of the mesh of the program's inputs, "
            "which are on none. Lower the step with arrays or types that have their shardings."
        )
    if not isinstance(named, Sequence) or not named or not all(each in names for each in named):
        raise ArgumentError(
            f"axis_name must name axes of the program's mesh, {', '.join(names)}; got "
            f"{_check.shown(given)}."
        )
    return tuple(named)


def _counted(parameters: Any, of_data: Collection[str]) -> Counter[str]:
    """The bytes of one shard's copy of arrays, by dtype."""
    found: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ArgumentTypeError(
                "parameters must be a pytree of arrays or of jax.ShapeDtypeStruct, or a number "
                f"of bytes; got {type(leaf).__name__} at "
                f"{jax.tree_util.keystr(path) or 'its root'}."
            )
        size, split = math.prod(leaf.shape), _split_over(leaf).items()
        pieces = math.prod(number for name, number in split if of_data and name not in of_data)
        if size > 1:
            found[_xla_name(leaf.dtype.name)] += size * leaf.dtype.itemsize // pieces
    return found


def _split_over(array: Any) -> dict[str, int]:
    """The mesh axes over which an array is split, with their sizes."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return {}
    parts = (part if isinstance(part, tuple) else (part,) for part in sharding.spec)
    names = (name for part in parts for name in part if isinstance(name, str))
    return {name: sharding.mesh.shape[name] for name in names}


def _xla_name(dtype: str) -> str:
    """XLA's name of a NumPy dtype: ``f32`` for ``float32``, ``f8e4m3fn`` for ``float8_e4m3fn``."""
    for numpy_name, xla_name in (("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "s")):
        dtype = dtype.replace(numpy_name, xla_name)
    return dtype.replace("_", "")
