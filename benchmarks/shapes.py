"""Models as shapes only, to compile steps for machines that are not there."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_HEAD = 128


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A model and a batch, of which only the types are known.

    Attributes:
      params: the types of the parameters.
      loss_fn: the loss of the parameters and one shard's batch. An optional third argument is a
        function from the parameters and the input of a layer to those that it computes with.
      row: the type of one row of the batch.
      rows: the rows of each shard.
      read_again: the number of parameters that the backward pass reads anew, in checkpoints.
    """

    params: Any
    loss_fn: Callable[..., jax.Array]
    row: jax.ShapeDtypeStruct
    rows: int
    read_again: int = 0

    def batch(self, shards: int) -> jax.ShapeDtypeStruct:
        """The type of the batch of all shards."""
        return jax.ShapeDtypeStruct((self.rows * shards, *self.row.shape), self.row.dtype)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return _numbers(self.params)


def _numbers(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _as_they_are(layer: Any, x: Any) -> Any:
    return layer, x


def mlp(width: int = 2048, layers: int = 12, rows: int = 512) -> Shapes:
    """Dense layers of one width, in bfloat16 with float32 parameters."""
    params = [{"kernel": _floats(width, width), "bias": _floats(width)} for _ in range(layers)]

    def loss_fn(params: Any, x: jax.Array, read: Any = _as_they_are) -> jax.Array:
        for each in params:
            layer, x = read(each, x)
            x = jax.nn.gelu(x @ layer["kernel"].astype(x.dtype) + layer["bias"].astype(x.dtype))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return Shapes(params, loss_fn, jax.ShapeDtypeStruct((width,), jnp.bfloat16), rows)


def blocks(
    layers: int = 8,
    width: int = 2048,
    rows: int = 4096,
    scan: bool = False,
    checkpoint: bool = False,
) -> Shapes:
    """Residual blocks of two matrices, in bfloat16 with float32 parameters.

    Args:
      layers: the number of blocks.
      width: of the input; a block is four times as wide within.
      rows: the rows of each shard.
      scan, checkpoint: as for ``transformer``.
    """
    block = {"up": (width, 4 * width), "down": (4 * width, width)}
    if scan:
        params: Any = {name: _floats(layers, *shape) for name, shape in block.items()}
    else:
        params = [{name: _floats(*shape) for name, shape in block.items()}] * layers

    def loss_fn(params: Any, x: jax.Array, read: Any = _as_they_are) -> jax.Array:
        def run(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            layer, x = read(layer, x)
            inner = jax.nn.gelu(x @ layer["up"].astype(x.dtype))
            return x + inner @ layer["down"].astype(x.dtype), None

        run = jax.checkpoint(run) if checkpoint else run
        if scan:
            x, _ = jax.lax.scan(run, x, params)
        else:
            for layer in params:
                x, _ = run(x, layer)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    again = _numbers(params) if checkpoint else 0
    return Shapes(params, loss_fn, jax.ShapeDtypeStruct((width,), jnp.bfloat16), rows, again)


def transformer(
    layers: int = 24,
    words: int = 50304,
    context: int = 2048,
    rows: int = 2,
    scan: bool = False,
    checkpoint: bool = False,
    heads: int = 16,
    attention: str | None = None,
) -> Shapes:
    """A language model of 2,048 wide layers, in bfloat16 with float32 parameters.

    Args:
      layers: the number of layers.
      words: the size of the vocabulary.
      context: the tokens of a row.
      rows: the rows of each shard.
      scan: whether the layers are stacked, and a ``lax.scan`` runs over them.
      checkpoint: whether the backward pass computes each layer again, ``jax.checkpoint``.
      heads: the number of heads, each 128 wide.
      attention: the ``implementation`` of ``jax.nn.dot_product_attention``.
    """
    width = heads * _HEAD
    layer = {
        "before": _floats(width),
        "attention": _floats(width, 3 * width),
        "out": _floats(width, width),
        "between": _floats(width),
        "up": _floats(width, 4 * width),
        "down": _floats(4 * width, width),
    }
    stacked = {name: _floats(layers, *each.shape) for name, each in layer.items()}
    params = {
        "words": _floats(words, width),
        "layers": stacked if scan else [layer] * layers,
        "last": _floats(width),
    }

    def loss_fn(params: Any, tokens: jax.Array, read: Any = _as_they_are) -> jax.Array:
        block = lambda x, layer: (_block(attention, *read(layer, x)), None)
        block = jax.checkpoint(block) if checkpoint else block
        embedding, tokens = read(params["words"], tokens)
        x = embedding.astype(jnp.bfloat16)[tokens[:, :-1]]
        if scan:
            x, _ = jax.lax.scan(block, x, params["layers"])
        else:
            for layer in params["layers"]:
                x, _ = block(x, layer)
        scores = _normed(x, params["last"]) @ embedding.astype(jnp.bfloat16).T
        scores = scores.astype(jnp.float32)
        right = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - right)

    again = _numbers(params["layers"]) if checkpoint else 0
    return Shapes(params, loss_fn, jax.ShapeDtypeStruct((context + 1,), jnp.int32), rows, again)


def _block(attention: Any, layer: Any, x: jax.Array) -> jax.Array:
    cast = lambda name: layer[name].astype(x.dtype)
    rows, length, width = x.shape
    mixed = _normed(x, layer["before"]) @ cast("attention")
    query, key, value = jnp.split(mixed.reshape(rows, length, -1, _HEAD), 3, axis=2)
    seen = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=attention)
    x = x + seen.reshape(rows, length, width) @ cast("out")
    return x + jax.nn.gelu(_normed(x, layer["between"]) @ cast("up")) @ cast("down")


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * scale
    return wide.astype(x.dtype)
