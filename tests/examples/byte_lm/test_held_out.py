"""Held-out bits per byte: every byte counted once; beside what gzip needs."""

import gzip
import math

import numpy as np
import optax
import pytest
from flax import nnx

from crossshard import make_train_step
from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.model import ByteTransformer, loss, nats
from examples.byte_lm.text import gzip_bits_per_byte
from examples.byte_lm.training import Training

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8)

nats_of = nnx.jit(nats)


def by_hand(model: ByteTransformer, text: np.ndarray, context: int) -> float:
    """Row by row, without padding or shards."""
    before = np.concatenate([np.frombuffer(b"\n", np.uint8), text[:-1]])
    cost = 0.0
    for first in range(0, len(text), context):
        row = slice(first, first + context)
        cost += float(np.asarray(nats_of(model, before[None, row], text[None, row])).sum())
    return cost / len(text) / math.log(2)


def training(model: ByteTransformer, shards: int, weight: str | None = None) -> Training:
    opt = optax.sgd(0.1)
    step = make_train_step(loss, opt, num_shards=shards, has_aux=True, weight=weight)
    return Training(step, step.init(model))


def test_every_byte_is_predicted_once():
    model = ByteTransformer(layers=1, width=32, rngs=nnx.Rngs(0))
    # Sharper than at the start, so that a byte left out would show.
    model.head.kernel.set_value(model.head.kernel.get_value() * 50)
    text = TEXT[:997]
    found = HeldOut(text, 10).bits_per_byte(training(model, 8, "counts"))
    assert found == pytest.approx(by_hand(model, text, 10), rel=1e-5)


def test_the_sample_is_spread_over_the_text():
    model = ByteTransformer(layers=1, width=32, rngs=nnx.Rngs(0))
    held_out, on_two = HeldOut(TEXT, 4), training(model, 2)
    whole, sample = (held_out.bits_per_byte(on_two, sample=each) for each in (False, True))
    assert sample != whole
    assert sample == pytest.approx(whole, rel=0.05)


def test_gzip_counts_all_that_gzip_writes():
    expected = 8 * len(gzip.compress(TEXT.tobytes(), compresslevel=9)) / len(TEXT)
    assert gzip_bits_per_byte(TEXT) == expected
