"""Compiles a choice, and reads what it needs from the program."""

import collections
import concurrent.futures
import dataclasses
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from crossshard.errors import ArgumentError
from crossshard.step.description import bytes_on_device
from crossshard.tools.inspection.collectives import NOTHING
from crossshard.tools.inspection.hlo import parse
from crossshard.tools.inspection.inspect import inspect
from crossshard.tools.inspection.report import Communication
from crossshard.tools.planning.choices import Choice
from crossshard.tools.planning.estimate import estimate
from crossshard.tools.planning.kernels import bytes_moved
from crossshard.tools.planning.libtpu import other_libtpu
from crossshard.tools.planning.links import bytes_by_link
from crossshard.tools.planning.products import Product, products
from crossshard.tools.planning.report import Candidate, LinkUse, MemoryUse, Seconds
from crossshard.tools.planning.topology import Topology
from crossshard.tools.planning.work import Work
from crossshard.tools.quiet import quiet

# What XLA for TPUs says: "… Used 20.51G of 15.75G hbm. …"
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm")
# Or: "… memory required for HLO temporaries (30.32G) exceeds available HBM …", without arguments.
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\) exceeds")
# Programs that are compiled at once. One compilation hardly uses two cores.
_AT_ONCE = 2
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class _Lowered:
    """A choice on its way: the types of its state, its products and its program."""

    choice: Choice
    mesh: Mesh
    state: Any
    products: Sequence[Product]
    program: jax.stages.Lowered
    seconds: float


def candidates(work: Work, topology: Topology, choices: Sequence[Choice]) -> list[Candidate]:
    """Compile the choices, two at a time, and read them.

    Raises:
      ArgumentError: one cannot be compiled, for another reason than too little memory; or the
        compiler writes a program that cannot be read.
    """
    lowered = [_lower(work, topology, choice) for choice in choices]
    compile_ = lambda each: _compiled(each, work, topology)
    with quiet(), concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        compiled = list(pool.map(compile_, lowered))
    with quiet():
        return [
            _read(each, work, topology, *found)
            for each, found in zip(lowered, compiled, strict=True)
        ]


def _lower(work: Work, topology: Topology, choice: Choice) -> _Lowered:
    began = time.perf_counter()
    mesh = topology.mesh(choice.mesh)
    state, traced = work.traced(mesh, choice.weight_update)
    found = list(products(traced.jaxpr, mesh.size))
    program = traced.lower()
    return _Lowered(choice, mesh, state, found, program, time.perf_counter() - began)


def _compiled(
    each: _Lowered, work: Work, topology: Topology
) -> tuple[jax.stages.Compiled | None, int | None, float]:
    """The program; if the compiler refuses it for its memory, how much it needs; and the time."""
    began = time.perf_counter()
    try:
        compiled = each.program.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = _needed(str(error), each, work)
        if needed is None:
            raise ArgumentError(_refused("compiled", each, topology, error)) from error
        return None, needed, time.perf_counter() - began
    return compiled, None, time.perf_counter() - began


def _refused(what: str, each: _Lowered, topology: Topology, error: Exception) -> str:
    first = (str(error).splitlines() or ["no reason"])[0]
    axes = ", ".join(f"{name} {size}" for name, size in each.choice.mesh.items())
    is_tpu = topology.chip is not None and topology.chip.platform == "tpu"
    other = other_libtpu() if is_tpu else None
    reason = f"{other} ({first:.200})" if other else f"{first:.300}"
    step = f"The {each.choice.weight_update} step on {axes}"
    return f"{step} cannot be {what} for {topology.name}: {reason}"


def _needed(message: str, each: _Lowered, work: Work) -> int | None:
    """The bytes that a program needs that its compiler refused for its memory."""
    for pattern, more in ((_USED, 0), (_TEMPORARIES, _arguments(each, work))):
        if found := pattern.search(message):
            return more + int(float(found[1]) * _UNITS[found[2]])
    return None


def _arguments(each: _Lowered, work: Work) -> int:
    shards = next(iter(each.mesh.shape.values()))
    batch = jax.tree.leaves(work.batch(each.mesh.size))
    rows = sum(math.prod(x.shape) * x.dtype.itemsize // shards for x in batch)
    return bytes_on_device(each.state) + rows


def _read(
    each: _Lowered,
    work: Work,
    topology: Topology,
    compiled: jax.stages.Compiled | None,
    needed: int | None,
    taken: float,
) -> Candidate:
    links, seconds = None, None
    if compiled is not None:
        try:
            report = inspect(compiled)
            seconds = _seconds(each, compiled, report, topology)
        except jax.errors.JaxRuntimeError as error:
            raise ArgumentError(_refused("read", each, topology, error)) from error
        links = _links(report, list(each.mesh.devices.flat))
    return Candidate(
        mesh=each.choice.mesh,
        weight_update=each.choice.weight_update,
        memory=_memory(each, work, topology, compiled, needed),
        links=links,
        flops=sum(product.times * product.flops for product in each.products),
        seconds=seconds,
        compile_seconds=each.seconds + taken,
    )


def _memory(
    each: _Lowered,
    work: Work,
    topology: Topology,
    compiled: jax.stages.Compiled | None,
    needed: int | None,
) -> MemoryUse:
    parameters = bytes_on_device((each.state.params, each.state.frozen))
    optimizer = bytes_on_device(each.state.opt_state)
    arguments, temporaries = _arguments(each, work), None
    stats = compiled.memory_analysis() if compiled is not None else None
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
        gradients=bytes_on_device(each.state.params),
        needed=needed or 0,
        available=_available(topology),
    )


def _available(topology: Topology) -> int:
    if topology.chip is not None:
        return topology.chip.memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // topology.size


def _links(report: Communication, devices: Sequence[Any]) -> LinkUse:
    by_link: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for each in report.counted:
        if each.bytes_sent:
            kinds[each.kind] += each.times or 1
            by_link.update(bytes_by_link(each, devices))
    hidden = sum(each.bytes_sent for each in report.counted if each.behind != NOTHING)
    return LinkUse(dict(sorted(kinds.items())), report.bytes_sent, dict(by_link), hidden)


def _seconds(
    each: _Lowered, compiled: jax.stages.Compiled, report: Communication, topology: Topology
) -> Seconds | None:
    if topology.chip is None:
        return None
    moved = bytes_moved(parse(compiled.as_text() or ""))
    devices = list(each.mesh.devices.flat)
    return estimate(topology.chip, each.products, moved, report.counted, devices)
