"""What the losses of the table train on, and the pieces of models that they share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# 24 rows, which 2, 3 and 8 shards divide.
ROWS, TIME, WIDTH, WORDS, HEADS, EXPERTS, HIDDEN, KINDS = 24, 8, 8, 12, 2, 4, 16, 4


def params() -> dict[str, Any]:
    """The parameters, of which a case trains those that it reads."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    square = {name: normal(WIDTH, WIDTH) / 3 for name in "q k v o a b c d".split()}
    return square | {
        "embed": normal(WORDS, WIDTH) / 2,
        "out": normal(WIDTH, WORDS) / 3,
        "up": normal(WIDTH, HIDDEN) / 3,
        "gate": normal(WIDTH, HIDDEN) / 3,
        "down": normal(HIDDEN, WIDTH) / 4,
        "scale": 1 + normal(WIDTH) / 4,
        "bias": normal(WIDTH) / 4,
        "decay": normal(WIDTH),
        "route": normal(WIDTH, EXPERTS),
        "experts": normal(EXPERTS, WIDTH, WIDTH) / 3,
        "layers": normal(3, WIDTH, WIDTH) / 3,
    }


def batch() -> dict[str, Any]:
    """The rows. Later ones are longer, larger and weigh more, so that shards differ in all."""
    rng = np.random.default_rng(1)
    size = np.linspace(0.5, 1.5, ROWS)
    normal = lambda *shape: np.float32(
        rng.normal(size=(ROWS, *shape)) * size.reshape(-1, *[1] * len(shape))
    )
    length = 2 + np.arange(ROWS) // 4
    at = np.arange(TIME)
    is_there = at < length[:, None]
    words = lambda: rng.integers(1, WORDS, size=(ROWS, TIME)).astype(np.int32)
    return {
        "x": normal(TIME, WIDTH),
        "y": normal(TIME, WIDTH),
        "v": normal(WIDTH),
        "z": normal(WIDTH),
        "noise": np.float32(rng.normal(size=(ROWS, WIDTH))),
        "words": words(),
        "labels": words(),
        "rejected": words(),
        "padded": np.where(is_there, words(), 0).astype(np.int32),
        "mask": is_there.astype(np.float32),
        "is_there": is_there,
        "spans": np.float32(rng.random((ROWS, TIME)) < np.linspace(0.2, 0.7, ROWS)[:, None]),
        "segments": np.where(is_there, 1 + at // 3, 0).astype(np.int32),
        "length": length.astype(np.int32),
        "kind": (rng.permutation(ROWS) % KINDS).astype(np.int32),
        "share": np.linspace(0.004, 0.1, ROWS).astype(np.float32),
        "advantage": normal(),
        "reward": normal(TIME),
        "time": rng.random(ROWS).astype(np.float32),
        "old": np.float32(-2.3 + rng.normal(size=(ROWS, TIME)) / 5),
        "old_rejected": np.float32(-2.3 + rng.normal(size=(ROWS, TIME)) / 5),
        "start": rng.integers(TIME - 3, size=ROWS).astype(np.int32),
        "edges": np.float32(rng.random((ROWS, TIME, TIME)) < 0.4),
        "order": np.argsort(rng.random((ROWS, TIME)), 1).astype(np.int32),
    }


CAUSAL = np.tril(np.ones((TIME, TIME), bool))


def unit(x: Any) -> Any:
    """Of length 1 along the last axis."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def rms(x: Any) -> Any:
    """RMSNorm without its scale."""
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-3)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Of each label."""
    found = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(found, labels[..., None], -1)[..., 0]


def heads(x: Any, number: int = HEADS) -> Any:
    """``[..., time, heads, width]`` of ``[..., time, heads × width]``."""
    return x.reshape(*x.shape[:-1], number, -1)


def attend(q: Any, k: Any, v: Any, mask: Any = CAUSAL, change: Any = lambda scores: scores) -> Any:
    """Attention of ``[rows, time, heads, width]``, as ``[rows, time, heads × width]``."""
    scores = change(jnp.einsum("rthd,rshd->rhts", q, k) * q.shape[-1] ** -0.5)
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    out = jnp.einsum("rhts,rshd->rthd", shares, v)
    return out.reshape(*out.shape[:2], -1)


def projected(p: Any, x: Any) -> Any:
    """Queries, keys and values."""
    return heads(x @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])


def squares(found: Any, wanted: Any) -> Any:
    """The mean square error."""
    return ((found - wanted) ** 2).mean()


def swiglu(p: Any, x: Any) -> Any:
    """A gated layer and back."""
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def block(p: Any, x: Any) -> Any:
    """A layer of a transformer."""
    x = x + attend(*projected(p, rms(x) * p["scale"]))
    return x + swiglu(p, rms(x))


def hidden(p: Any, ids: Any) -> Any:
    """What a language model makes of its words, before its logits."""
    return block(p, p["embed"][ids])


def token_losses(p: Any, b: Any, ids: str = "words") -> Any:
    """``[rows, time]``: of a small language model."""
    return cross_entropy(jnp.tanh(p["embed"][b[ids]] @ p["a"]) @ p["out"], b["labels"])


def log_probabilities(p: Any, ids: Any) -> Any:
    """``[rows, time - 1]``: of each word but the first, given the one before it."""
    logits = jnp.tanh(p["embed"][ids[:, :-1]] @ p["a"]) @ p["out"]
    return -cross_entropy(logits, ids[:, 1:])


def row_losses(p: Any, b: Any) -> Any:
    """``[rows]``: of a small regression."""
    return ((jnp.tanh(b["v"] @ p["a"]) @ p["b"] - b["z"]) ** 2).mean(1)


def out_of(p: Any, b: Any) -> Any:
    """``[rows, width]``: an embedding of each row."""
    return jnp.tanh(b["v"] @ p["a"]) @ p["b"]


def opaque(function: Any, x: Any, **options: Any) -> Any:
    """A function of numpy, which no trace sees through; its gradient is that of an identity."""

    @jax.custom_jvp
    def call(x: Any) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        run = lambda x: np.asarray(function(np.asarray(x, np.float32))).astype(x.dtype)
        return jax.pure_callback(run, like, x, **{"vmap_method": "expand_dims"} | options)

    call.defjvp(lambda xs, ts: (call(*xs), ts[0]))
    return call(x)


def with_gradient(of_gradient: Any) -> Any:
    """An identity whose gradient is changed by a function."""

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (of_gradient(g),))
    return same


def kernel(body: Any, x: Any, **options: Any) -> Any:
    """A Pallas kernel as large as its argument, interpreted; its gradient is that of tanh."""
    from jax.experimental import pallas

    options = {"out_shape": jax.ShapeDtypeStruct(x.shape, x.dtype)} | options

    @jax.custom_jvp
    def call(x: Any) -> Any:
        return pallas.pallas_call(body, interpret=True, **options)(x)

    call.defjvp(lambda xs, ts: (call(*xs), ts[0] * (1 - jnp.tanh(xs[0]) ** 2)))
    return call(x)


def tanh_kernel(x: Any, out: Any) -> None:
    """The body of a kernel."""
    out[...] = jnp.tanh(x[...])


swapped = functools.partial(jnp.swapaxes, axis1=0, axis2=1)
