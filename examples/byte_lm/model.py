"""The model: a small causal transformer over bytes, in Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from crossshard.errors import ArgumentError

VOCABULARY = 256
HEAD_WIDTH = 32


class ByteTransformer(nnx.Module):
    """Next-byte logits, float32[batch, time, 256], for bytes uint8[batch, time].

    Args:
      layers: the number of blocks.
      width: the width of the residual stream; a multiple of 32, the width of a head.
      rngs: the random streams of the initial parameters.
      dtype: the dtype of the computation.
      param_dtype: the dtype of the parameters.

    Raises:
      ArgumentError: no layer, or a width that is not a multiple of 32.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
    ) -> None:
        if layers < 1:
            raise ArgumentError(f"A model has at least one layer; got {layers}.")
        if width < 1 or width % HEAD_WIDTH:
            raise ArgumentError(
                f"The width must be a multiple of {HEAD_WIDTH}, the width of a head; got {width}."
            )
        common: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        normal = nnx.initializers.normal(1.0)
        self.embedding = nnx.Embed(VOCABULARY, width, embedding_init=normal, **common)
        self.blocks = nnx.List([Block(width, layers, **common) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, **common)
        # Near zero, so that training starts from evenly likely bytes: eight bits a byte.
        near_zero = nnx.initializers.normal(0.02)
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, kernel_init=near_zero, **common)

    def __call__(self, bytes_bt: jax.Array) -> jax.Array:
        """The logits of the byte after each byte."""
        x_btd = self.embedding(bytes_bt.astype(jnp.int32))
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.head(self.norm(x_btd)).astype(jnp.float32)


class Block(nnx.Module):
    """One pre-norm layer: causal attention, then two dense layers, each added to its input."""

    def __init__(self, width: int, layers: int, **common: Any) -> None:
        def dense(fan_in: int, fan_out: int, variance: float = 1.0) -> nnx.Linear:
            init = nnx.initializers.variance_scaling(variance, "fan_in", "normal")
            return nnx.Linear(fan_in, fan_out, use_bias=False, kernel_init=init, **common)

        # Starts small enough that the residual stream does not grow with the depth.
        quiet = 1 / (2 * layers)
        self.attention_norm = nnx.RMSNorm(width, **common)
        self.qkv = dense(width, 3 * width)
        self.attention_out = dense(width, width, quiet)
        self.dense_norm = nnx.RMSNorm(width, **common)
        self.dense_in = dense(width, 4 * width)
        self.dense_out = dense(4 * width, width, quiet)

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        """float[batch, time, width], the shape of the input."""
        batch, time, width = x_btd.shape
        qkv = self.qkv(self.attention_norm(x_btd))
        # Head by head, so that columns can be split between heads; float32, for the softmax.
        heads = qkv.reshape(batch, time, -1, 3, HEAD_WIDTH).astype(jnp.float32)
        q, k, v = jnp.unstack(heads, axis=3)
        mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x_btd = x_btd + self.attention_out(mixed.reshape(batch, time, width))
        return x_btd + self.dense_out(nnx.gelu(self.dense_in(self.dense_norm(x_btd))))


def rotate(x_bthd: jax.Array) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) on float32[batch, time, heads, head_width]."""
    time, half = x_bthd.shape[1], x_bthd.shape[-1] // 2
    rates = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(time, dtype=jnp.float32)[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x_bthd, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def nats(model: ByteTransformer, read: jax.Array, wanted: jax.Array) -> jax.Array:
    """The loss of each byte, float32[batch, time], in nats; both uint8[batch, time]."""
    return optax.softmax_cross_entropy_with_integer_labels(model(read), wanted.astype(jnp.int32))


def loss(model: ByteTransformer, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean of ``nats`` over the bytes that count, and the two sums that it is made of.

    Args:
      model: the model.
      batch: what is ``"read"`` and ``"wanted"``, two uint8[batch, time]; if it has ``"counts"``,
        float32[batch, time], only bytes with 1 count, else all.
    """
    costs = nats(model, batch["read"], batch["wanted"])
    counts = batch.get("counts", jnp.ones_like(costs))
    sums = {"nats": (costs * counts).sum(), "bytes": counts.sum()}
    return sums["nats"] / sums["bytes"], sums


def params_by_name(params: Any) -> dict[str, jax.Array]:
    """The arrays of an ``nnx.State`` by name, as ``"blocks/0/qkv/kernel"``."""
    flat = nnx.to_flat_state(params)
    return {"/".join(map(str, path)): leaf.get_raw_value() for path, leaf in flat}
