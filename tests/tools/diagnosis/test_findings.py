"""What looks wrong, one situation at a time; what this machine lacks is put in its place."""

import os

import jax
import pytest

import crossshard
from crossshard.tools.diagnosis import doctor as diagnosis
from crossshard.tools.diagnosis.doctor import Finding


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No settings but those of the test."""
    jax.devices()  # with the suite's own
    for name in os.environ:
        if name.startswith(("JAX_", "XLA_", "SLURM", "OMPI", "PMI", "GLIBC")):
            monkeypatch.delenv(name)
    return monkeypatch


def sentences(found: object) -> str:
    return "\n".join(f"{each.kind}: {each.sentence}" for each in found)


# Versions.


def test_versions():
    found = diagnosis._installed()
    assert (found["jax"], found["crossshard"]) == (jax.__version__, crossshard.__version__)


# Devices.


def test_platforms_that_are_not_here(plain: pytest.MonkeyPatch):
    def fail() -> None:
        raise RuntimeError("Unknown backend: 'cuda'.\nmore")

    plain.setattr(diagnosis, "_look", fail)
    for platforms, named in (("cuda", " with JAX_PLATFORMS=cuda"), ("", "")):
        plain.setenv("JAX_PLATFORMS", platforms)
        found = crossshard.doctor()
        assert (found.devices, found.tests) == (None, ())
        assert sentences(found.findings) == (
            f"start: The start of JAX{named} failed: Unknown backend: 'cuda'."
        )


def test_threads_that_deadlock(plain: pytest.MonkeyPatch):
    assert not diagnosis._mesh(8)[1]
    plain.setenv("NPROC", "4")
    assert "set NPROC=32" in sentences(diagnosis._mesh(8)[1])
    # Again, though the mesh is there already.
    assert "set NPROC=32" in sentences(diagnosis._mesh(8)[1])


# The job.

JOB = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
ELSEWHERE = JOB | {"JAX_COORDINATOR_ADDRESS": "10.1.2.3:1234"}


def found_in(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return diagnosis._find(5, meet=False)[1]


RIGHT = [
    *({}, JOB, ELSEWHERE, {"WORLD_SIZE": "1"}),
]


@pytest.mark.parametrize("environment", RIGHT)
def test_jobs_that_are_right(environment: dict[str, str], plain: pytest.MonkeyPatch):
    found = found_in(environment, plain)
    # It is not joined here.
    assert [each.kind for each in found] == ["alone"] * ("JAX_PROCESS_ID" in environment)


@pytest.mark.parametrize(
    ("environment", "kind", "says"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "job", "JAX_NUM_PROCESSES is set, but JAX_COORDINATOR"),
        ({"WORLD_SIZE": "4"}, "job", "WORLD_SIZE=4 says that there are several processes"),
        (JOB | {"JAX_PROCESS_ID": "two"}, "job", "JAX_PROCESS_ID must be a number from 0"),
        (JOB | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "job", "must be host:port"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_jobs_that_are_wrong(
    environment: dict[str, str], kind: str, says: str, plain: pytest.MonkeyPatch
):
    (finding,) = found_in(environment, plain)
    assert finding.kind == kind
    assert says in finding.sentence


def test_a_cluster_whose_own_service_fails(plain: pytest.MonkeyPatch):
    def refuse(seconds: float) -> None:
        raise RuntimeError("403 Forbidden\nfor this account")

    plain.setattr(diagnosis, "find_job", refuse)
    job, found = diagnosis._find(5, meet=False)
    assert job.num_processes == 1
    assert sentences(found) == (
        "job: JAX cannot tell the job: 403 Forbidden. Set JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID."
    )


def test_a_job_that_is_described_and_not_joined(plain: pytest.MonkeyPatch):
    for name, value in JOB.items():
        plain.setenv(name, value)
    found = crossshard.doctor(self_test=False)
    assert [each.kind for each in found.findings] == ["alone"]
    assert "Call crossshard.distributed.initialize()" in found.findings[0].sentence
    assert "2, from environment variables; this is 1, not connected, at 127.0.0.1:1234" in str(
        found
    )
