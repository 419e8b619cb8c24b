"""The proof: passes where many shards take the step of one device, and fails where they do not."""

import dataclasses
from typing import Any

import pytest

from examples.byte_lm import job as jobs
from examples.byte_lm.job import Job, prepare
from examples.byte_lm.model import ByteTransformer, loss
from examples.byte_lm.run import verify
from tests.examples.byte_lm.small import small_options
from tests.quick import deep


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of which others are made, since it takes long to make one."""
    return prepare(small_options(tmp_path_factory.mktemp("proof"), optimizer="adam"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        *map(
            deep,
            [
                {"reduction": "sum", "accumulate_steps": 2},
                {"weight": True, "batch": 10, "weight_update": "sharded"},
                {"wrt": "*kernel", "master_dtype": "float32", "loss_scale": "dynamic"},
            ],
        ),
    ],
)
def test_the_step_is_verified_with_sgd(job: Job, options: dict[str, Any]):
    given = dataclasses.replace(job.options, out=job.options.out / "again", **options)
    found = verify(prepare(given))
    assert found.ok, found
    assert found.num_shards == 4


@pytest.mark.deep
def test_a_wrong_factor_that_adam_hides_is_found(job: Job, monkeypatch: pytest.MonkeyPatch):
    def summed_loss(model: ByteTransformer, batch: Any) -> tuple[Any, Any]:
        """The sum over the rows, of which a mean over shards is another one."""
        mean, aux = loss(model, batch)
        return len(batch["read"]) * mean, aux

    monkeypatch.setattr(jobs, "loss", summed_loss)
    found = verify(dataclasses.replace(job))  # without its step
    assert not found.ok
    assert found.faults[0].ratio == pytest.approx(1 / 4, rel=1e-3)
