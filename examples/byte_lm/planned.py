"""The demo's model as `crossshard plan` takes it: shapes only."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.byte_lm.model import ByteTransformer, loss
from examples.byte_lm.options import DEFAULT_BATCH, TrainOptions


def planned(
    layers: int = TrainOptions.layers,
    width: int = TrainOptions.width,
    context: int = TrainOptions.context,
    batch: int | None = None,
) -> dict[str, Any]:
    """The arguments of ``crossshard.plan`` for the model of the demo, with AdamW.

    Args:
      layers: the number of layers.
      width: a multiple of 32.
      context: the bytes of a row.
      batch: the rows of the global batch; by default 16, rounded up to a multiple of the devices.
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
        "has_aux": True,
    }
