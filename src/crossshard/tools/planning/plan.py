"""plan: compiles a step in several ways for a machine that is not there, and reads the programs."""

import collections
import concurrent.futures
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from crossshard import TrainStep, _check, make_train_step
from crossshard._annotations import Loss, PyTree
from crossshard._text import count, size, table
from crossshard.errors import ArgumentError
from crossshard.step.rebuild import axes_of_batch, bytes_on_device, number_of_parameters
from crossshard.tools.inspection.collectives import Collective
from crossshard.tools.inspection.inspect import inspect
from crossshard.tools.planning.topology import Topology
from crossshard.tools.planning.topology import topology as topology_of
from crossshard.tools.quiet import quiet

_WHOLE = "replicated"
# Chosen by the plan itself.
_OURS = {"mesh", "num_shards", "axis_name", "weight_update"}
# Options of a step with sharded parameters, and of no other.
_OF_PARTS = {"gather_dtype"}
# What XLA for TPUs says: "… Used 20.51G of 15.75G hbm. …"
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm")
# Or: "… memory required for HLO temporaries (30.32G) exceeds available HBM …", without arguments.
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\) exceeds")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Programs that are compiled at once. One compilation hardly uses two cores.
_AT_ONCE = 2
_LINKS = ("inside a host", "inside a slice", "across")
_MEMORY_HEAD = (
    *("memory per device", "fits", "parameters", "optimizer state", "other"),
    *("temporaries", "(gradients)", "needed", "available"),
)
_LINKS_HEAD = ("sent per device and step", "collectives", *_LINKS, "all", "hidden")


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes on each device.

    Attributes:
      parameters: of the parameters, those that are not trained included.
      optimizer_state: of the optimizer's state.
      other: of the batch, the rest of the state, and the padding of all arguments.
      temporaries: what else the program needs while it runs: activations and gradients; ``None`` if
        the compiler refused the program before it counted them.
      gradients: of all gradients, of which the temporaries hold those that are needed at one time.
      needed: all of these at the fullest moment, by the compiler; at least this, if the step was
        not compiled.
      available: on a device.
    """

    parameters: int
    optimizer_state: int
    other: int
    temporaries: int | None
    gradients: int
    needed: int
    available: int

    @property
    def left(self) -> int:
        """What is left; negative if it does not fit."""
        return self.available - self.needed


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """What a step sends, on each device.

    Attributes:
      collectives: how many of each kind run.
      sent: the bytes in all.
      by_link: the bytes over each kind of link: ``"inside a host"``, ``"inside a slice"`` (between
        the hosts of a TPU slice), ``"across"`` (between hosts of GPUs).
      hidden: the bytes that are sent while matrix products or other kernels are scheduled.
    """

    collectives: Mapping[str, int]
    sent: float
    by_link: Mapping[str, float]
    hidden: float


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to keep parameters and optimizer state, compiled.

    Attributes:
      mesh: the sizes of its axes by their names.
      weight_update: ``"replicated"`` or ``"sharded"``.
      params: ``"replicated"``, or ``"sharded"`` if they are.
      memory: on each device.
      links: what is sent; ``None`` if it was not compiled, or the compiler refused it.
      compiled: whether it was compiled, which it is not if its state alone is too large.
    """

    mesh: Mapping[str, int]
    weight_update: str
    params: str
    memory: MemoryUse
    links: LinkUse | None
    compiled: bool

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory of a device."""
        return self.memory.left >= 0

    @property
    def name(self) -> str:
        """``data 8, sharded``; ``in parts`` if the parameters are."""
        return f"data {self.mesh['data']}, {_rest(self.weight_update, self.params)}"


def _rest(weight_update: str, params: str) -> str:
    return weight_update if params == _WHOLE else "in parts"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step needs on a machine, for each way to keep its parameters and its state.

    Attributes:
      topology: its name.
      devices: how many there are.
      parameters: the number of parameters.
      candidates: those that were compiled, or are too large to be.

    >>> import jax, jax.numpy as jnp, optax
    >>> import crossshard
    >>> w, x = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> found = crossshard.plan(loss_fn, w, x, optax.sgd(0.1), topology="cpu:1")
    >>> found.candidates[0].memory.parameters
    256
    """

    topology: str
    devices: int
    parameters: int
    candidates: Sequence[Candidate]

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON.

        The keys are the attributes of this class and of its fields, and ``fits`` and ``left``.
        """
        fields = dataclasses.asdict(self)
        for each, candidate in zip(fields["candidates"], self.candidates, strict=True):
            each["fits"] = candidate.fits
            each["memory"]["left"] = candidate.memory.left
        return json.dumps(fields, indent=indent)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Plain text tables of memory and of what is sent, a row for each candidate."""
        parts = [
            f"{self.parameters:,} parameters on {self.topology}, {count(self.devices, 'device')}",
            table(_MEMORY_HEAD, [_memory_row(each) for each in self.candidates]),
            table(_LINKS_HEAD, [_link_row(each) for each in self.candidates]),
        ]
        if names := "; ".join(each.name for each in self.candidates if not each.compiled):
            parts.append(
                f"Not compiled, since what a device keeps between steps is more than its memory: "
                f"{names}."
            )
        return "\n\n".join(parts)


