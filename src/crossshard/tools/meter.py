"""Meter: how fast a loop trains, and what share of the devices' peak that is, without waiting."""

import collections
import contextlib
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from crossshard import TrainStep, _check
from crossshard._annotations import PyTree
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.step.rebuild import Flops as Flops
from crossshard.step.rebuild import check_is_step, number_of_rows
from crossshard.step.rebuild import count_flops as count_flops

# Dense products of bfloat16 in a second, as the makers state them, by the kind of device. A TPU v4
# or v5p is one device of two cores.
_PEAKS = {
    r"NVIDIA A100(-SXM4|-PCIE)?[- ][48]0GB( PCIe)?": 312e12,
    r"NVIDIA (H100 80GB HBM3|H200)": 989e12,
    r"NVIDIA H100 NVL": 835e12,
    r"NVIDIA H100 PCIe": 756e12,
    r"NVIDIA B200": 2250e12,
    r"TPU v4": 275e12,
    r"TPU v5( lite|e)": 197e12,
    r"TPU v5p?": 459e12,
    r"TPU v6( lite|e)": 918e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device, as its maker states it; ``None`` if unknown.

    Raises:
      ArgumentTypeError: not a device.

    >>> peak_flops(jax.devices("cpu")[0]) is None
    True
    """
    found = getattr(device, "device_kind", None)
    if not isinstance(found, str):
        raise ArgumentTypeError(
            f"device must be one of jax.devices(); got {_check.described(device)}."
        )
    return next((peak for kind, peak in _PEAKS.items() if re.fullmatch(kind, found)), None)


class Meter:
    """Measures how fast a loop trains, without making it wait for the devices.

    A call of a step returns before the devices have computed it. The meter counts a step once its
    loss is there, at which it looks in every ``update``, and divides by the time between two such
    moments. It leaves out the first call with each kind of batch, which compiles, and the time in
    ``paused``.

    Args:
      step: the step of the loop.
      tokens_per_row: how many tokens a row has, to report tokens.
      flops_per_row: your own count of a row's floating-point operations, forward and backward, in
        place of ``count_flops``.
      peak: the FLOP/s of one device, in place of ``peak_flops``.
      window: how many steps the means are over, at least.

    Attributes:
      flops: those of the last batch with new shapes; ``None`` if they were not counted.

    Raises:
      ArgumentError, ArgumentTypeError: not a step, or not positive numbers.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: ((x @ w) ** 2).mean(), optax.sgd(0.1), num_shards=1)
    >>> state, x = step.init(jnp.zeros((16, 4))), jnp.zeros((8, 16))
    >>> meter = Meter(step, tokens_per_row=16, peak=1e12)
    >>> for _ in range(3):
    ...     state, metrics = step(state, x)
    ...     meter.update(x, metrics)
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
        check_is_step(step)
        self.flops: Flops | None = None
        self._step, self._window = step, _check.whole_number("window", window)
        self._tokens_per_row = _positive("tokens_per_row", tokens_per_row)
        self._flops_per_row = _positive("flops_per_row", flops_per_row)
        known = peak_flops(step.mesh.devices.flat[0]) if peak is None else peak
        self._peak = _positive("peak", known)
        # The work of each kind of call: its seconds, which are not known, steps, rows and FLOPs.
        self._kinds: dict[Any, Any] = {}
        # The losses of steps that may still run, and their work.
        self._running: collections.deque[Any] = collections.deque()
        # What was done when steps were seen to be done, with the seconds of a clock that may stop.
        self._seen: collections.deque[Any] = collections.deque([np.zeros(5)])
        self._stood = 0.0

    def update(self, batch: PyTree, metrics: Mapping[str, PyTree]) -> None:
        """Note a call of the step; it waits for it only if such a batch is new.

        Args:
          batch: the batch that was passed.
          metrics: the metrics that were returned.

        Raises:
          ArgumentTypeError: not the metrics of a step.
        """
        loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
        if not isinstance(loss, jax.Array):
            raise ArgumentTypeError(
                f"metrics must be what step(state, batch) returns beside the state; got "
                f"{_check.described(metrics)}."
            )
        leaves, tree = jax.tree.flatten(batch)
        kind = lambda x: (np.shape(x), getattr(x, "dtype", None), getattr(x, "sharding", None))
        key = tree, *map(kind, leaves)
        work = self._kinds.get(key)
        if work is not None:
            self._running.append((loss, work))
            return self._look()
        # The call has compiled. What ran before has ended since, and nobody saw when.
        self._kinds[key] = self._work(batch)
        jax.block_until_ready(loss)
        self._running.clear()
        self._go_on()

    def report(self) -> dict[str, float]:
        """Return the means over the last ``window`` steps, by name, for any logger.

        Returns:
          ``steps_per_second``; ``rows_per_second``, of all processes; ``tokens_per_second``, if
          ``tokens_per_row`` is given; and if the peak is known and all products were counted,
          ``mfu`` and ``hfu``, of 1. Empty until the second step is done.
        """
        self._look()
        if len(self._seen) < 2:
            return {}
        seconds, *done = (self._seen[-1] - self._seen[0]).tolist()
        steps, rows, model, hardware = (x / seconds for x in done)
        found = {"steps_per_second": steps, "rows_per_second": rows}
        if self._tokens_per_row is not None:
            found["tokens_per_second"] = rows * self._tokens_per_row
        if self._peak is not None and not (self.flops and self.flops.uncounted):
            of_all = self._peak * self._step.mesh.size
            found["mfu"] = model / of_all
            if self.flops is not None:
                found["hfu"] = hardware / of_all
        return found

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the steps that still run, and leave out what follows, such as an evaluation."""
        jax.block_until_ready([loss for loss, _ in self._running])
        self._look()
        try:
            yield
        finally:
            self._go_on()

    def _work(self, batch: Any) -> Any:
        """Return what a call with such a batch does."""
        rows, model, hardware = number_of_rows(self._step, batch), 0.0, 0.0
        if self._flops_per_row is not None:
            model = rows * self._flops_per_row
        elif self._peak is not None:
            self.flops = count_flops(self._step, batch)
            model, hardware = self.flops.model, self.flops.hardware
        return np.array([0, 1, rows, model, hardware], float)

    def _look(self) -> None:
        """Note which steps are done by now."""
        now, total = time.perf_counter(), self._seen[-1]
        # JAX may know of a step later than of the next one, which cannot have ended before it.
        ready = [number for number, (loss, _) in enumerate(self._running, 1) if loss.is_ready()]
        for _ in range(max(ready, default=0)):
            total = total + self._running.popleft()[1]
        if total is not self._seen[-1]:
            total[0] = now - self._stood
            self._seen.append(total)
            while self._seen[1][1] <= total[1] - self._window:
                self._seen.popleft()

    def _go_on(self) -> None:
        """Let the clock go on from where it stood when steps were last seen to be done."""
        self._stood = time.perf_counter() - self._seen[-1][0]


def _positive(name: str, given: Any) -> float | None:
    found = None if given is None else _check.number(name, given)
    if found is not None and not 0 < found < math.inf:
        raise ArgumentError(f"{name} must be positive and finite; got {found}.")
    return found
