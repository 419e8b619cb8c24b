"""The model: looks back and never ahead, starts at eight bits a byte, has a million parameters."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from crossshard.errors import ArgumentError
from examples.byte_lm.model import ByteTransformer, loss
from examples.byte_lm.options import TrainOptions

logits_of = nnx.jit(lambda net, read: net(read))


@functools.cache
def model(layers: int = 2, width: int = 64) -> ByteTransformer:
    return ByteTransformer(layers=layers, width=width, rngs=nnx.Rngs(0))


def test_a_byte_changes_what_follows_it_and_nothing_before():
    net = model()
    read = np.random.default_rng(0).integers(0, 256, (3, 12), np.uint8)
    changed = read.copy()
    changed[:, 7] ^= 1
    before, after = (np.asarray(logits_of(net, each)) for each in (read, changed))
    assert before.shape == (3, 12, 256)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (np.abs(before[:, 7:] - after[:, 7:]).max(axis=(0, 2)) > 1e-6).all()


def test_places_in_a_row_are_told_apart():
    read = np.full((1, 8), ord("a"), np.uint8)
    read[0, 0] = ord("b")
    logits = np.asarray(logits_of(model(), read))[0]
    assert np.abs(logits[3] - logits[6]).max() > 1e-4


def test_the_default_model_has_a_million_float32_parameters():
    sizes = {"layers": TrainOptions().layers, "width": TrainOptions().width}
    abstract = nnx.eval_shape(lambda: ByteTransformer(**sizes, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(abstract))
    assert 0.9e6 < sum(leaf.size for leaf in leaves) < 1.1e6
    assert {leaf.dtype for leaf in leaves} == {np.dtype("float32")}


def test_the_first_model_knows_nothing():
    rows = np.random.default_rng(0).integers(0, 256, (4, 65), np.uint8)
    mean, sums = nnx.jit(loss)(model(), {"read": rows[:, :-1], "wanted": rows[:, 1:]})
    assert float(mean) == pytest.approx(np.log(256), rel=0.02)
    assert float(sums["bytes"]) == 4 * 64


@pytest.mark.parametrize(("layers", "width", "names"), [(0, 32, "layer"), (1, 48, "32.*48")])
def test_sizes_that_cannot_be_are_refused(layers, width, names):
    with pytest.raises(ArgumentError, match=names):
        model(layers, width)