def _memory_row(each: Candidate) -> tuple[str, ...]:
    use = each.memory
    at_least = "" if each.compiled else "at least "
    fits = (
        f"yes, {size(use.left)} left" if each.fits else f"no, {at_least}{size(-use.left)} too much"
    )
    temporaries = "?" if use.temporaries is None else size(use.temporaries)
    parts = map(size, (use.parameters, use.optimizer_state, use.other))
    whole = map(size, (use.needed, use.available))
    return (each.name, fits, *parts, temporaries, f"({size(use.gradients)})", *whole)


def _link_row(each: Candidate) -> tuple[str, ...]:
    if each.links is None:
        return (each.name, *["?"] * 6)
    kinds = ", ".join(f"{number} {kind}" for kind, number in each.links.collectives.items())
    places = (each.links.by_link.get(name, 0) for name in _LINKS)
    share = each.links.hidden / each.links.sent if each.links.sent else 0
    shown = [size(number) if number else "–" for number in (*places, each.links.sent)]
    return (each.name, kinds or "none", *shown, f"{share:.0%}")


def plan(
    loss_fn: Callable[..., Loss],
    params: PyTree,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    topology: str,
    **options: PyTree,
) -> Plan:
    """Compile a training step for a pod or a cluster, in several ways, and say what each needs.

    Nothing is run there, and no array is allocated: a model of 70 billion parameters is a matter of
    shapes. The step is compiled with the weights updated on every shard, updated in parts, and
    resting in parts (``params="sharded"``), with each device as a shard; not where the state alone
    is more than a device has.

    Args:
      loss_fn: as ``make_train_step`` takes it.
      params: the model, as arrays or types, or a function without arguments that makes it, which is
        only traced.
      batch: the global batch, as arrays or types, or a function of the number of devices that
        returns it.
      optimizer: an Optax transformation.
      topology: ``"v5e:4x4"``, ``"v5p:16x16x16"``, ``"v6e:8x8"``: chips of a TPU slice;
        ``"h100:4x8"``, ``"a100:4x8"``, ``"h200:4x8"``, ``"b200:4x8"``: hosts times GPUs of a host;
        ``"cpu:8"``: CPU devices of this machine.
      **options: further arguments of ``make_train_step``.

    Returns:
      A Plan: print it, read its attributes, or call ``to_json()``.

    Raises:
      ArgumentError: an unknown topology, a missing compiler, a step that cannot be compiled.

    >>> import jax, jax.numpy as jnp, optax
    >>> w, x = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> plan(loss_fn, w, x, optax.adam(0.1), topology="cpu:1").candidates[0].fits
    True
    """
    if chosen := sorted(_OURS & set(options)):
        raise ArgumentError(
            f"plan chooses the mesh and compares updates itself; leave out {chosen[0]}."
        )
    if isinstance(params, str):
        raise ArgumentError(
            f"plan compares replicated and sharded parameters itself; params is the model "
            f"here, and not {params!r}."
        )
    is_model = isinstance(params, nnx.Pytree) or not callable(params)
    model = params if is_model else nnx.eval_shape(params)
    where = topology_of(topology)
    mesh, rows = where.mesh({"data": where.size}), batch(where.size) if callable(batch) else batch
    _check.arrays("batch", rows, or_types=True)
    found = []
    for weight_update, rest in _ways(optimizer, where.size):
        left_out = _OF_PARTS if rest == _WHOLE else ()
        step = make_train_step(
            loss_fn,
            optimizer,
            mesh=mesh,
            weight_update=weight_update,
            params=rest,
            **{name: each for name, each in options.items() if name not in left_out},
        )
        found.append(_lowered((weight_update, rest), where, step, model, rows))
    with quiet(), concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        candidates = list(pool.map(lambda each: each(), found))
    parameters = number_of_parameters(model, options.get("wrt"))
    return Plan(topology, where.size, parameters, candidates)


def _ways(optimizer: Any, devices: int) -> list[tuple[str, str]]:
    """The ``weight_update`` and ``params`` of the steps that are compared."""
    ways = [("replicated", _WHOLE), ("sharded", _WHOLE), ("sharded", "sharded")]
    # Groups of shards differ in their parameters, which cannot be sharded.
    grouped = len(getattr(optimizer, "group_assignment", None) or ()) > 1
    # One shard has nothing to split.
    return ways[:1] if devices == 1 else ways[: 2 if grouped else 3]


