"""A checked and prepared training run, with nothing trained or written yet."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from crossshard import CrossShardOptimizer, TrainStep, make_train_step
from examples.byte_lm.devices import start_shards
from examples.byte_lm.folder import check_free
from examples.byte_lm.groups import Groups
from examples.byte_lm.held_out import HeldOut, gzip_bits_per_byte
from examples.byte_lm.model import MODEL_AXIS, ByteTransformer, loss, split_over
from examples.byte_lm.optimizers import InnerOptimizer, check_fits, make_optimizer
from examples.byte_lm.options import TrainOptions
from examples.byte_lm.processes import ALONE, Processes
from examples.byte_lm.text import Text, batches, read_text
from examples.byte_lm.training import Training


@dataclasses.dataclass(frozen=True)
class Job:
    """A prepared training run.

    Attributes:
      options: the options of the command.
      processes: those that train together.
      shards: the number of shards.
      platform: the platform of the devices, such as ``"cpu"``.
      groups: the groups of shards; one group of all by default.
      rows: the rows of the global batch.
      text: the training and held-out text.
      inner: the inner optimizer.
      first_model: as it is before the first step.
      gzip_bits_per_byte: what gzip needs for the held-out bytes.
    """

    options: TrainOptions
    processes: Processes
    shards: int
    platform: str
    groups: Groups
    rows: int
    text: Text
    inner: InnerOptimizer
    first_model: ByteTransformer
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
        several = len(self.groups.members) > 1
        of_groups = tuple(group[0] for group in self.groups.members) if several else (None,)
        state = self.step.init(self.split_model)
        return Training(
            self.step,
            state,
            self.processes,
            self.options.accumulate_steps,
            of_groups,
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
            group_assignment=self.groups.members if options.groups else None,
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
    if processes.is_first and not options.resume:
        check_free(options.out)
    groups = options.parsed_groups()
    text = read_text(options.data, options.context + 1)
    shards = start_shards(options.shards, groups, options.model_shards, processes.number)
    rows = options.rows(shards)
    inner = make_optimizer(options.optimizer, options.learning_rate)
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
    check_fits(inner, model)
    job = Job(
        options=options,
        processes=processes,
        shards=shards,
        platform=jax.devices()[0].platform,
        groups=groups or Groups((tuple(range(shards)),)),
        rows=rows,
        text=text,
        inner=inner,
        first_model=model,
        gzip_bits_per_byte=gzip_bits_per_byte(text.held_out),
    )
    # Raises if the options do not go together.
    _ = job.lowered
    return job
