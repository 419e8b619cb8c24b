"""By numbers: whether the weight of a batch is the sum by which the loss divides."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from crossshard import _mesh
from crossshard.jaxprs.divisor import are_equal
from crossshard.jaxprs.mean_over_rows import Finding
from crossshard.shards.batch_axes import join
from crossshard.step.config import StepConfig
from crossshard.step.divisor import Divisor, another_sum
from crossshard.step.microbatches import pieces_of
from crossshard.step.weight import weight_of


def check_weight_by_numbers(
    config: StepConfig, batch: Any, finding: Finding, divisor: Divisor
) -> None:
    """Raise unless both are equal in each piece of a batch, which are two numbers of each.

    Args:
      config: the step.
      batch: the batch, on the devices.
      finding: what the loss is in its rows.
      divisor: what divides it.

    Raises:
      LossError: the weight is another sum.
    """
    loss, shards = config.loss, config.number_of_shards
    weight = loss.weight
    assert weight is not None

    def both(batch: Any) -> jax.Array:
        return jnp.stack([weight_of(weight, batch), divisor.of_batch(batch)])

    def of_shard(batch: Any) -> jax.Array:
        rows, whole = loss.split(batch)
        pieces = pieces_of(rows, loss.batch_axes, loss.pieces(shards))
        return lax.map(lambda piece: both(join(piece, whole)), pieces)

    run = lambda batch: both(batch)[None]
    if divisor.is_of_piece:
        run = jax.shard_map(
            of_shard,
            mesh=config.mesh,
            axis_names=frozenset(config.axes),
            in_specs=(loss.batch_axes.specs(batch, config.axes),),
            out_specs=PartitionSpec(config.axes),
            check_vma=False,
        )
    given = jax.tree.map(lambda x: _mesh.on_mesh(x, config.mesh), batch)
    everywhere = jax.NamedSharding(config.mesh, PartitionSpec())
    with _mesh.in_place_of_the_users_mesh(config.mesh):
        found = jax.device_get(jax.jit(run, out_shardings=everywhere)(given))
    for place, (of_weight, divides) in enumerate(found):
        if not are_equal(of_weight, divides):
            of = f"In part {place} of {len(found)} of this batch" if len(found) > 1 else "Here"
            numbers = f"{of} the loss divides by {divides:.7g}, and weight= is {of_weight:.7g}.\n"
            raise another_sum(weight, finding, numbers)
