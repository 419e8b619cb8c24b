"""plan: compile a step for a machine that is not there, in several ways, and read each program."""

import collections
import concurrent.futures
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from crossshard import _check
from crossshard._annotations import Loss, PyTree
from crossshard.errors import ArgumentError
from crossshard.model.models import partition
from crossshard.step.describe import bytes_on_device
from crossshard.step.rebuild import axes_of_batch
from crossshard.tools.inspection.collectives import Collective
from crossshard.tools.inspection.inspect import inspect
from crossshard.tools.planning.report import Candidate, LinkUse, MemoryUse, Plan, name_of
from crossshard.tools.planning.topology import TPUS, Topology, other_libtpu
from crossshard.tools.planning.topology import topology as topology_of
from crossshard.tools.planning.work import Work, make_work
from crossshard.tools.quiet import quiet

# What XLA for TPUs says: "… Used 20.51G of 15.75G hbm. …"
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm")
# Or: "… memory required for HLO temporaries (30.32G) exceeds available HBM …", without arguments.
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\) exceeds")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Programs that are compiled at once. One compilation hardly uses two cores.
_AT_ONCE = 2


def plan(
    loss_fn: Callable[..., Loss],
    params: PyTree,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    topology: str,
    model_specs: PyTree = None,
    **options: PyTree,
) -> Plan:
    """Compile a training step for a pod or a cluster, in several ways, and say what each needs.

    Nothing is run there, and no array is allocated: a model of 70 billion parameters is a matter of
    shapes. The step is compiled with the weights updated on every shard, updated in parts, and
    resting in parts (``params="sharded"``), on a mesh of all devices and, with ``model_specs``, on
    those where 2, 4 or 8 of them share a model; not where the state alone is more than a device
    has.

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
      model_specs: how the parameters may be split over a mesh axis ``"model"``: a pytree of
        ``PartitionSpec``, or a function of path and leaf that returns one.
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
    work = make_work(loss_fn, params, batch, optimizer, model_specs, options)
    where = topology_of(topology)
    found = [_Compiling(work, where, choice) for choice in work.choices(where)]
    with quiet():
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(_Compiling.compile, found))
        candidates = [each.read() for each in found]
    _, trained, frozen, *_ = partition(work.params, options.get("wrt"))
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((trained, frozen)))
    return Plan(topology, where.size, parameters, candidates)


class _Compiling:
    """A choice that is lowered, then compiled, and then read."""

    def __init__(self, work: Work, topology: Topology, choice: tuple[Any, str, str]) -> None:
        self._choice = choice
        self._topology = topology
        self._mesh = topology.mesh(choice[0])
        step, self._state = work.step(self._mesh, *choice[1:])
        self._batch = work.batch(self._mesh.size)
        _check.arrays("batch", self._batch, or_types=True)
        self._axes = axes_of_batch(step).of(self._batch)
        # The bytes that the program needs at least, unless it is compiled.
        self._refused_for = self._arguments()
        # A large model takes minutes to compile: not where its state alone is too large.
        is_too_large = self._refused_for > topology.memory
        self._lowered = None if is_too_large else step.lower(self._state, self._batch)
        self._compiled: jax.stages.Compiled | None = None

    def compile(self) -> None:
        """Compile it; a program that needs too much memory stays uncompiled."""
        if self._lowered is None:
            return
        try:
            self._compiled = self._lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            needed = self._needed(str(error))
            if needed is None:
                raise ArgumentError(self._sentence("compiled", error)) from error
            self._refused_for = needed

    def read(self) -> Candidate:
        """What the program needs and sends."""
        links = None
        if self._compiled is not None:
            try:
                links = _links(self._compiled, list(self._mesh.devices.flat))
            except jax.errors.JaxRuntimeError as error:
                raise ArgumentError(self._sentence("read", error)) from error
        return Candidate(*self._choice, self._memory(), links, self._lowered is not None)

    def _sentence(self, what: str, error: Exception) -> str:
        first = (str(error).splitlines() or ["no reason"])[0]
        other = other_libtpu() if self._topology.kind in TPUS else None
        reason = f"{other} ({first:.200})" if other else f"{first:.300}"
        where = f"{name_of(*self._choice)} cannot be {what} for {self._topology.name}"
        return f"The step of {where}: {reason}"

    def _needed(self, message: str) -> int | None:
        """The bytes that a program needs, from what its compiler says of its memory."""
        for pattern, more in ((_USED, 0), (_TEMPORARIES, self._arguments())):
            if found := pattern.search(message):
                return more + int(float(found[1]) * _UNITS[found[2]])
        return None

    def _arguments(self) -> int:
        shards = next(iter(self._mesh.shape.values()))
        # What every shard gets whole may be a Python number.
        rows = sum(
            math.prod(np.shape(x)) * jnp.result_type(x).itemsize // (1 if axis is None else shards)
            for x, axis in zip(jax.tree.leaves(self._batch), self._axes, strict=True)
        )
        return bytes_on_device(self._state) + rows

    def _memory(self) -> MemoryUse:
        parameters = bytes_on_device((self._state.params, self._state.frozen))
        optimizer = bytes_on_device(self._state.opt_state)
        arguments, temporaries, needed = self._arguments(), None, self._refused_for
        stats = None if self._compiled is None else self._compiled.memory_analysis()
        if stats is not None:
            arguments = stats.argument_size_in_bytes
            temporaries = stats.temp_size_in_bytes
            results = stats.output_size_in_bytes - stats.alias_size_in_bytes
            needed = arguments + temporaries + results
        return MemoryUse(
            parameters=parameters,
            optimizer_state=optimizer,
            other=max(0, arguments - parameters - optimizer),
            temporaries=temporaries,
            gradients=bytes_on_device(self._state.params),
            needed=needed,
            available=self._topology.memory,
        )


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
        yield (group[0], group[1])
    elif "to-all" in kind and len(group) <= 64:
        yield from ((a, b) for a in group for b in group if a is not b)
    else:
        ring = sorted(group, key=lambda d: (getattr(d, "slice_index", None) or 0, d.process_index))
        yield from zip(ring, [*ring[1:], ring[0]], strict=True)
