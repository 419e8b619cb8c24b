"""A checked and prepared training run, with nothing trained or written yet."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from crossshard import CrossShardOptimizer, TrainStep, cpu_devices, make_train_step
from crossshard.errors import ArgumentError
from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.model import MODEL_AXIS, ByteTransformer, loss, split_over
from examples.byte_lm.optimizers import InnerOptimizer, make_optimizer
from examples.byte_lm.options import MOST_SHARDS, Groups, TrainOptions, parse_groups
from examples.byte_lm.processes import ALONE, Processes
from examples.byte_lm.text import Text, batches, gzip_bits_per_byte, read_text
from examples.byte_lm.training import Training

CPU_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Job:
    """A prepared training run: the options of the command, and what they stand for."""

    options: TrainOptions
    processes: Processes
    shards: int
    platform: str
    # One group of all shards by default.
    groups: Groups
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
        parts = self.shards * self.options.accumulate_steps
        rows = self.processes.own_rows(self.step.mesh, next(self.batches()), parts)
        return self.step.lower(self.step.abstract_init(self.split_model), rows)

    def new_training(self) -> Training:
        """The run before its first step."""
        several = len(self.groups) > 1
        return Training(
            self.step,
            self.step.init(self.split_model),
            self.processes,
            self.options.accumulate_steps,
            of_groups=tuple(group[0] for group in self.groups) if several else (None,),
            repairs=self.options.on_divergence == "repair",
        )

    def new_held_out(self) -> HeldOut:
        """The held-out bytes, in rows."""
        return HeldOut(self.text.held_out, self.options.context)

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """The batches of the run, from the first; of all processes."""
        options = self.options
        ends = self.text.ends if options.weight else None
        return batches(self.text.training, self.rows, options.context, options.seed, ends)

    @functools.cached_property
    def step(self) -> TrainStep:
        """The step of the run."""
        options = self.options
        optimizer = CrossShardOptimizer(
            self.inner.transformation,
            reduction=options.reduction,
            group_assignment=self.groups if options.groups else None,
        )
        return make_train_step(
            loss,
            optimizer,
            has_aux=True,
            weight="counts" if options.weight else None,
            wrt=options.trains if options.wrt else None,
            weight_update=options.weight_update,
            accumulate_steps=options.accumulate_steps,
            metrics=options.metrics,
            reduce_dtype=options.reduce_dtype,
            loss_scale=options.loss_scale,
            nonfinite=None if options.nonfinite == "off" else options.nonfinite,
            check_divergence=options.check_divergence,
            on_divergence=options.on_divergence,
            master_dtype=options.master_dtype,
            ema=options.ema,
            **self._where,
        )

    @functools.cached_property
    def _where(self) -> dict[str, Any]:
        if self.options.model_shards == 1:
            return {"num_shards": self.shards}
        sizes = self.shards, self.options.model_shards
        devices = jax.devices()[: sizes[0] * sizes[1]]
        types = (AxisType.Auto,) * 2
        mesh = jax.make_mesh(sizes, ("data", MODEL_AXIS), axis_types=types, devices=devices)
        return {"mesh": mesh, "axis_name": "data"}

    @property
    def split_model(self) -> ByteTransformer:
        """The model, split over the mesh if devices share one."""
        mesh = self._where.get("mesh")
        return self.first_model if mesh is None else split_over(mesh, self.first_model)


def prepare(options: TrainOptions, processes: Processes = ALONE) -> Job:
    """Check all that can be checked before training, starting JAX's devices on the way.

    Raises:
      CrossshardError: an option cannot be satisfied; nothing has been written.
    """
    options.check()
    groups = None if options.groups is None else parse_groups(options.groups)
    text = read_text(options.data, options.context + 1)
    shards = _start_shards(options, groups, processes.number)
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
        groups=groups or (tuple(range(shards)),),
        rows=rows,
        text=text,
        inner=make_optimizer(options.optimizer, options.learning_rate),
        first_model=model,
        gzip_bits_per_byte=gzip_bits_per_byte(text.held_out),
    )
    # Raises if the options do not go together.
    _ = job.lowered
    return job


def _start_shards(options: TrainOptions, groups: Groups | None, processes: int) -> int:
    """Start JAX's devices, of which each process has as many; return the number of shards."""
    asked = options.shards or sum(map(len, groups or ()))
    # Where nobody has asked for a number of devices there are eight, or a few more.
    given = int(os.environ.get("JAX_NUM_CPU_DEVICES") or 0) * processes
    devices = given or math.ceil(CPU_DEVICES / processes) * processes
    on_cpu = asked or max(1, devices // options.model_shards)
    what = f" of {options.model_shards} devices" * (options.model_shards > 1)
    if on_cpu * options.model_shards > MOST_SHARDS * processes:
        raise ArgumentError(
            f"{on_cpu} shards{what} are more than one process can run; use at most {MOST_SHARDS} "
            f"devices."
        )
    if on_cpu * options.model_shards % processes:
        raise ArgumentError(
            f"{on_cpu} shards{what} cannot be split evenly over {processes} processes. Pass "
            f"--shards {math.lcm(processes, on_cpu)}, or start another number of processes."
        )
    # Whether there is an accelerator shows only once JAX runs, and then it is too late to make
    # CPU devices. Where there is one these stay idle.
    cpu_devices(on_cpu * options.model_shards // processes)
    platform, number = jax.devices()[0].platform, len(jax.devices())
    shards = on_cpu if asked or platform == "cpu" else max(1, number // options.model_shards)
    if shards * options.model_shards > number:
        raise ArgumentError(
            f"{shards} shards{what} need {shards * options.model_shards} devices, and there are "
            f"{number} ({platform}). Use fewer, or set JAX_PLATFORMS=cpu for virtual ones."
        )
    return shards
