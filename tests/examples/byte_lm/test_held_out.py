"""Held-out bits per byte: every byte counted once, whatever the groups; beside what gzip needs."""

import gzip
import math

import numpy as np
import pytest
from flax import nnx

from examples.byte_lm.groups import Groups
from examples.byte_lm.held_out import HeldOut, gzip_bits_per_byte
from examples.byte_lm.model import ByteTransformer, nats

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8)
GROUPS = {
    "eight together": (tuple(range(8)),),
    "two crossed": ((0, 3), (2, 1)),
    "three alone": ((0,), (1,), (2,)),
}


def by_hand(model: ByteTransformer, text: np.ndarray, context: int) -> float:
    """Row by row, without padding or shards."""
    before = np.concatenate([np.frombuffer(b"\n", np.uint8), text[:-1]])
    cost = 0.0
    for first in range(0, len(text), context):
        row = slice(first, first + context)
        cost += float(np.asarray(nats(model, before[None, row], text[None, row])).sum())
    return cost / len(text) / math.log(2)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_every_group_predicts_every_byte_once(groups):
    model = ByteTransformer(layers=1, width=32, rngs=nnx.Rngs(0))
    # Sharper than at the start, so that a byte left out would show.
    model.head.kernel.set_value(model.head.kernel.get_value() * 50)
    text = TEXT[:997]
    found = HeldOut(text, 10, Groups(groups)).bits_per_byte(model)
    assert found == pytest.approx([by_hand(model, text, 10)] * len(groups), rel=1e-5)


def test_the_sample_is_spread_over_the_text():
    model = ByteTransformer(layers=1, width=32, rngs=nnx.Rngs(0))
    held_out = HeldOut(TEXT, 4, Groups(((0, 1),)))
    (whole,), (sample,) = held_out.bits_per_byte(model), held_out.bits_per_byte(model, sample=True)
    assert sample != whole
    assert sample == pytest.approx(whole, rel=0.05)


def test_gzip_counts_all_that_gzip_writes():
    expected = 8 * len(gzip.compress(TEXT.tobytes(), compresslevel=9)) / len(TEXT)
    assert gzip_bits_per_byte(TEXT) == expected
