"""The proof: passes where many shards train as one does, and fails where they do not."""

import dataclasses
import itertools
from typing import Any

import pytest

from examples.byte_lm import job as jobs
from examples.byte_lm.job import Job, prepare
from examples.byte_lm.model import ByteTransformer, loss
from examples.byte_lm.optimizers import make_optimizer
from examples.byte_lm.options import parse_groups
from examples.byte_lm.proof import Batch, Comparison, compare, verify
from tests.examples.byte_lm.small import small_options
from tests.quick import deep


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
    return compare(judged_as or job, batches_of(job), training.values(), skipped)


@pytest.mark.parametrize(
    ("optimizer", "groups", "reduction", "relative"),
    [
        ("sgd", "4x1", "mean", 1e-5),
        *map(
            deep,
            [
                ("adam", "1x4", "mean", 1e-3),
                ("polyak_sgd", "[[0,3],[1,2]]", "sum", 1e-4),
            ],
        ),
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


@pytest.mark.deep
@pytest.mark.parametrize(
    ("groups", "reduction", "options"),
    [
        ("1x4", "mean", {}),
        ("[[0,3],[1,2]]", "sum", {"accumulate_steps": 2}),
        ("1x4", "mean", {"weight": True, "batch": 10, "weight_update": "sharded"}),
        ("1x4", "mean", {"wrt": "*kernel", "master_dtype": "float32", "loss_scale": "dynamic"}),
    ],
)
def test_the_step_is_verified_with_sgd(job, groups, reduction, options):
    found = verify(
        prepare(
            dataclasses.replace(
                job.options,
                out=job.options.out / "again",
                groups=groups,
                reduction=reduction,
                **options,
            )
        )
    )
    assert found.ok, found
    assert found.num_shards == 4


def test_one_shard_is_not_verified(job):
    options = dataclasses.replace(job.options, shards=1, groups=None)
    assert verify(prepare(options)) is None


def test_gradients_that_are_not_reduced_are_found(job):
    assert not of_run(change(job, "adam", "4x1", "mean"), judged_as=job).same


def summed_loss(model: ByteTransformer, batch: Batch) -> tuple[Any, Any]:
    """The sum over the rows, of which a mean over shards is another one."""
    mean, aux = loss(model, batch)
    return len(batch["read"]) * mean, aux


@pytest.mark.deep
def test_sgd_finds_a_wrong_factor_that_adam_hides(job, monkeypatch):
    monkeypatch.setattr(jobs, "loss", summed_loss)
    job = dataclasses.replace(job)  # without its step
    assert of_run(job).same
    found = verify(job)
    assert not found.ok
    assert found.faults[0].ratio == pytest.approx(1 / 4, rel=1e-3)
