"""Meter: how fast a loop trains, and what share of the devices' peak that is, without waiting."""

import collections
import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from crossshard import TrainStep, _check
from crossshard._annotations import PyTree
from crossshard._text import count
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.step.rebuild import number_of_rows, products_of

# Dense products of bfloat16 in a second, as the makers state them, by what ``device_kind`` ends in.
# A TPU v4 or v5p is one device of two cores.
_PEAKS = {
    r"A100-(SXM4|PCIE)-[48]0GB|A100 80GB PCIe": 312e12,
    "H100 80GB HBM3|H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5( lite|e)": 197e12,
    "TPU v5p?": 459e12,
    "TPU v6( lite|e)": 918e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device, as its maker states it; ``None`` if unknown.

    >>> peak_flops(jax.devices("cpu")[0]) is None
    True
    """
    kind = re.sub("^NVIDIA ", "", device.device_kind)
    return next((peak for name, peak in _PEAKS.items() if re.fullmatch(name, kind)), None)


@dataclasses.dataclass(frozen=True)
class Flops:
    """The floating-point operations of a step's matrix products, convolutions and kernels.

    >>> Flops(6_000, 8_000, ()).model
    6000

    Attributes:
      model: those of the loss and its gradient, of all rows: what MFU counts.
      hardware: those with what ``jax.checkpoint`` computes again, too: what HFU counts.
      uncounted: operations that may have more of them, such as kernels without a
        ``cost_estimate``, each with its line.
    """

    model: int
    hardware: int
    uncounted: tuple[str, ...]


def count_flops(step: TrainStep, batch: PyTree) -> Flops:
    """Count the floating-point operations of a step's loss and gradient, from their jaxprs.

    A multiplication and an addition are two. A scan counts with every turn, a branch as the largest
    of its kind. Elementwise operations, decompositions and the optimizer are not counted.

    Args:
      step: a step whose ``init`` or ``abstract_init`` has been called.
      batch: the batch of a call, as arrays or types.

    Raises:
      ArgumentError: there was no ``init``, or the batch cannot be split.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: ((x @ w) ** 2).mean(), optax.sgd(0.1), num_shards=1)
    >>> state = step.init(jnp.zeros((16, 4)))
    >>> count_flops(step, jnp.zeros((8, 16))).model  # 2 · 8 · 16 · 4, forward and for w's gradient
    2048
    """
    model, hardware = products_of(step, batch)
    return Flops(model.flops, hardware.flops, tuple(sorted(model.uncounted | hardware.uncounted)))


class _Work(NamedTuple):
    """What a call of one kind does, or several calls together."""

    steps: float = 0
    rows: float = 0
    model: float = 0
    hardware: float = 0


class _Point(NamedTuple):
    seconds: float  # while the clock ran
    done: _Work


class Meter:
    """Measures how fast a loop trains, without making it wait for the devices.

    A call of a step returns before the devices have computed it. So the meter counts a step once
    its loss is there, which it looks at in every ``update``, and the time between two such moments.
    It leaves out the time of a call with a batch of new shapes, which compiles, and that in
    ``paused``, with the steps that were running then. ``report`` returns the means over the last
    ``window`` steps.

    Args:
      step: the step of the loop.
      tokens_per_row: how many tokens a row has, to report tokens; ``None`` to report none.
      flops_per_row: your own count of a row's floating-point operations, forward and backward, in
        place of ``count_flops``.
      peak: the FLOP/s of one device; ``None`` for that of ``peak_flops``.
      window: how many steps the means are over, unless ``update`` sees more of them at once.

    Raises:
      ArgumentError, ArgumentTypeError: not a step, or not positive numbers.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: ((x @ w) ** 2).mean(), optax.sgd(0.1), num_shards=1)
    >>> state, meter = step.init(jnp.zeros((16, 4))), Meter(step, tokens_per_row=16, peak=1e12)
    >>> for _ in range(3):
    ...     state, metrics = step(state, jnp.zeros((8, 16)))
    ...     meter.update(jnp.zeros((8, 16)), metrics)
    >>> float(metrics["loss"])  # waits for the devices
    0.0
    >>> list(meter.report())
    ['steps_per_second', 'rows_per_second', 'tokens_per_second', 'mfu', 'hfu']
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        tokens_per_row: float | None = None,
        flops_per_row: float | None = None,
        peak: float | None = None,
        window: int = 100,
    ):
        if not isinstance(step, TrainStep):
            raise ArgumentTypeError(
                f"step must be what make_train_step returns; got {_check.described(step)}."
            )
        self._step, self._window = step, _check.whole_number("window", window)
        self._tokens_per_row = _positive("tokens_per_row", tokens_per_row)
        self._flops_per_row = _positive("flops_per_row", flops_per_row)
        own = peak_flops(step.mesh.devices.flat[0]) if peak is None else peak
        self._peak = _positive("peak", own)
        self._uncounted: set[str] = set()
        self._kinds: dict[Any, _Work] = {}
        # The losses of steps that may still run; ``None`` for work that does not count.
        self._running: collections.deque[tuple[Any, _Work | None]] = collections.deque()
        self._points: collections.deque[_Point] = collections.deque()
        self._stopped = 0.0  # for how long the clock stood still, since the clock's own zero

    def update(self, batch: PyTree, metrics: Mapping[str, PyTree]) -> None:
        """Note a call of the step. It waits for nothing.

        Args:
          batch: the batch that was passed.
          metrics: the metrics that were returned.

        Raises:
          ArgumentTypeError: not the metrics of a step.
        """
        loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
        if not isinstance(loss, jax.Array):
            raise ArgumentTypeError(
                f"metrics must be what step(state, batch) returned beside the state; got "
                f"{_check.described(metrics)}."
            )
        leaves, tree = jax.tree.flatten(batch)
        key = tree, *((np.shape(x), getattr(x, "sharding", None)) for x in leaves)
        work = self._kinds.get(key)
        if work is None:
            self._kinds[key] = self._work(batch)
            self._stop()
        self._running.append((loss, work))
        self._look()

    def report(self) -> dict[str, float]:
        """Return the means over the last steps, by name, for any logger.

        Returns:
          ``steps_per_second``, ``rows_per_second`` of all processes, ``tokens_per_second`` if
          ``tokens_per_row`` is given, and, if the peak is known and all products were counted,
          ``mfu`` and ``hfu``, as shares of 1. Empty before the second step is done.
        """
        self._look()
        if len(self._points) < 2:
            return {}
        (began, before), (ended, after) = self._points[0], self._points[-1]
        steps, rows, model, hardware = (
            (b - a) / (ended - began) for a, b in zip(before, after, strict=True)
        )
        found = {"steps_per_second": steps, "rows_per_second": rows}
        if self._tokens_per_row is not None:
            found["tokens_per_second"] = rows * self._tokens_per_row
        if self._peak is not None and not self._uncounted:
            all_devices = self._peak * self._step.mesh.size
            found["mfu"] = model / all_devices
            if self._flops_per_row is None:
                found["hfu"] = hardware / all_devices
        return found

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what runs inside, such as an evaluation, and the steps that still run now."""
        self._look()
        self._stop()
        try:
            yield
        finally:
            self._look()
            if not self._running:
                self._restart()

    def describe(self) -> str:
        """Say what ``mfu`` and ``hfu`` count, or why they are not reported."""
        if self._peak is None:
            kind = self._step.mesh.devices.flat[0].device_kind
            return f"No MFU: the peak of {kind!r} is not known. Pass peak=, its FLOP/s."
        if self._uncounted:
            return (
                f"No MFU: nothing is known of the floating-point operations of "
                f"{', '.join(sorted(self._uncounted))}. Pass flops_per_row=, your own count; or "
                f"give a Pallas kernel a cost_estimate."
            )
        number = self._step.mesh.size
        lines = [
            f"The peak is {self._peak / 1e12:,.4g} TFLOP/s on each of {count(number, 'device')}."
        ]
        for work in self._kinds.values():
            again = f"; {work.hardware:,} with what is recomputed" if work.hardware else ""
            lines.append(f"A step of {work.rows} rows has {work.model:,} FLOPs{again}.")
        return "\n".join(lines)

    def _work(self, batch: Any) -> _Work:
        """Return what a call with such a batch does."""
        rows = number_of_rows(self._step, batch)
        if self._flops_per_row is not None:
            return _Work(1, rows, rows * self._flops_per_row)
        if self._peak is None:
            return _Work(1, rows)
        found = count_flops(self._step, batch)
        self._uncounted.update(found.uncounted)
        return _Work(1, rows, found.model, found.hardware)

    def _look(self) -> None:
        """Note which steps are done by now."""
        now, done = time.perf_counter(), list[_Work | None]()
        while self._running and _is_there(self._running[0][0]):
            done.append(self._running.popleft()[1])
        if not done:
            return
        if None in done:
            # Nobody saw when the first of them was done.
            return self._restart(now)
        total = map(sum, zip(self._points[-1].done, *done, strict=True))
        self._points.append(_Point(now - self._stopped, _Work(*total)))
        oldest = self._points[-1].done.steps - self._window
        while self._points[1].done.steps <= oldest:
            self._points.popleft()

    def _stop(self) -> None:
        """Stop the clock until all steps that still run are done, which do not count."""
        self._running = collections.deque((loss, None) for loss, _ in self._running)

    def _restart(self, now: float | None = None) -> None:
        """Let the clock go on from where it stood at the last point."""
        now = time.perf_counter() if now is None else now
        if not self._points:
            self._points.append(_Point(0.0, _Work()))
        self._stopped = now - self._points[-1].seconds


def _is_there(x: Any) -> bool:
    """Return whether an array has been computed. Nobody waits for one that was deleted."""
    return bool(x.is_deleted() or x.is_ready())


def _positive(name: str, given: Any) -> float | None:
    if given is None:
        return None
    found = _check.number(name, given)
    if not 0 < found < math.inf:
        raise ArgumentError(f"{name} must be positive and finite; got {found}.")
    return found
