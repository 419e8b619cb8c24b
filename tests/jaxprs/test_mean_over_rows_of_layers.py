"""What losses with layers of Flax, Equinox and Keras are in the rows of their batch."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from crossshard.jaxprs.mean_over_rows import Finding
from crossshard.jaxprs.row_facts import OverRows
from tests.jaxprs.proving import over_rows
from tests.quick import deep_but

ROWS, TIME, WIDTH = 6, 5, 4
W = np.float32(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))
SHAPES = {
    "x": ((WIDTH,), jnp.float32),
    "sequence": ((TIME, WIDTH), jnp.float32),
    "image": ((8, 8, 2), jnp.float32),
    "lengths": ((), jnp.int32),
    "mask": ((TIME,), jnp.bool_),
    "words": ((TIME,), jnp.int32),
    "y": ((), jnp.int32),
}
ONE = {name: jnp.ones((1, *shape), dtype) for name, (shape, dtype) in SHAPES.items()}
Loss = Callable[[Any, Any, Any], Any]


def found(loss: Loss) -> Finding:
    batch = {
        name: jax.ShapeDtypeStruct((ROWS, *shape), dtype) for name, (shape, dtype) in SHAPES.items()
    }
    return over_rows(lambda batch, w, key: loss(batch, w, key), batch, W, own=jax.random.key(0))


def of_linen(module: Any, name: str, **options: Any) -> Loss:
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = module.init(keys, ONE[name], **options)

    def loss(b: Any, w: Any, k: Any) -> Any:
        return (module.apply(variables, b[name], rngs={"dropout": k}, **options) ** 2).mean()

    return loss


def of_lengths(module: Any) -> Loss:
    variables = module.init(jax.random.key(1), ONE["sequence"])

    def loss(b: Any, w: Any, k: Any) -> Any:
        return (module.apply(variables, b["sequence"], seq_lengths=b["lengths"]) ** 2).mean()

    return loss


def keras() -> Any:
    """Keras, which is imported by the process that runs these tests, and takes it two seconds."""
    return importlib.import_module("keras")


def of_keras(layer: Any, name: str, **options: Any) -> Loss:
    layer.build((None, *SHAPES[name][0]))
    trained, others = (
        [variable.value for variable in variables]
        for variables in (layer.trainable_variables, layer.non_trainable_variables)
    )
    call = lambda b: layer.stateless_call(trained, others, b[name], **options)[0]
    return lambda b, w, k: (call(b) ** 2).mean()


class Stack(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        layer = lambda module, x, _: (jnp.tanh(module(x)), None)
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return linen.scan(layer, length=3, **axes)(linen.Dense(WIDTH), x, None)[0]


def decoding(b: Any, w: Any, k: Any) -> Any:
    heads = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=nnx.Rngs(0))
    heads.init_cache((b["x"].shape[0], TIME, WIDTH))
    return sum((heads(b["sequence"][:, at : at + 1]) ** 2).mean() for at in range(3))


def masked_heads(rngs: Any) -> Loss:
    heads = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
    mask = lambda b: nnx.make_attention_mask(b["mask"], b["mask"])
    return lambda b, w, k: (heads(b["sequence"], mask=mask(b)) ** 2).mean()


def equinox_dropout(b: Any, w: Any, k: Any) -> Any:
    keys = jax.random.split(k, b["x"].shape[0])
    return (jax.vmap(lambda x, k: eqx.nn.Dropout(0.5)(x, key=k))(b["x"], keys) @ w).mean()


KEY = jax.random.key(3)
MEANS: dict[str, Callable[[], Loss]] = {
    "linen embedding": lambda: of_linen(linen.Embed(10, 4), "words"),
    "linen lengths": lambda: of_lengths(linen.RNN(linen.GRUCell(5))),
    "linen scan of layers": lambda: of_linen(Stack(), "x"),
    "nnx attention": lambda: masked_heads(nnx.Rngs(0)),
    "nnx decoding": lambda: decoding,
    "equinox dropout": lambda: equinox_dropout,
    "keras both ways": lambda: of_keras(
        keras().layers.Bidirectional(keras().layers.GRU(5)), "sequence"
    ),
    "keras entropy": lambda: (
        lambda b, w, k: keras().losses.SparseCategoricalCrossentropy(True)(b["y"], b["x"] @ w)
    ),
    "keras squares of sequences": lambda: (
        lambda b, w, k: keras().losses.MeanSquaredError()(b["sequence"], b["sequence"] @ w)
    ),
}


def linen_batch_norm() -> Loss:
    module = linen.BatchNorm(use_running_average=False)
    variables = module.init(KEY, ONE["x"])
    apply = lambda x: module.apply(variables, x, mutable=["batch_stats"])[0]
    return lambda b, w, k: (apply(b["x"] @ w) ** 2).mean()


def keras_batch_norm() -> Loss:
    return of_keras(keras().layers.BatchNormalization(), "x", training=True)


# Their layer, and the function of this file that calls it.
COMPARED = {
    "flax/linen/normalization.py": (linen_batch_norm, "apply = lambda"),
    "backend/jax/nn.py": (keras_batch_norm, "call = lambda"),
}


@pytest.mark.parametrize("name", deep_but(lambda name: name != "keras both ways", MEANS))
def test_a_mean_over_rows_is_proven(name: str):
    assert found(MEANS[name]()) == Finding(OverRows.MEAN)


@pytest.mark.parametrize("layer", COMPARED)
def test_a_batch_norm_is_refused_with_the_layers_line_and_the_users(layer: str):
    make, call = COMPARED[layer]
    finding = found(make())
    lines = inspect.getsource(inspect.getmodule(make)).splitlines()
    start = inspect.getsourcelines(of_keras if make is keras_batch_norm else make)[1]
    at = next(number for number in range(start, len(lines)) if call in lines[number - 1])
    assert finding.kind is OverRows.COMPARED, finding
    assert finding.source.split(":")[0].endswith(layer.split("/", 1)[1])
    assert finding.source.endswith(f", from tests/jaxprs/{__name__.split('.')[-1]}.py:{at}")
