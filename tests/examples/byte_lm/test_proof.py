"""The proof: passes where many shards train as one does, and fails where they do not."""

import dataclasses
import itertools
from typing import Any

import pytest

from examples.byte_lm import job as jobs
from examples.byte_lm.job import Job, prepare
from examples.byte_lm.model import ByteTransformer, loss
from examples.byte_lm.optimizers import make_optimizer
from examples.byte_lm.proof import Batch, Comparison, compare, verify
from tests.examples.byte_lm.small import own_loss, small_options


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of which others are made, since it takes long to make one."""
    return prepare(small_options(tmp_path_factory.mktemp("proof"), optimizer="adam"))


def batches_of(job: Job) -> list[Batch]:
    return list(itertools.islice(job.batches(), 3))


def of_run(job: Job) -> Comparison:
    """The comparison that a run of three steps ends with."""
    training = job.new_training()
    skipped = [bool(training(batch).get("skipped")) for batch in batches_of(job)]
    return compare(job, batches_of(job), training.values(), skipped)


def test_shards_train_as_one_does(job: Job):
    given = dataclasses.replace(job.options, optimizer="sgd")
    one = of_run(dataclasses.replace(job, options=given, inner=make_optimizer("sgd", None)))
    assert one.same
    assert one.relative < 1e-5
    assert one.largest_difference < 1e-4 * one.largest_change
    assert one.largest_change > 1e-3
    assert one.where
    assert (one.optimizer, one.steps) == ("sgd", 3)


def test_a_step_that_was_not_taken_is_found_unless_the_run_says_so(job: Job):
    training, (first, second, third) = job.new_training(), batches_of(job)
    for batch in (first, third):
        training(batch)
    found = [
        compare(job, [first, second, third], training.values(), [False, is_skipped, False]).same
        for is_skipped in (False, True)
    ]
    assert found == [False, True]


@pytest.mark.deep
def test_the_step_is_verified_with_sgd(job: Job):
    options = {"weight": True, "batch": 10, "weight_update": "sharded"}
    given = dataclasses.replace(job.options, out=job.options.out / "again", **options)
    found = verify(prepare(given))
    assert found.ok, found
    assert found.num_shards == 4


def test_one_shard_is_not_verified(job: Job):
    assert verify(prepare(dataclasses.replace(job.options, shards=1))) is None


@pytest.mark.deep
def test_sgd_finds_a_wrong_factor_that_adam_hides(job: Job, monkeypatch: pytest.MonkeyPatch):
    def summed_loss(model: ByteTransformer, batch: Any) -> tuple[Any, Any]:
        """The sum over the rows, of which a mean over shards is another one."""
        mean, aux = loss(model, batch)
        return len(batch["read"]) * mean, aux

    monkeypatch.setattr(jobs, "loss", summed_loss)
    own_loss(monkeypatch, jobs)
    job = dataclasses.replace(job)  # without its step
    assert of_run(job).same
    found = verify(job)
    assert not found.ok
    assert found.faults[0].ratio == pytest.approx(1 / 4, rel=1e-3)
