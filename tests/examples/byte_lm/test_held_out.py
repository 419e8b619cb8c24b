"""Held-out bits per byte: every byte counted once, whatever the groups; beside what gzip needs."""

import gzip
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from crossshard import CrossShardOptimizer, make_train_step
from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.model import ByteTransformer, loss, nats
from examples.byte_lm.text import gzip_bits_per_byte
from examples.byte_lm.training import Training
from tests.quick import deep

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8)
GROUPS = {
    "eight together": (tuple(range(8)),),
    "two crossed": ((0, 3), (2, 1)),
    "three alone": ((0,), (1,), (2,)),
}

nats_of = nnx.jit(nats)


def by_hand(model: ByteTransformer, text: np.ndarray, context: int) -> float:
    """Row by row, without padding or shards."""
    before = np.concatenate([np.frombuffer(b"\n", np.uint8), text[:-1]])
    cost = 0.0
    for first in range(0, len(text), context):
        row = slice(first, first + context)
        cost += float(np.asarray(nats_of(model, before[None, row], text[None, row])).sum())
    return cost / len(text) / math.log(2)


def training(model: ByteTransformer, groups: Sequence[Sequence[int]], **options: Any) -> Training:
    opt = CrossShardOptimizer(optax.sgd(0.1), group_assignment=groups)
    number = sum(map(len, groups))
    step = make_train_step(loss, opt, num_shards=number, has_aux=True, **options)
    of_groups = tuple(group[0] for group in groups) if len(groups) > 1 else (None,)
    return Training(step, step.init(model), of_groups=of_groups)


@pytest.mark.parametrize(
    ("groups", "weight"),
    [
        ("two crossed", "counts"),
        ("three alone", None),
        *map(
            deep,
            [
                ("eight together", None),
                ("eight together", "counts"),
                ("two crossed", None),
                ("three alone", "counts"),
            ],
        ),
    ],
)
def test_every_group_predicts_every_byte_once(groups, weight):
    groups = GROUPS[groups]
    model = ByteTransformer(layers=1, width=32, rngs=nnx.Rngs(0))
    # Sharper than at the start, so that a byte left out would show.
    model.head.kernel.set_value(model.head.kernel.get_value() * 50)
    text = TEXT[:997]
    found = HeldOut(text, 10).bits_per_byte(training(model, groups, weight=weight))
    assert found == pytest.approx([by_hand(model, text, 10)] * len(groups), rel=1e-5)


def test_the_sample_is_spread_over_the_text():
    model = ByteTransformer(layers=1, width=32, rngs=nnx.Rngs(0))
    held_out, on_two = HeldOut(TEXT, 4), training(model, [[0, 1]])
    (whole,), (sample,) = (held_out.bits_per_byte(on_two, sample=each) for each in (False, True))
    assert sample != whole
    assert sample == pytest.approx(whole, rel=0.05)


def test_gzip_counts_all_that_gzip_writes():
    expected = 8 * len(gzip.compress(TEXT.tobytes(), compresslevel=9)) / len(TEXT)
    assert gzip_bits_per_byte(TEXT) == expected
