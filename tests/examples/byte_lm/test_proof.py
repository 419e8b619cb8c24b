"""The proof: passes where many shards train as one does, and fails where they do not."""

import dataclasses
import itertools
from typing import Any

import optax
import pytest

import crossshard
from examples.byte_lm import job as jobs
from examples.byte_lm.groups import parse_groups
from examples.byte_lm.job import Job, prepare
from examples.byte_lm.optimizers import make_optimizer
from examples.byte_lm.proof import Batch, Comparison, Proof
from tests.examples.byte_lm.small import small_options


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of which others are made, since it takes long to make one."""
    return prepare(small_options(tmp_path_factory.mktemp("proof"), optimizer="adam"))


def change(job: Job, optimizer: str, groups: str, reduction: str) -> Job:
    options = dataclasses.replace(job.options, groups=groups, reduction=reduction)
    return dataclasses.replace(
        job,
        options=options,
        groups=parse_groups(groups),
        inner=make_optimizer(optimizer, None),
    )


def batches_of(job: Job) -> list[Batch]:
    return list(itertools.islice(job.batches(), 3))


def of_run(job: Job, judged_as: Job | None = None) -> Comparison:
    """The comparison that a run of three steps ends with, perhaps as if it were another's."""
    training = job.new_training()
    skipped = [training(batch).get("skipped") for batch in batches_of(job)]
    return Proof(judged_as or job, batches_of(job)).of_run(training.values(), skipped)


@pytest.mark.parametrize(
    ("optimizer", "groups", "reduction", "relative"),
    [
        ("adam", "1x4", "mean", 1e-3),
        ("polyak_sgd", "[[0,3],[1,2]]", "sum", 1e-4),
        ("sgd", "4x1", "mean", 1e-5),
    ],
)
def test_shards_train_as_one_does(job, optimizer, groups, reduction, relative):
    one = of_run(change(job, optimizer, groups, reduction))
    assert one.same
    assert one.relative < relative
    assert one.largest_difference < relative * one.largest_change * 10
    assert one.largest_change > 1e-3
    assert one.where
    assert (one.optimizer, one.steps) == (optimizer, 3)


def test_sgd_is_compared_beside_any_optimizer(job):
    one = Proof(job, batches_of(job)).of_sgd()
    assert one.same
    assert one.optimizer == "sgd"
    assert one.relative < 1e-5


def summed(inner: optax.GradientTransformation, **options: Any) -> crossshard.CrossShardOptimizer:
    return crossshard.CrossShardOptimizer(inner, reduction="sum")


def test_gradients_that_are_not_reduced_are_found(job):
    assert not of_run(change(job, "adam", "4x1", "mean"), judged_as=job).same


def test_sgd_finds_a_wrong_factor_that_adam_hides(job, monkeypatch):
    monkeypatch.setattr(jobs, "CrossShardOptimizer", summed)
    job = dataclasses.replace(job)  # without its step
    assert of_run(job).same
    of_sgd = Proof(job, batches_of(job)).of_sgd()
    assert not of_sgd.same
    # Four shards: three times too much is left over.
    assert of_sgd.relative == pytest.approx(3, rel=0.5)