def _lowered(
    way: tuple[str, str], topology: Topology, step: TrainStep, model: Any, batch: Any
) -> Callable[[], Candidate]:
    """Lower a step; return what compiles it, and reads what the program needs and sends.

    A step whose state is more than the memory of a device is neither lowered nor compiled, which
    would take minutes.
    """
    shards = topology.size
    state = step.abstract_init(model)
    # What every shard gets whole may be a Python number.
    rows = sum(
        math.prod(np.shape(x)) * jnp.result_type(x).itemsize // (1 if axis is None else shards)
        for x, axis in zip(jax.tree.leaves(batch), axes_of_batch(step).of(batch), strict=True)
    )
    given = bytes_on_device(state) + rows
    lowered = step.lower(state, batch) if given <= topology.memory else None

    def candidate() -> Candidate:
        compiled, links, needed = None, None, given
        if lowered is not None:
            try:
                compiled = lowered.compile()
                links = _links(compiled, list(step.mesh.devices.flat))
            except jax.errors.JaxRuntimeError as error:
                refused_for = None if compiled else _needed(str(error), given)
                if refused_for is None:
                    what = f"{'read' if compiled else 'compiled'} for {topology.name}"
                    first = (str(error).splitlines() or ["no reason"])[0]
                    raise ArgumentError(
                        f"The step of {_rest(*way)} cannot be {what}: {first:.300}"
                    ) from error
                needed = refused_for
        parameters = bytes_on_device((state.params, state.frozen))
        optimizer = bytes_on_device(state.opt_state)
        arguments, temporaries = given, None
        stats = None if compiled is None else compiled.memory_analysis()
        if stats is not None:
            arguments = stats.argument_size_in_bytes
            temporaries = stats.temp_size_in_bytes
            results = stats.output_size_in_bytes - stats.alias_size_in_bytes
            needed = arguments + temporaries + results
        memory = MemoryUse(
            parameters=parameters,
            optimizer_state=optimizer,
            other=max(0, arguments - parameters - optimizer),
            temporaries=temporaries,
            gradients=bytes_on_device(state.params),
            needed=needed,
            available=topology.memory,
        )
        return Candidate({"data": shards}, *way, memory, links, lowered is not None)

    return candidate


def _needed(message: str, arguments: int) -> int | None:
    """The bytes that a program needs, if its compiler refuses it for them."""
    for pattern, more in ((_USED, 0), (_TEMPORARIES, arguments)):
        if found := pattern.search(message):
            return more + int(float(found[1]) * _UNITS[found[2]])
    return None


def _links(compiled: jax.stages.Compiled, devices: Sequence[Any]) -> LinkUse:
    report = inspect(compiled)
    by_link: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for each in report.counted:
        if each.bytes_sent:
            kinds[each.kind] += each.times or 1
            by_link.update(bytes_by_link(each, devices))
    hidden = report.bytes_sent - report.bytes_exposed
    return LinkUse(dict(sorted(kinds.items())), report.bytes_sent, dict(by_link), hidden)


def bytes_by_link(each: Collective, devices: Sequence[Any]) -> dict[str, float]:
    """The bytes that a device sends over each kind of link, on average over the devices.

    The devices of a group form a ring, host after host, so that of n neighbours as many send to
    another host as there are hosts. In an all-to-all all send to all. GPUs of several hosts are
    ``"across"``, as are TPUs of several slices; TPUs of several hosts are ``"inside a slice"``.

    Args:
      each: the collective.
      devices: the devices of the program, in its order.
    """
    shares = collections.Counter(
        _link(one, other)
        for group in each.groups
        for one, other in _pairs(each.kind, [devices[place] for place in group])
    )
    return {kind: each.bytes_sent * number / shares.total() for kind, number in shares.items()}


def _link(one: Any, other: Any) -> str:
    if one.process_index == other.process_index:
        return "inside a host"
    is_tpu = one.platform == "tpu"
    same_slice = getattr(one, "slice_index", None) == getattr(other, "slice_index", None)
    return "inside a slice" if is_tpu and same_slice else "across"


def _pairs(kind: str, group: list[Any]) -> Iterable[tuple[Any, Any]]:
    if kind == "collective-permute":
        return [(group[0], group[1])]
    if "to-all" in kind and len(group) <= 64:
        return itertools.permutations(group, 2)
    ring = sorted(group, key=lambda d: (getattr(d, "slice_index", None) or 0, d.process_index))
    return zip(ring, [*ring[1:], ring[0]], strict=True)
