"""Compiles a choice, and reads what it needs from the program."""

import collections
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jax

from crossshard.errors import ArgumentError
from crossshard.inspection import Communication, inspect
from crossshard.inspection.collectives import NOTHING
from crossshard.inspection.hlo import parse
from crossshard.plans.choices import Choice
from crossshard.plans.estimate import on_chips, on_this_machine
from crossshard.plans.kernels import kernels
from crossshard.plans.links import bytes_by_link
from crossshard.plans.machine import measured
from crossshard.plans.products import Product, products
from crossshard.plans.quiet import quiet
from crossshard.plans.report import Candidate, LinkUse, MemoryUse, Seconds
from crossshard.plans.topology import Topology
from crossshard.plans.work import Work

# What XLA for TPUs says: "… Used 20.51G of 15.75G hbm. …"
_TOO_MUCH = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def candidate(work: Work, topology: Topology, choice: Choice) -> Candidate:
    """Compile a choice and read it.

    Raises:
      ArgumentError: it cannot be compiled, for another reason than too little memory.
    """
    began = time.perf_counter()
    mesh = topology.mesh(choice.mesh)
    state, traced = work.traced(mesh, choice.weight_update)
    found = list(products(traced.jaxpr, mesh.size))
    compiled, needed = _compiled(traced, topology, choice)
    memory = _memory(state, work, mesh, topology, compiled, needed)
    flops = sum(each.times * each.flops for each in found)
    links, seconds = None, None
    if compiled is not None:
        report = inspect(compiled)
        links = _links(report, mesh.devices.flat)
        seconds = _seconds(found, compiled, report, mesh, topology)
    taken = time.perf_counter() - began
    return Candidate(
        choice.mesh, choice.weight_update, memory, links, flops, seconds, taken
    )


def _compiled(
    traced: jax.stages.Traced, topology: Topology, choice: Choice
) -> tuple[jax.stages.Compiled | None, int | None]:
    """The program; if its compiler refuses it for its memory, what that would be."""
    try:
        with quiet():
            return traced.lower().compile(), None
    except jax.errors.JaxRuntimeError as error:
        numbers = _TOO_MUCH.search(str(error))
        if numbers is None:
            first = (str(error).splitlines() or ["no reason"])[0]
            axes = ", ".join(f"{name} {size}" for name, size in choice.mesh.items())
            raise ArgumentError(
                f"The {choice.weight_update} step on {axes} cannot be compiled for "
                f"{topology.name}: {first:.300}"
            ) from error
        return None, int(float(numbers[1]) * _UNITS[numbers[2]])


def _memory(
    state: Any,
    work: Work,
    mesh: Any,
    topology: Topology,
    compiled: jax.stages.Compiled | None,
    needed: int | None,
) -> MemoryUse:
    parameters = _bytes((state.params, state.frozen))
    optimizer = _bytes(state.opt_state)
    stats = compiled.memory_analysis() if compiled is not None else None
    if stats is not None:
        arguments = stats.argument_size_in_bytes
        temporaries = stats.temp_size_in_bytes
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        needed = arguments + temporaries + results
        batch = max(0, arguments - parameters - optimizer)
    else:
        shards = mesh.shape[mesh.axis_names[0]]
        batch = sum(
            math.prod(each.shape) * each.dtype.itemsize // shards
            for each in jax.tree.leaves(work.batch(mesh.size))
        )
        temporaries = None
    return MemoryUse(
        parameters=parameters,
        optimizer_state=optimizer,
        batch=batch,
        temporaries=temporaries,
        gradients=_bytes(state.params),
        needed=needed or 0,
        available=_available(topology),
    )


def _available(topology: Topology) -> int:
    if topology.chip is not None:
        return topology.chip.memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // topology.size


def _bytes(tree: Any) -> int:
    """The bytes of one device's shards."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _links(report: Communication, devices: Sequence[Any]) -> LinkUse:
    devices = list(devices)
    by_link: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for each in report.collectives:
        if each.bytes_sent:
            kinds[each.kind] += each.times or 1
            by_link.update(bytes_by_link(each, devices))
    hidden = sum(each.bytes_sent for each in report.collectives if each.behind != NOTHING)
    return LinkUse(dict(sorted(kinds.items())), report.bytes_sent, dict(by_link), hidden)


def _seconds(
    found: Sequence[Product],
    compiled: jax.stages.Compiled,
    report: Communication,
    mesh: Any,
    topology: Topology,
) -> Seconds:
    run = list(kernels(parse(compiled.as_text() or "")))
    if topology.chip is not None:
        devices = list(mesh.devices.flat)
        return on_chips(topology.chip, found, run, report.collectives, devices)
    arrays = len(jax.tree.leaves((compiled.in_tree.unflatten(range(compiled.in_tree.num_leaves)))))
    arrays += compiled.out_tree.num_leaves
    return on_this_machine(measured(topology.size), found, run, report.collectives, arrays / 2)
