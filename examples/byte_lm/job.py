"""A checked and prepared training run, with nothing trained or written yet."""

import dataclasses

import jax
from flax import nnx

from crossshard import CrossShardOptimizer
from examples.byte_lm.devices import start_shards
from examples.byte_lm.folder import check_free
from examples.byte_lm.groups import Groups
from examples.byte_lm.held_out import HeldOut, gzip_bits_per_byte
from examples.byte_lm.model import ByteTransformer
from examples.byte_lm.optimizers import InnerOptimizer, check_fits, make_optimizer
from examples.byte_lm.options import TrainOptions
from examples.byte_lm.text import Text, read_text


@dataclasses.dataclass(frozen=True)
class Job:
    """A prepared training run.

    Attributes:
      options: the options of the command.
      shards: the number of shards.
      platform: the platform of the devices, such as ``"cpu"``.
      groups: the groups of shards; one group of all by default.
      rows: the rows of the global batch.
      text: the training and held-out text.
      inner: the inner optimizer.
      first_model: as it is before the first step; not to be trained itself, see ``new_model``.
      gzip_bits_per_byte: what gzip needs for the held-out bytes.
    """

    options: TrainOptions
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
        """The number of trainable parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.first_model, nnx.Param)))

    def new_model(self) -> ByteTransformer:
        """A copy of the model before the first step."""
        return nnx.clone(self.first_model)

    def new_optimizer(self, inner: InnerOptimizer) -> CrossShardOptimizer:
        """An optimizer wrapped for these shards, with no state yet."""
        return CrossShardOptimizer(
            inner.transformation,
            reduction=self.options.reduction,
            group_assignment=self.groups.members if self.options.groups else None,
        )

    def new_held_out(self) -> HeldOut:
        """The held-out bytes, in rows for these shards."""
        return HeldOut(self.text.held_out, self.options.context, self.groups)


def prepare(options: TrainOptions) -> Job:
    """Check all that can be checked before training, starting JAX's devices on the way.

    Raises:
      CrossshardError: an option cannot be satisfied; nothing has been written.
    """
    options.check()
    check_free(options.out)
    groups = options.parsed_groups()
    text = read_text(options.data, options.context + 1)
    shards = start_shards(options.shards, groups)
    rows = options.rows(shards)
    inner = make_optimizer(options.optimizer, options.learning_rate)
    # Last, since it takes longest. Compiled, since op by op it takes twice as long.
    model = nnx.jit(
        lambda: ByteTransformer(
            layers=options.layers, width=options.width, rngs=nnx.Rngs(options.seed)
        )
    )()
    check_fits(inner, model)
    return Job(
        options=options,
        shards=shards,
        platform=jax.devices()[0].platform,
        groups=groups or Groups((tuple(range(shards)),)),
        rows=rows,
        text=text,
        inner=inner,
        first_model=model,
        gzip_bits_per_byte=gzip_bits_per_byte(text.held_out),
    )
