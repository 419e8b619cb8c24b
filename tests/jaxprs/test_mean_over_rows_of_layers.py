"""What losses with layers of Flax, Equinox, Haiku and Keras are in the rows of their batch."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from keras import layers

from crossshard.jaxprs.mean_over_rows import Finding
from crossshard.jaxprs.row_facts import OverRows
from tests.jaxprs.proving import over_rows

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


def of_nnx(make: Callable[..., Any], name: str) -> Loss:
    module = make(rngs=nnx.Rngs(0))
    return lambda b, w, k: (module(b[name]) ** 2).mean()


def of_equinox(module: Any, name: str) -> Loss:
    return lambda b, w, k: (jax.vmap(module)(b[name]) ** 2).mean()


def of_images(module: Any) -> Loss:
    return lambda b, w, k: (jax.vmap(module)(b["image"].transpose(0, 3, 1, 2)) ** 2).mean()


def of_haiku(function: Callable[[Any], Any], name: str) -> Loss:
    net = hk.transform(function)
    params = net.init(jax.random.key(1), ONE[name])
    return lambda b, w, k: (net.apply(params, k, b[name]) ** 2).mean()


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


def equinox_cell(cell: Any) -> Loss:
    last = lambda x: lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(3), x)[0]
    return lambda b, w, k: jax.vmap(last)(b["sequence"]).mean()


def keras_dropout() -> Loss:
    layer = layers.Dropout(0.5, seed=1)
    layer.build((None, WIDTH))

    def loss(b: Any, w: Any, k: Any) -> Any:
        seeds = [jax.random.bits(k, (2,), "uint32")]
        return (layer.stateless_call([], seeds, b["x"], training=True)[0] @ w).mean()

    return loss


def keras_heads() -> Loss:
    layer = layers.MultiHeadAttention(2, 3)
    layer.build((None, TIME, WIDTH), (None, TIME, WIDTH))
    trained = [variable.value for variable in layer.trainable_variables]
    call = lambda x: layer.stateless_call(trained, [], x, x)[0]
    return lambda b, w, k: (call(b["sequence"]) ** 2).mean()


def unrolled(cell: Any) -> Callable[[Any], Any]:
    return lambda x: hk.dynamic_unroll(cell, x.swapaxes(0, 1), cell.initial_state(x.shape[0]))[0]


def attending(x: Any) -> Any:
    heads = hk.MultiHeadAttention(2, 3, w_init=hk.initializers.VarianceScaling(1.0))
    return heads(x, x, x)


KEY = jax.random.key(3)
MEANS: dict[str, Callable[[], Loss]] = {
    "linen convolution": lambda: of_linen(linen.Conv(3, (3, 3)), "image"),
    "linen depthwise": lambda: of_linen(linen.Conv(2, (3, 3), feature_group_count=2), "image"),
    "linen transposed": lambda: of_linen(linen.ConvTranspose(3, (3, 3)), "image"),
    "linen local": lambda: of_linen(linen.ConvLocal(3, (3, 3)), "image"),
    "linen group norm": lambda: of_linen(linen.GroupNorm(2), "image"),
    "linen instance norm": lambda: of_linen(linen.InstanceNorm(), "image"),
    "linen weight norm": lambda: of_linen(linen.WeightNorm(linen.Dense(3)), "x"),
    "linen embedding": lambda: of_linen(linen.Embed(10, 4), "words"),
    "linen attention": lambda: of_linen(
        linen.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False), "sequence"
    ),
    "linen dropout": lambda: of_linen(linen.Dropout(0.5, deterministic=False), "x"),
    "linen lstm": lambda: of_linen(linen.RNN(linen.OptimizedLSTMCell(5)), "sequence"),
    "linen both ways": lambda: of_linen(
        linen.Bidirectional(linen.RNN(linen.GRUCell(5)), linen.RNN(linen.GRUCell(5))), "sequence"
    ),
    "linen lengths": lambda: of_lengths(linen.RNN(linen.GRUCell(5))),
    "linen scan of layers": lambda: of_linen(Stack(), "x"),
    "linen batch norm, trained": lambda: of_linen(linen.BatchNorm(True), "x"),
    "nnx convolution": lambda: of_nnx(lambda rngs: nnx.Conv(2, 3, (3, 3), rngs=rngs), "image"),
    "nnx embedding": lambda: of_nnx(lambda rngs: nnx.Embed(10, 4, rngs=rngs), "words"),
    "nnx layer norm": lambda: of_nnx(lambda rngs: nnx.LayerNorm(4, rngs=rngs), "x"),
    "nnx rms norm": lambda: of_nnx(lambda rngs: nnx.RMSNorm(4, rngs=rngs), "x"),
    "nnx group norm": lambda: of_nnx(
        lambda rngs: nnx.GroupNorm(2, num_groups=2, rngs=rngs), "image"
    ),
    "nnx attention": lambda: masked_heads(nnx.Rngs(0)),
    "nnx decoding": lambda: decoding,
    "nnx lora": lambda: of_nnx(lambda rngs: nnx.LoRA(4, 2, 3, rngs=rngs), "x"),
    "nnx dropout": lambda: (
        lambda b, w, k: (nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=k))(b["x"]) @ w).mean()
    ),
    "equinox mlp": lambda: of_equinox(eqx.nn.MLP(4, 3, 8, 2, key=KEY), "x"),
    "equinox convolution": lambda: of_images(eqx.nn.Conv2d(2, 3, 3, key=KEY)),
    "equinox transposed": lambda: of_images(eqx.nn.ConvTranspose2d(2, 3, 3, key=KEY)),
    "equinox pooling": lambda: of_images(eqx.nn.AdaptiveAvgPool2d((3, 3))),
    "equinox group norm": lambda: of_images(eqx.nn.GroupNorm(2, 2)),
    "equinox gru": lambda: equinox_cell(eqx.nn.GRUCell(4, 3, key=KEY)),
    "equinox rotary": lambda: of_equinox(eqx.nn.RotaryPositionalEmbedding(4), "sequence"),
    "equinox dropout": lambda: equinox_dropout,
    "haiku mlp": lambda: of_haiku(lambda x: hk.nets.MLP([8, 3])(x), "x"),
    "haiku lstm": lambda: of_haiku(lambda x: unrolled(hk.LSTM(5))(x), "sequence"),
    "haiku convolution": lambda: of_haiku(lambda x: hk.Conv2D(3, 3)(x), "image"),
    "haiku attention": lambda: of_haiku(attending, "sequence"),
    "haiku layer norm": lambda: of_haiku(lambda x: hk.LayerNorm(-1, True, True)(x), "x"),
    "haiku pooling": lambda: of_haiku(
        lambda x: hk.max_pool(x, (2, 2, 1), (2, 2, 1), "SAME"), "image"
    ),
    "haiku dropout": lambda: of_haiku(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x), "x"),
    "haiku scan of layers": lambda: of_haiku(
        lambda x: hk.experimental.layer_stack(3)(lambda x: jnp.tanh(hk.Linear(4)(x)))(x), "x"
    ),
    "keras dense": lambda: of_keras(layers.Dense(3, "gelu"), "x"),
    "keras convolution": lambda: of_keras(layers.SeparableConv2D(3, 3), "image"),
    "keras transposed": lambda: of_keras(layers.Conv2DTranspose(3, 3), "image"),
    "keras layer norm": lambda: of_keras(layers.LayerNormalization(), "x"),
    "keras group norm": lambda: of_keras(layers.GroupNormalization(2), "image"),
    "keras lstm": lambda: of_keras(layers.LSTM(5), "sequence"),
    "keras both ways": lambda: of_keras(layers.Bidirectional(layers.GRU(5)), "sequence"),
    "keras embedding": lambda: of_keras(layers.Embedding(10, 4), "words"),
    "keras pooling": lambda: of_keras(layers.MaxPooling2D(), "image"),
    "keras dropout": keras_dropout,
    "keras attention": keras_heads,
    "keras batch norm, trained": lambda: of_keras(layers.BatchNormalization(), "x"),
    "keras entropy": lambda: (
        lambda b, w, k: keras.losses.SparseCategoricalCrossentropy(True)(b["y"], b["x"] @ w)
    ),
    "keras squares of sequences": lambda: (
        lambda b, w, k: keras.losses.MeanSquaredError()(b["sequence"], b["sequence"] @ w)
    ),
}


def linen_batch_norm() -> Loss:
    module = linen.BatchNorm(use_running_average=False)
    variables = module.init(KEY, ONE["x"])
    apply = lambda x: module.apply(variables, x, mutable=["batch_stats"])[0]
    return lambda b, w, k: (apply(b["x"] @ w) ** 2).mean()


def haiku_batch_norm() -> Loss:
    net = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True))
    params, state = net.init(KEY, ONE["x"])
    return lambda b, w, k: (net.apply(params, state, k, b["x"] @ w)[0] ** 2).mean()


def nnx_batch_norm() -> Loss:
    return lambda b, w, k: (nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))(b["x"] @ w) ** 2).mean()


def keras_batch_norm() -> Loss:
    return of_keras(layers.BatchNormalization(), "x", training=True)


# Their layer, and the function of this file that calls it.
COMPARED = {
    "flax/linen/normalization.py": (linen_batch_norm, "apply = lambda"),
    "flax/nnx/nn/normalization.py": (nnx_batch_norm, "nnx.BatchNorm"),
    "haiku/_src/batch_norm.py": (haiku_batch_norm, "lambda x: hk.BatchNorm"),
    "backend/jax/nn.py": (keras_batch_norm, "call = lambda"),
}


@pytest.mark.parametrize("name", MEANS)
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
