"""Reports the communication of a lowered or compiled step."""

import dataclasses
import itertools
import json
import math
import numbers
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from crossshard import TrainState, _check
from crossshard._annotations import PyTree
from crossshard._text import count, exact_size, table
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools.inspection.collectives import (
    KERNELS,
    KINDS,
    NOTHING,
    PRODUCTS,
    Collective,
    bytes_sent,
    collectives,
)
from crossshard.tools.inspection.hlo import Groups, Module, parse
from crossshard.tools.inspection.kernels import kernel_bytes

_HEAD = ("collective", "operands", "sent per shard", "groups", "when", "source")

# The properties that JSON has in addition to the attributes.
_TOTALS = (
    *("bytes_sent", "scalar_bytes_sent"),
    *("bytes_in_branches", "bytes_by_axes", "bytes_between_shards", "lower_bound", "ratio"),
    *("bytes_behind_matrix_products", "bytes_behind_other_kernels", "bytes_exposed"),
    "hidden_share",
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device, from the compiler's memory analysis.

    Attributes:
      argument: the arguments.
      output: the results.
      temp: the temporaries.
      alias: the arguments that are aliased to outputs.
      peak: the peak memory.
    """

    argument: int
    output: int
    temp: int
    alias: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Communication:
    """The communication of one call of a compiled program, on each of its devices.

    Scalar operands, such as losses and metrics, are listed but not counted in ``bytes_sent``, the
    lower bound or the ratio. Of a conditional, the branch that sends most is counted, so a call
    sends at most the given bytes.

    Attributes:
      collectives: in the order in which they run.
      devices: the number of devices that the program runs on.
      shards: N, the number of shards that collectives connect.
      parameter_bytes: P, the bytes of one shard's copy of the parameters; ``None`` if unknown.
      memory: the compiler's memory analysis, or ``None``.
      kernel_bytes: what all kernels but matrix products read and write, in bytes. A fusion reads
        each operand once; an array of which it uses a slice counts as the slice.

    >>> import jax, jax.numpy as jnp
    >>> import crossshard
    >>> report = crossshard.inspect(jax.jit(lambda w: 2 * w).lower(jnp.zeros(3)))
    >>> report.devices, report.bytes_sent, report.ratio
    (1, 0, None)
    """

    collectives: tuple[Collective, ...]
    devices: int
    shards: int
    parameter_bytes: int | None
    memory: Memory | None
    kernel_bytes: int

    @property
    def counted(self) -> tuple[Collective, ...]:
        """The collectives that the totals count; see ``Collective.counted``."""
        return tuple(each for each in self.collectives if each.counted)

    @property
    def bytes_sent(self) -> float:
        """The bytes that one shard sends, without scalars."""
        return sum(each.bytes_sent for each in self.counted)

    @property
    def bytes_in_branches(self) -> float:
        """The part of ``bytes_sent`` that is sent only if conditionals take the largest branch."""
        return sum(each.bytes_sent for each in self.counted if each.in_branch)

    @property
    def scalar_bytes_sent(self) -> float:
        """The bytes that one shard sends for scalars."""
        return sum(each.scalar_bytes_sent for each in self.counted)

    @property
    def bytes_by_axes(self) -> dict[str, float]:
        """The bytes that one shard sends along each mesh axis, or several, without scalars.

        Collectives whose axes are unknown are left out.
        """
        found: dict[str, float] = defaultdict(float)
        for each in self.counted:
            if each.bytes_sent and each.axes:
                found[", ".join(each.axes)] += each.bytes_sent
        return dict(found)

    @property
    def bytes_between_shards(self) -> float:
        """``bytes_sent`` without what the devices of one shard send to each other."""
        return sum(each.bytes_sent for each in self.counted if not each.within_shard)

    @property
    def bytes_behind_matrix_products(self) -> float:
        """The bytes that a shard sends while matrix products are scheduled, without scalars."""
        return self._bytes_behind(PRODUCTS)

    @property
    def bytes_behind_other_kernels(self) -> float:
        """The bytes that a shard sends while only other kernels run, such as the update's."""
        return self._bytes_behind(KERNELS)

    @property
    def bytes_exposed(self) -> float:
        """The bytes that a shard sends while nothing else runs, as in synchronous collectives."""
        return self._bytes_behind(NOTHING)

    @property
    def hidden_share(self) -> float | None:
        """The share of ``bytes_sent`` behind matrix products; ``None`` if nothing is sent."""
        return self.hidden_share_of(*KINDS)

    def hidden_share_of(self, *kinds: str) -> float | None:
        """Return the ``hidden_share`` of some kinds of collectives; ``None`` if they send nothing.

        Gradients travel in ``"all-reduce"`` and ``"reduce-scatter"``; between CPUs of a job in
        ``"all-to-all"``, too.
        """
        sent = sum(each.bytes_sent for each in self.counted if each.kind in kinds)
        return self._bytes_behind(PRODUCTS, kinds) / sent if sent else None

    def _bytes_behind(self, what: str, kinds: Iterable[str] = KINDS) -> float:
        return sum(
            each.bytes_sent for each in self.counted if each.behind == what and each.kind in kinds
        )

    @property
    def lower_bound(self) -> float | None:
        """2(N−1)/N · P: the least that one of N shards has to send to average P bytes once."""
        total = self.parameter_bytes
        return None if total is None else bytes_sent("all-reduce", self.shards, total)

    @property
    def ratio(self) -> float | None:
        """``bytes_between_shards`` over the lower bound; ``None`` if there is no bound."""
        return self.bytes_between_shards / self.lower_bound if self.lower_bound else None

    @property
    def uncounted_loops(self) -> tuple[Collective, ...]:
        """The collectives in loops of unknown length, counted once."""
        return tuple(each for each in self.collectives if each.times is None)

    def to_json(self, indent: int | None = None) -> str:
        """Return the report as JSON: all attributes, also of the collectives, and the totals."""
        totals = {key: getattr(self, key) for key in _TOTALS}
        return json.dumps(dataclasses.asdict(self) | totals, indent=indent)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return a plain text table of the collectives, with the totals, bound and memory."""
        scalars, least = self.scalar_bytes_sent, ""
        if any(each.in_branch for each in self.counted):
            least = "at most "
        if self.uncounted_loops:
            least = "at least "
        lines = [
            table(_HEAD, list(map(_row, self.collectives))),
            f"each of {self.devices} devices sends {least}{exact_size(self.bytes_sent)}"
            + f", and {exact_size(scalars)} for scalars" * bool(scalars),
        ]
        within = {", ".join(each.axes) for each in self.collectives if each.within_shard}
        if len(self.bytes_by_axes) > 1 or within:
            parts = (
                f"{axes} {exact_size(sent)}"
                + ", within a shard and not in the bound" * (axes in within)
                for axes, sent in self.bytes_by_axes.items()
            )
            lines.append(f"along {'; '.join(parts)}")
        if any(each.in_branch for each in self.counted):
            lines.append(
                f"of each conditional the branch that sends most is counted: "
                f"{exact_size(self.bytes_in_branches)} of these"
            )
        if self.lower_bound is None:
            lines.append("the parameters are unknown, so there is no lower bound")
        elif self.shards == 1:
            lines.append("no array is sent between shards, so the lower bound is 0 B")
        else:
            lines.append(
                f"{self.shards} shards need 2(N−1)/N · P = {exact_size(self.lower_bound)} for "
                f"{exact_size(self.parameter_bytes or 0)} of parameters; "
                f"ratio {least}{self.ratio or 0:.3f}"
            )
        if any(each.asynchronous and each.bytes_sent for each in self.collectives):
            lines.append(
                f"{exact_size(self.bytes_behind_matrix_products)} ({self.hidden_share or 0:.0%}) "
                f"behind matrix products, {exact_size(self.bytes_behind_other_kernels)} behind "
                f"other kernels, {exact_size(self.bytes_exposed)} exposed"
            )
        elif self.bytes_sent:
            lines.append("no collective is asynchronous, so all bytes are exposed")
        if self.memory is not None:
            kinds = dataclasses.asdict(self.memory).items()
            words = (f"{name} {exact_size(number)}" for name, number in kinds)
            lines.append(f"memory per device: {', '.join(words)}")
        lines.append(
            f"kernels besides matrix products read and write {exact_size(self.kernel_bytes)}"
        )
        return "\n".join(lines)


def _row(each: Collective) -> tuple[str, ...]:
    """Return a collective as a row of the table, one text for each column."""
    shown = [str(operand) for operand in each.operands[:2]]
    if (more := len(each.operands) - 2) > 0:
        shown.append(f"and {more} more")
    when = [f"{'?' if each.times is None else each.times} times"] * each.in_loop
    when += ["in a branch"] * each.in_branch
    if each.asynchronous and each.matrix_products:
        when.append(f"behind {count(each.matrix_products, 'matrix product')}")
    elif each.asynchronous:
        kernels = each.other_kernels
        when.append(f"behind {count(kernels, 'kernel')}" if kernels else "exposed")
    among = f"{len(each.groups)} of {each.group_size}" + " in a shard" * each.within_shard
    if each.kind == "collective-permute":
        among = f"{len(each.groups)} pairs"
    sent = exact_size(each.bytes_sent + each.scalar_bytes_sent)
    where = each.source or each.op_name or each.name
    # The operands of an all-to-all are one array.
    if "to-all" not in each.kind and len(each.operands) > 1:
        where += f" (1 of {len(each.operands)} combined)"
    return (each.kind, ", ".join(shown), sent, among, ", ".join(when), where)


# From a program to its report.

# The axes of a program's mesh: names with sizes, in the order of its devices.
Axes: TypeAlias = tuple[tuple[str, int], ...]


class HasText(Protocol):
    """What JAX, or ``nnx.jit``, lowers or compiles."""

    def as_text(self) -> str | None:
        """Return the program as text."""


Program: TypeAlias = jax.stages.Traced | HasText


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

    The program of a ``TrainStep`` has its parameters and its shard axes. For any other program,
    pass what it trains as ``parameters``; without them there is no bound. The bound is that of one
    update: a program of several steps sends several times as much, and a program that gathers
    parameters again sends more.

    N is the number of shards that the collectives connect. Devices that differ only along other
    mesh axes than ``axis_name``, over which layers are split, are one shard. What they send to each
    other is not compared with the bound, and a layer that is split over them counts with the part
    of one device.

    Of a conditional, the branch that sends most counts; a loop of unknown length counts once. What
    ``nonfinite=`` sends only if a gradient is not finite does not count.

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
    data_axes = _data_axes(axis_name, axes, inputs if states else ())
    found = None
    if parameters is not None:
        found = bytes_of(parameters, data_axes)
    elif states:
        found = _bytes_of_arrays(states[0].params, data_axes)
        if states[0].grouped:
            # Each shard has parameters of its own.
            found //= jax.tree.leaves(states[0].params)[0].shape[0]
    stats = compiled.memory_analysis()
    kinds = ("argument_size", "output_size", "temp_size", "alias_size", "peak_memory")
    memory = stats and Memory(*(getattr(stats, f"{kind}_in_bytes") for kind in kinds))
    return report_on(parse(text), found, memory, axes, data_axes)


def report_on(
    module: Module,
    parameter_bytes: int | None = None,
    memory: Memory | None = None,
    axes: Axes = (),
    data_axes: Collection[str] = (),
) -> Communication:
    """Return the report on a parsed program.

    Args:
      module: the program.
      parameter_bytes: those of one shard's copy of the parameters; none or 0 if unknown.
      memory: the compiler's memory analysis.
      axes: the axes of its mesh; empty if unknown.
      data_axes: the axes that split the batch; all if empty.
    """
    if math.prod(size for _, size in axes) != module.devices:
        axes = ()
    found = []
    for each in collectives(module):
        along = _axes_of(each.groups, axes)
        within = bool(along and data_axes) and not {*along} & {*data_axes}
        found.append(dataclasses.replace(each, axes=along, within_shard=within))
    sending = {each.groups for each in found if each.bytes_sent}
    return Communication(
        collectives=tuple(found),
        devices=module.devices,
        shards=joined_shards(sending, module.devices, axes, data_axes),
        parameter_bytes=parameter_bytes or None,
        memory=memory,
        kernel_bytes=kernel_bytes(module),
    )


def _axes_of(groups: Groups, axes: Axes) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ.

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
    joining: Iterable[Groups], devices: int, axes: Axes, data_axes: Collection[str]
) -> int:
    """Return the largest number of shards that groups connect, directly or through others.

    Args:
      joining: the groups of some collectives.
      devices: the number of devices.
      axes: the axes of the mesh; empty if unknown.
      data_axes: the axes that split the batch; all if empty. Devices that differ only along other
        axes are one shard.

    >>> joined_shards([((0, 1), (2, 3)), ((0, 2), (1, 3))], 8, (), ())
    4
    >>> joined_shards([((0, 1, 2, 3),)], 4, (("data", 2), ("model", 2)), ["data"])
    2
    """
    sizes = [size for _, size in axes] or [devices]
    kept = [not data_axes or name in data_axes for name, _ in axes] or [True]
    places = np.indices(sizes).reshape(len(sizes), -1)[kept]
    shard = np.unique(places, axis=1, return_inverse=True)[1].ravel()
    leader = np.arange(shard.max() + 1)
    for group in itertools.chain.from_iterable(joining):
        leaders = np.unique(leader[shard[list(group)]])
        if len(leaders) > 1:
            leader[np.isin(leader, leaders)] = leaders[0]
    return max(Counter(leader.tolist()).values())


def bytes_of(parameters: Any, data_axes: Collection[str] = ()) -> int:
    """Return the bytes of one shard's copy of the given parameters.

    The parameters are a number of bytes, or a pytree of arrays or ``jax.ShapeDtypeStruct``. Scalars
    are not counted, like their collectives. The axes ``data_axes`` split the batch; all if empty.

    >>> import numpy as np
    >>> bytes_of({"w": np.zeros((3, 4), np.float32), "scale": np.zeros((), np.float32)})
    48
    """
    is_number = isinstance(parameters, numbers.Integral) and not isinstance(parameters, bool)
    total = int(parameters) if is_number else _bytes_of_arrays(parameters, data_axes)
    if total <= 0:
        raise ArgumentError(
            "parameters must be arrays, not only scalars, or their number of bytes; got "
            f"{str(parameters)[:80]}, which has {total} bytes to reduce."
        )
    return total


def _unwrapped(program: Any) -> Any:
    # Flax wraps the programs of JAX.
    return getattr(program, "compiled", getattr(program, "lowered", program))


def _inputs(compiled: jax.stages.Compiled) -> list[Any]:
    """Return the types of a program's arguments, with the shardings of those that it uses.

    The state of a ``TrainStep`` is one entry.
    """
    infos, tree = jax.tree.flatten(compiled.args_info)
    # The shardings of unused arguments are None.
    shardings = tree.flatten_up_to(compiled.input_shardings)
    types = [
        jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)
        for info, sharding in zip(infos, shardings, strict=True)
    ]
    is_state = lambda each: isinstance(each, TrainState)
    return jax.tree.leaves(tree.unflatten(types), is_leaf=is_state)


def _mesh_axes(inputs: Sequence[Any]) -> Axes:
    """Return the axes of the mesh that a program's inputs are on; empty if unknown.

    The program numbers the devices of a TPU slice by slice. A mesh in another order counts as
    unknown.
    """
    shardings = [each.sharding for each in jax.tree.leaves(list(inputs))]
    meshes = [each.mesh for each in shardings if isinstance(each, NamedSharding)]
    if not meshes:
        return ()
    found = max(meshes, key=lambda mesh: len(mesh.axis_names))
    slices = [getattr(device, "slice_index", 0) for device in found.devices.flat]
    return tuple(found.shape.items()) if slices == sorted(slices) else ()


def _data_axes(given: Any, axes: Axes, inputs: Sequence[Any]) -> tuple[str, ...]:
    """Return the mesh axes that split the batch: those given, else those of a step, else all."""
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


def _bytes_of_arrays(parameters: Any, data_axes: Collection[str]) -> int:
    """Return the bytes of one shard's copy of arrays."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ArgumentTypeError(
                "parameters must be a pytree of arrays or of jax.ShapeDtypeStruct, or a number "
                f"of bytes; got {type(leaf).__name__} at "
                f"{jax.tree_util.keystr(path) or 'its root'}."
            )
        size, split = math.prod(leaf.shape), _split_over(leaf).items()
        pieces = math.prod(number for name, number in split if data_axes and name not in data_axes)
        if size > 1:
            total += size * leaf.dtype.itemsize // pieces
    return total


def _split_over(array: Any) -> dict[str, int]:
    """Return the mesh axes over which an array is split, with their sizes."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return {}
    parts = (part if isinstance(part, tuple) else (part,) for part in sharding.spec)
    names = (name for part in parts for name in part if isinstance(name, str))
    return {name: sharding.mesh.shape[name] for name in names}
