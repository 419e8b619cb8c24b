"""Compiles a choice, and reads what it needs from the program."""

import collections
import concurrent.futures
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _check
from crossshard.errors import ArgumentError
from crossshard.step.description import bytes_on_device
from crossshard.step.rebuild import axes_of_batch
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


def candidates(work: Work, topology: Topology, choices: Sequence[Choice]) -> list[Candidate]:
    """Compile the choices, two at a time, and read them.

    Raises:
      ArgumentError: one cannot be compiled, for another reason than too little memory; or the
        compiler writes a program that cannot be read.
    """
    found = [_Compiling(work, topology, choice) for choice in choices]
    with quiet():
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(_Compiling.compile, found))
        return [each.read() for each in found]


class _Compiling:
    """A choice that is lowered, then compiled, and then read."""

    def __init__(self, work: Work, topology: Topology, choice: Choice) -> None:
        began = time.perf_counter()
        self._choice = choice
        self._topology = topology
        self._mesh = topology.mesh(choice.mesh)
        step, self._state = work.step(self._mesh, choice.weight_update, choice.params)
        self._batch = work.batch(self._mesh.size)
        _check.arrays("batch", self._batch, or_types=True)
        self._axes = axes_of_batch(step).of(self._batch)
        self._available = _available(topology)
        self._compiled: jax.stages.Compiled | None = None
        # The bytes that the program needs at least, unless it is compiled.
        self._refused_for = self._arguments()
        self._lowered: jax.stages.Lowered | None = None
        self._products: list[Product] = []
        # A large model takes minutes to compile: not where its state alone is too large.
        if self._refused_for <= self._available:
            traced = step.trace(self._state, self._batch)
            self._products = list(products(traced.jaxpr, self._mesh.size))
            self._lowered = traced.lower()
        self._seconds = time.perf_counter() - began

    def compile(self) -> None:
        """Compile it; a program that needs too much memory stays uncompiled."""
        if self._lowered is None:
            return
        began = time.perf_counter()
        try:
            self._compiled = self._lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            needed = self._needed(str(error))
            if needed is None:
                raise ArgumentError(self._sentence("compiled", error)) from error
            self._refused_for = needed
        self._seconds += time.perf_counter() - began

    def read(self) -> Candidate:
        """What the program needs and sends, and its estimated time."""
        links, seconds = None, None
        if self._compiled is not None:
            devices = list(self._mesh.devices.flat)
            try:
                report = inspect(self._compiled)
                seconds = self._estimate(self._compiled, report, devices)
            except jax.errors.JaxRuntimeError as error:
                raise ArgumentError(self._sentence("read", error)) from error
            links = _links(report, devices)
        flops = None
        if self._lowered is not None:
            flops = sum(product.times * product.flops for product in self._products)
        return Candidate(
            mesh=self._choice.mesh,
            weight_update=self._choice.weight_update,
            memory=self._memory(),
            links=links,
            flops=flops,
            seconds=seconds,
            compile_seconds=self._seconds,
            params=self._choice.params,
            compiled=self._lowered is not None,
        )

    def _sentence(self, what: str, error: Exception) -> str:
        first = (str(error).splitlines() or ["no reason"])[0]
        chip = self._topology.chip
        other = other_libtpu() if chip is not None and chip.platform == "tpu" else None
        reason = f"{other} ({first:.200})" if other else f"{first:.300}"
        where = f"{self._choice.name} cannot be {what} for {self._topology.name}"
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
            available=self._available,
        )

    def _estimate(
        self, compiled: jax.stages.Compiled, report: Communication, devices: Sequence[Any]
    ) -> Seconds | None:
        if self._topology.chip is None:
            return None
        moved = bytes_moved(parse(compiled.as_text() or ""))
        return estimate(self._topology.chip, self._products, moved, report.counted, devices)


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
    hidden = report.bytes_sent - report.bytes_exposed
    return LinkUse(dict(sorted(kinds.items())), report.bytes_sent, dict(by_link), hidden)
