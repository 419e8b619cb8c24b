"""The demo's model as `crossshard plan` takes it: shapes only."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from examples.byte_lm.model import ByteTransformer, loss
from examples.byte_lm.options import DEFAULT_BATCH, TrainOptions

# The matrices whose columns, or rows, are split over the mesh axis ``model`` (Megatron-LM, arXiv
# 1909.08053).
_BY_COLUMNS = {"qkv", "dense_in", "head"}
_BY_ROWS = {"embedding", "attention_out", "dense_out"}


def planned(
    layers: int = TrainOptions.layers,
    width: int = TrainOptions.width,
    context: int = TrainOptions.context,
    batch: int | None = None,
    split: bool = False,
) -> dict[str, Any]:
    """The arguments of ``crossshard.plan`` for the model of the demo, with AdamW.

    Args:
      layers: the number of layers.
      width: a multiple of 32.
      context: the bytes of a row.
      batch: the rows of the global batch; by default 16, rounded up to a multiple of the devices.
      split: whether to look at meshes on which devices share a model, too.
    """

    def rows(devices: int) -> dict[str, jax.ShapeDtypeStruct]:
        number = batch or math.ceil(DEFAULT_BATCH / devices) * devices
        row = jax.ShapeDtypeStruct((number, context), jnp.uint8)
        return {"read": row, "wanted": row}

    return {
        "loss_fn": loss,
        "params": lambda: ByteTransformer(layers=layers, width=width, rngs=nnx.Rngs(0)),
        "batch": rows,
        "optimizer": optax.adamw(1e-3),
        "model_specs": _spec_of if split else None,
        "has_aux": True,
    }


def split() -> dict[str, Any]:
    """The same, looking at meshes on which devices share a model, too."""
    return planned(split=True)


def _spec_of(path: Any, leaf: Any) -> PartitionSpec:
    names = {getattr(each, "key", None) for each in path}
    if names & _BY_COLUMNS:
        return PartitionSpec(None, "model")
    return PartitionSpec("model", None) if names & _BY_ROWS else PartitionSpec()
