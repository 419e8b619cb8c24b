"""What this machine's CPU devices do in a second, from short tests of a few seconds in all."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.inspection.collectives import bytes_sent
from crossshard.inspection.hlo import parse
from crossshard.plans.kernels import kernels

_AXIS = "devices"
# Runs of each test. The median counts: what slows the tests down slows a step down, too.
_RUNS = 5
_SIDES = (32, 128, 512)
_ELEMENTS = (2**12, 2**17, 2**22)
_FRESH = (2**16, 2**20, 2**23)
# Of the operand or the result of a collective, the larger.
_SENT = (2**13, 2**17, 2**20)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The speed of one of several virtual CPU devices while all of them work.

    Attributes:
      devices: their number.
      products: seconds of a matrix product by its FLOPs.
      memory: seconds of a kernel by the bytes that it reads and writes.
      fresh: by the bytes, the seconds to take memory that a program did not have before.
      operation: seconds of an operation on an element, in a kernel.
      transcendental: seconds of one such as an exponential.
      kernel: seconds to start a kernel.
      collectives: by kind, seconds of one by the bytes that a device sends.
      call: seconds to call a program.
      array: seconds for each array that a program takes and returns.
    """

    devices: int
    products: Sequence[tuple[float, float]]
    memory: Sequence[tuple[float, float]]
    fresh: Sequence[tuple[float, float]]
    operation: float
    transcendental: float
    kernel: float
    collectives: dict[str, Sequence[tuple[float, float]]]
    call: float
    array: float

    @property
    def flops(self) -> float:
        """FLOP/s of large products on all devices together."""
        work, seconds = self.products[-1]
        return self.devices * work / seconds

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s of large kernels on all devices together."""
        size, seconds = self.memory[-1]
        return self.devices * size / seconds

    def product_seconds(self, flops: float) -> float:
        """The time of a product of so many FLOPs."""
        return _interpolated(self.products, flops)

    def memory_seconds(self, size: float) -> float:
        """The time to read and write so many bytes, in one kernel."""
        return _interpolated(self.memory, size)

    def fresh_seconds(self, size: float) -> float:
        """The time to take so many bytes of memory for one call."""
        return _interpolated(self.fresh, size)

    def collective_seconds(self, kind: str, sent: float) -> float:
        """The time of a collective by which a device sends so many bytes."""
        points = self.collectives.get(kind, self.collectives["all-gather"])
        return max(points[0][1], _interpolated(points, sent))


def _interpolated(points: Sequence[tuple[float, float]], work: float) -> float:
    """The time for some work at the rate between those that were measured."""
    if work <= 0:
        return 0.0
    logs = [math.log(each) for each, _ in points]
    rates = [math.log(each / seconds) for each, seconds in points]
    return work / math.exp(float(np.interp(math.log(work), logs, rates)))


@functools.cache
def measured(number: int) -> Machine:
    """Measure this machine with so many CPU devices; takes some seconds, once."""
    test = _Test(Mesh(np.array(jax.devices("cpu")[:number]), (_AXIS,)))
    call, array = test.of_calls()
    kernel = test.of_a_kernel()
    products = [(2.0 * side**3, test.of_a_product(side) - kernel) for side in _SIDES]
    memory = [
        (8.0 * size, test.of_elements(size, lambda x: 0.5 * x) - kernel) for size in _ELEMENTS
    ]
    fresh = [(4.0 * size, test.of_fresh_memory(size)) for size in _FRESH]
    size = _ELEMENTS[0]
    plain = memory[0][1] + kernel
    operation = (test.of_elements(size, _polynomial) - plain) / (64 * size)
    hard = (test.of_elements(size, _functions) - plain) / (4 * size)
    alone = Machine(
        number,
        [(work, max(seconds, 1e-9)) for work, seconds in products],
        [(work, max(seconds, 1e-9)) for work, seconds in memory],
        [(work, max(seconds, 1e-9)) for work, seconds in fresh],
        max(operation, 1e-12),
        max(hard, 1e-12),
        kernel,
        {},
        call,
        array,
    )
    return dataclasses.replace(alone, collectives=test.of_collectives(alone) if number > 1 else {})


def _polynomial(x: jax.Array) -> jax.Array:
    y = x
    for _ in range(32):
        y = y * x + 0.25
    return y


def _functions(x: jax.Array) -> jax.Array:
    return jnp.exp(-x) + jnp.tanh(x) + jnp.log(2 + x) + jnp.sin(x)


class _Test:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def _seconds(self, function: Callable[[Any], Any], shape: tuple[int, ...], often: int) -> float:
        """The time of one of so many runs of a function, on all devices at once."""
        return self._run(function, shape, often)[0] / often

    def _run(
        self, function: Callable[[Any], Any], shape: tuple[int, ...], often: int
    ) -> tuple[float, jax.stages.Compiled]:
        """The time of so many runs in one program, and the program.

        Each run has an array of its own, since no cache holds those that a step comes to.
        """

        def run(xs: jax.Array) -> jax.Array:
            return lax.fori_loop(0, often, lambda i, xs: xs.at[i].set(function(xs[i])), xs)

        xs = jnp.full((self._mesh.size * often, *shape), 0.1, jnp.float32)
        compiled, xs = self._compiled(run, xs, donates=True)

        def again() -> Any:
            nonlocal xs
            xs = compiled(xs)
            return xs

        return self._median(again), compiled

    def _compiled(
        self, run: Callable[[Any], Any], x: Any, *, donates: bool = False
    ) -> tuple[Any, Any]:
        spec = PartitionSpec(_AXIS)
        mapped = jax.shard_map(run, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)
        x = jax.device_put(x, NamedSharding(self._mesh, spec))
        return jax.jit(mapped, donate_argnums=0 if donates else ()).lower(x).compile(), x

    def _median(self, call: Callable[[], Any], calls: int = 1) -> float:
        jax.block_until_ready(call())
        found = []
        for _ in range(_RUNS):
            began = time.perf_counter()
            for _ in range(calls):
                jax.block_until_ready(call())
            found.append((time.perf_counter() - began) / calls)
        return float(np.median(found))

    def of_a_product(self, side: int) -> float:
        """One product of a layer: the forward one, or one of the two backward."""
        often = max(2, min(1000, 2**25 // side**3))
        product = lambda x, left, right: lax.dot_general(x, x, (((left,), (right,)), ((), ())))

        def three(square: jax.Array) -> jax.Array:
            for left, right in ((1, 0), (1, 1), (0, 0)):
                square = 0.1 * product(square, left, right)
            return square

        return self._seconds(three, (side, side), often) / 3

    def of_elements(self, size: int, function: Callable[[Any], Any]) -> float:
        return self._seconds(function, (size,), max(2, min(500, 2**23 // size)))

    def of_a_kernel(self) -> float:
        often = 2000
        shape = jnp.full((self._mesh.size, 8), 0.1, jnp.float32)
        run = lambda x: lax.fori_loop(0, often, lambda _, x: 0.5 * x, x)
        compiled, x = self._compiled(run, shape)
        number = sum(each.times for each in kernels(parse(compiled.as_text())))
        return self._median(lambda: compiled(x)) / max(number, often)

    def of_fresh_memory(self, size: int) -> float:
        """What a temporary array costs besides the kernels that write and read it.

        The system hands memory out in pages, the first time that each is written to.
        """
        shape = jnp.full((self._mesh.size * size,), 0.1, jnp.float32)

        def halved(x: jax.Array, often: int) -> tuple[jax.Array, jax.Array]:
            x = lax.fori_loop(0, often, lambda _, x: 0.5 * x, x)
            return x, jnp.sum(x, keepdims=True)

        # What a loop changes is copied, unless it was donated: one kernel more.
        temporary, x = self._compiled(lambda x: halved(x, 2)[1], shape)
        in_place, y = self._compiled(lambda x: halved(x, 3), shape, donates=True)

        def again() -> Any:
            nonlocal y
            y, total = in_place(y)
            return total

        return self._median(lambda: temporary(x)) - self._median(again)

    def of_calls(self) -> tuple[float, float]:
        """The seconds of a call, and of each array in it."""
        arrays = [jnp.zeros((self._mesh.size, 8)) for _ in range(64)]
        few, many = self._compiled_call(arrays[:1]), self._compiled_call(arrays)
        one = (many - few) / 63
        return max(few - one, 0), max(one, 0)

    def _compiled_call(self, arrays: list[Any]) -> float:
        compiled, x = self._compiled(lambda x: jax.tree.map(lambda y: y + 1, x), arrays)
        return self._median(lambda: compiled(x), calls=10)

    def of_collectives(self, alone: Machine) -> dict[str, Sequence[tuple[float, float]]]:
        """By kind, the seconds of one by the bytes sent, without the kernels around it."""
        number = self._mesh.size
        runs: dict[str, Callable[[Any], Any]] = {
            "all-reduce": lambda x: lax.psum(x, _AXIS),
            "reduce-scatter": lambda x: jnp.tile(lax.psum_scatter(x, _AXIS, tiled=True), number),
            "all-gather": lambda x: lax.all_gather(x[: x.size // number], _AXIS, tiled=True),
        }
        found: dict[str, Sequence[tuple[float, float]]] = {}
        for kind, run in runs.items():
            parts = number if kind == "all-gather" else 1
            sizes = [elements // number * number for elements in _SENT]
            found[kind] = [
                (bytes_sent(kind, number, 4 * size // parts), self._of_collective(run, size, alone))
                for size in sizes
            ]
        return found

    def _of_collective(self, run: Callable[[Any], Any], size: int, alone: Machine) -> float:
        often = max(2, min(16, 2**23 // size))
        taken, compiled = self._run(run, (size,), often)
        stats = compiled.memory_analysis()
        around = alone.fresh_seconds(stats.temp_size_in_bytes if stats is not None else 0)
        for each in kernels(parse(compiled.as_text() or "")):
            around += each.times * (alone.kernel + alone.memory_seconds(each.bytes))
        # What is measured twice may differ by more than the collective takes.
        return max(taken - around, taken / 10) / often
