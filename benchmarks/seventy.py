"""A model of 70 billion parameters, types only: `crossshard plan benchmarks.seventy:make`.

The shape is that of Llama 3 70B (arXiv 2407.21783, table 3): 80 layers, which a ``lax.scan`` runs
over and ``jax.checkpoint`` computes again in the backward pass.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

_LAYERS, _WIDTH, _HIDDEN, _WORDS = 80, 8192, 28672, 128256
_HEAD, _HEADS, _KEY_HEADS = 128, 64, 8
_CONTEXT = 4096


def make() -> dict[str, Any]:
    """The arguments of ``crossshard.plan``: AdamW, and one row of 4,096 tokens for each device."""
    return {
        "loss_fn": loss_fn,
        "params": types(),
        "batch": lambda devices: jax.ShapeDtypeStruct((devices, _CONTEXT + 1), jnp.int32),
        "optimizer": optax.adamw(1e-4),
    }


def types() -> dict[str, Any]:
    """The types of the parameters, float32."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layer = {
        "before": (_WIDTH,),
        "query": (_WIDTH, _HEADS * _HEAD),
        "key": (_WIDTH, _KEY_HEADS * _HEAD),
        "value": (_WIDTH, _KEY_HEADS * _HEAD),
        "out": (_HEADS * _HEAD, _WIDTH),
        "between": (_WIDTH,),
        "gate": (_WIDTH, _HIDDEN),
        "up": (_WIDTH, _HIDDEN),
        "down": (_HIDDEN, _WIDTH),
    }
    return {
        "words": of(_WORDS, _WIDTH),
        "layers": {name: of(_LAYERS, *shape) for name, shape in layer.items()},
        "last": of(_WIDTH),
        "scores": of(_WIDTH, _WORDS),
    }


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of the next token, computed in bfloat16."""
    x = params["words"].astype(jnp.bfloat16)[tokens[:, :-1]]
    x, _ = jax.lax.scan(_block, x, params["layers"])
    scores = _normed(x, params["last"]) @ params["scores"].astype(x.dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        scores.astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


@jax.checkpoint
def _block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    weight = {name: own.astype(x.dtype) for name, own in layer.items()}
    inner = _normed(x, weight["before"])
    heads = lambda name: (inner @ weight[name]).reshape(*x.shape[:2], -1, _HEAD)
    query, key = _rotated(heads("query")), _rotated(heads("key"))
    seen = jax.nn.dot_product_attention(query, key, heads("value"), is_causal=True)
    x = x + seen.reshape(x.shape) @ weight["out"]
    inner = _normed(x, weight["between"])
    return x + (jax.nn.silu(inner @ weight["gate"]) * (inner @ weight["up"])) @ weight["down"], None


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Queries or keys with rotary position embeddings."""
    rates = 500_000.0 ** (-jnp.arange(0, _HEAD, 2) / _HEAD)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    one, other = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    turned = [one * cosine - other * sine, other * cosine + one * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
