"""A checked and prepared training run, with nothing trained or written yet."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax import nnx

from crossshard import CrossShardOptimizer, TrainStep, cpu_devices, make_train_step
from crossshard.errors import ArgumentError
from crossshard.pipeline import Quantized
from examples.byte_lm.model import ByteTransformer, loss
from examples.byte_lm.optimizers import InnerOptimizer, make_optimizer
from examples.byte_lm.options import MOST_SHARDS, TrainOptions
from examples.byte_lm.processes import ALONE, Processes
from examples.byte_lm.text import Text, batches, gzip_bits_per_byte, read_text
from examples.byte_lm.training import Training, own_rows

CPU_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Job:
    """A prepared training run: the options of the command, and what they stand for."""

    options: TrainOptions
    processes: Processes
    shards: int
    platform: str
    # Of the global batch.
    rows: int
    text: Text
    inner: InnerOptimizer
    # As it is before the first step.
    first_model: ByteTransformer
    # Of the held-out bytes.
    gzip_bits_per_byte: float

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.first_model, nnx.Param)))

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The program of that step, which is compiled once for reports and for the run."""
        rows = own_rows(self.step, next(self.batches()), self.options.pieces(self.shards))
        return self.step.lower(self.step.abstract_init(self.first_model), rows)

    def new_training(self) -> Training:
        """The run before its first step."""
        return Training(
            self.step,
            self.step.init(self.first_model),
            self.processes,
            self.options.pieces(self.shards),
            repairs=self.options.on_divergence == "repair",
        )

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """The batches of the run, from the first; of all processes."""
        options = self.options
        ends = self.text.ends if options.weight else None
        return batches(self.text.training, self.rows, options.context, options.seed, ends)

    @functools.cached_property
    def step(self) -> TrainStep:
        """The step of the run."""
        options = self.options
        return make_train_step(
            loss,
            CrossShardOptimizer(
                self.inner.transformation,
                reduction=options.reduction,
                group_assignment=self._workers,
            ),
            num_shards=self.shards,
            has_aux=True,
            weight="counts" if options.weight else None,
            wrt=options.trains if options.wrt else None,
            weight_update=options.weight_update,
            params=options.params,
            accumulate_steps=options.accumulate_steps,
            virtual_shards=options.virtual_shards,
            metrics=options.metrics,
            reduce_dtype=self._wire,
            gather_dtype=options.gather_dtype,
            sync_every=options.sync_every,
            sync_streaming=options.sync_streaming,
            outer_optimizer=self._outer_optimizer,
            outer_reduce_dtype=options.outer_reduce_dtype,
            loss_scale=options.loss_scale,
            nonfinite=None if options.nonfinite == "off" else options.nonfinite,
            check_divergence=options.check_divergence,
            on_divergence=options.on_divergence,
            master_dtype=options.master_dtype,
            ema=options.ema,
        )

    @property
    def _workers(self) -> list[list[int]] | None:
        """The shards of each worker; ``None`` if each is one, or nothing is said of workers."""
        number = self.options.workers
        if number is None:
            return None
        if self.shards % number:
            raise ArgumentError(
                f"{self.shards} shards cannot be split evenly over --workers {number}."
            )
        return np.arange(self.shards).reshape(number, -1).tolist()

    @property
    def _outer_optimizer(self) -> optax.GradientTransformation | None:
        options = self.options
        if options.sync_every is None:
            return None
        momentum = options.outer_momentum or None
        return optax.sgd(options.outer_learning_rate, momentum, nesterov=momentum is not None)

    @property
    def _wire(self) -> str | Quantized | None:
        """How gradients are sent."""
        options = self.options
        if not options.sends_few_bits:
            return options.reduce_dtype
        return Quantized(str(options.reduce_dtype), options.rounding, options.error_feedback)


def prepare(options: TrainOptions, processes: Processes = ALONE) -> Job:
    """Check all that can be checked before training, starting JAX's devices on the way.

    Raises:
      CrossshardError: an option cannot be satisfied; nothing has been written.
    """
    options.check()
    text = read_text(options.data, options.context + 1)
    shards = _start_shards(options.shards, processes.number)
    rows = options.rows(shards)
    # Compiled, since op by op it takes twice as long.
    model = nnx.jit(
        lambda: ByteTransformer(
            layers=options.layers,
            width=options.width,
            rngs=nnx.Rngs(options.seed),
            dtype=options.dtype,
            param_dtype=options.param_dtype,
        )
    )()
    job = Job(
        options=options,
        processes=processes,
        shards=shards,
        platform=jax.devices()[0].platform,
        rows=rows,
        text=text,
        inner=make_optimizer(
            options.optimizer,
            options.learning_rate,
            options.steps if options.schedule == "cosine" else None,
        ),
        first_model=model,
        gzip_bits_per_byte=gzip_bits_per_byte(text.held_out),
    )
    # Raises if the options do not go together.
    _ = job.lowered
    return job


def _start_shards(asked: int | None, processes: int) -> int:
    """Start JAX's devices, of which each process has as many; return the number of shards."""
    # Where nobody has asked for a number of devices there are eight, or a few more.
    given = int(os.environ.get("JAX_NUM_CPU_DEVICES") or 0) * processes
    on_cpu = asked or given or math.ceil(CPU_DEVICES / processes) * processes
    if on_cpu > MOST_SHARDS * processes:
        raise ArgumentError(
            f"{on_cpu} shards are more than one process can run; use at most {MOST_SHARDS}."
        )
    if on_cpu % processes:
        raise ArgumentError(
            f"{on_cpu} shards cannot be split evenly over {processes} processes. Pass "
            f"--shards {math.lcm(processes, on_cpu)}, or start another number of processes."
        )
    # Whether there is an accelerator shows only once JAX runs, and then it is too late to make
    # CPU devices. Where there is one these stay idle.
    cpu_devices(on_cpu // processes)
    platform, number = jax.devices()[0].platform, len(jax.devices())
    shards = on_cpu if asked or platform == "cpu" else number
    if shards > number:
        raise ArgumentError(
            f"{shards} shards need {shards} devices, and there are {number} ({platform}). Use "
            f"fewer, or set JAX_PLATFORMS=cpu for virtual ones."
        )
    return shards
