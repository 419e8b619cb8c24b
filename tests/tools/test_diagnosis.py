"""`doctor`: right sums pass, wrong ones are named, and so is what looks wrong with the job."""

import dataclasses
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import crossshard
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools import diagnosis
from tests.tools.command import AS_MODULE, Ended, process


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No settings but those of the test."""
    jax.devices()  # with the suite's own
    for name in os.environ:
        if name.startswith(("JAX_", "XLA_", "SLURM", "OMPI", "PMI", "GLIBC")):
            monkeypatch.delenv(name)
    return monkeypatch


def said(found: crossshard.tools.Diagnosis) -> list[tuple[str, str]]:
    return [(each.kind, each.sentence) for each in found.findings]


# The sums.


def test_sums_of_each_size_are_right():
    found = crossshard.doctor(sizes=(4_000, 100_000))
    assert found.ok, found.findings
    assert [(each.kind, each.right) for each in found.tests] == [("all-reduce", True)] * 2
    # By hand, for 8 devices: each sends 7/8 of the array, twice for a sum that all get.
    assert [each.bytes_sent for each in found.tests] == [7000, 175_000]
    assert [each.size for each in found.tests] == [4_000, 100_000]
    assert all(each.bandwidth == each.bytes_sent / each.seconds for each in found.tests)
    assert found.devices == dataclasses.replace(
        found.devices, platform="cpu", number=8, local=8, processes=1, process=0
    )
    versions = found.versions["jax"], found.versions["crossshard"]
    assert versions == (jax.__version__, crossshard.__version__)
    assert json.loads(found.to_json())["tests"][0]["kind"] == "all-reduce"
    assert "all-reduce  4.00 kB  7.00 kB" in str(found)
    assert str(found).endswith("Nothing looks wrong.")


_psum = lax.psum
WRONG = {
    "not summed": lambda x, axis: x,
    "rounded to 16 bits": lambda x, axis: _psum(x.astype(jnp.bfloat16), axis).astype(x.dtype),
    "on shard 5": lambda x, axis: _psum(x, axis) + jnp.where(lax.axis_index(axis) == 5, 1, 0),
    "another shard's": lambda x, axis: _psum(jnp.where(lax.axis_index(axis) == 3, 0, x), axis),
}


def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch):
    for name, psum in WRONG.items():
        monkeypatch.setattr(lax, "psum", psum)
        found = crossshard.doctor(sizes=[4_000])
        ((kind, sentence),) = said(found)
        assert (kind, [each.right for each in found.tests]) == ("wrong values", [False]), name
        assert "The all-reduce of 4.00 kB is wrong" in sentence
        assert "WRONG" in str(found)
        assert name != "on shard 5" or name in sentence


def test_float32_has_room_for_the_sums_on_every_number_of_shards():
    for shards in (1, 2, 8, 1000, 4096, 60_000):
        numbers, marks = diagnosis._test_values(100_000, shards)
        total = shards * numbers + marks.sum()
        assert total.max() <= 2**24
        assert np.array_equal(total.astype(np.float32), total)


@pytest.mark.deep
def test_what_does_not_end_or_fails_is_named(plain: pytest.MonkeyPatch):
    sums = diagnosis._all_reduce

    def hangs(mesh: Any, length: int) -> Any:
        return sums(mesh, length) if length == 100 else time.sleep(3)

    plain.setattr(diagnosis, "_all_reduce", hangs)
    found = crossshard.doctor(sizes=(400, 4_000, 8_000), timeout=2)
    assert found.stuck
    assert said(found) == [("stuck", "The all-reduce of 4.00 kB has not ended in 2 seconds.")]
    assert [each.size for each in found.tests] == [400]

    def fails(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: no route\nmore")

    plain.setattr(diagnosis, "_all_reduce", fails)
    sentence = "The all-reduce of 4.00 kB failed: UNAVAILABLE: no route."
    assert said(crossshard.doctor(sizes=[4_000])) == [("failed", sentence)]
    plain.setattr(diagnosis, "_find_devices", fails)
    for platforms, named in (("cuda", " with JAX_PLATFORMS=cuda"), ("", "")):
        plain.setenv("JAX_PLATFORMS", platforms)
        found = crossshard.doctor()
        assert (found.devices, found.tests) == (None, ())
        sentence = f"The start of JAX{named} failed: UNAVAILABLE: no route."
        assert said(found) == [("start", sentence)]
    # A coordinator that is gone.
    plain.setattr(diagnosis._jax, "kv_get_dir", fails)
    assert diagnosis._describe_missing(3, processes=1) == ""
    assert diagnosis._describe_missing(3, processes=2) == ", and the coordinator does not answer"


def test_refusals_and_no_self_test_at_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diagnosis, "_test_all_reduce", None)
    for options, error, words in (
        ({"sizes": 4_000}, ArgumentTypeError, "sizes must be a sequence of bytes"),
        ({"sizes": ("4 MB",)}, ArgumentTypeError, "sizes must be a number; got '4 MB'"),
        ({"timeout": 0}, ArgumentError, "timeout must be above 0; got 0"),
    ):
        with pytest.raises(error, match=words):
            crossshard.doctor(**options)
    assert crossshard.doctor(self_test=False).tests == ()


# Threads, and the job.


def test_threads_that_deadlock(plain: pytest.MonkeyPatch):
    assert not diagnosis._mesh(8)[1]
    plain.setenv("NPROC", "4")
    for _ in range(2):  # again, though the mesh is there already
        (finding,) = diagnosis._mesh(8)[1]
        assert "set NPROC=32" in finding.sentence


JOB = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
JOBS: list[tuple[dict[str, str], str, str]] = [
    ({}, "", ""),
    ({"WORLD_SIZE": "1"}, "", ""),
    # It is not joined here.
    (JOB, "alone", "Call crossshard.distributed.initialize()"),
    (JOB | {"JAX_COORDINATOR_ADDRESS": "10.1.2.3:1234"}, "alone", "says that 2 processes train"),
    ({"JAX_NUM_PROCESSES": "2"}, "job", "JAX_NUM_PROCESSES is set, but JAX_COORDINATOR"),
    ({"WORLD_SIZE": "4"}, "job", "WORLD_SIZE=4 says that there are several processes"),
    (JOB | {"JAX_PROCESS_ID": "two"}, "job", "JAX_PROCESS_ID must be a number from 0"),
    (JOB | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "job", "must be host:port"),
]


@pytest.mark.parametrize(("environment", "kind", "words"), JOBS)
def test_what_is_found_of_a_job(environment, kind, words, plain: pytest.MonkeyPatch):
    for name, value in environment.items():
        plain.setenv(name, value)
    found = crossshard.doctor(self_test=False)
    assert [each.kind for each in found.findings] == [kind] * bool(kind)
    assert words in str(found)
    if environment is JOB:
        row = "2, from environment variables; this is 1, not connected, at 127.0.0.1:1234"
        assert row in str(found)


def test_a_cluster_whose_own_service_fails(plain: pytest.MonkeyPatch):
    def refuse(seconds: float) -> None:
        raise RuntimeError("403 Forbidden\nfor this account")

    plain.setattr(diagnosis, "find_job", refuse)
    job, (finding,) = diagnosis._find_job(5, meet=False)
    assert (job.num_processes, finding.kind) == (1, "job")
    assert finding.sentence == (
        "JAX cannot tell the job: 403 Forbidden. Set JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID."
    )


# The command, in interpreters and jobs of its own.

DOCTOR = (*AS_MODULE, "doctor")


def run(*words: str, job: tuple[int, int] | None = None, **environment: str) -> Ended:
    """The command, in a job of so many processes and CPU devices of each if ``job`` says so."""
    dropped = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and "proxy" not in k}
    command = words if words[0] == "sh" else (*DOCTOR, *words)
    if job is not None:
        launch = (*AS_MODULE, "launch", "-n", str(job[0]), "--cpu-devices", str(job[1]))
        command = (*launch, "--grace", "1", "--", *command)
    return process(Path.cwd(), command=command, env=kept | environment)


def test_a_machine_that_is_fine():
    ran = run("--devices", "2", "--json", "--sizes", "4000")
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    found = json.loads(ran.stdout)
    assert found["ok"]
    assert found["devices"]["number"] == 2
    assert [(each["size"], each["right"]) for each in found["tests"]] == [(4000, True)]


def test_what_is_wrong_at_once():
    words = ("--json", "--no-self-test")
    ran = run(*words, JAX_NUM_CPU_DEVICES="8", NPROC="4", WORLD_SIZE="4")
    assert (ran.returncode, ran.stderr) == (1, ""), ran
    found = json.loads(ran.stdout)
    assert [each["kind"] for each in found["findings"]] == ["job", "threads"]
    assert found["settings"]["JAX_NUM_CPU_DEVICES"] == "8"


@pytest.mark.deep
def test_where_jax_does_not_start_and_what_xla_says_before_it_ends_the_process():
    ran = run("--no-self-test", JAX_PLATFORMS="no_such_platform")
    assert (ran.returncode, ran.stderr) == (1, ""), ran
    for part in (
        "devices    none",
        "One thing looks wrong:",
        "The start of JAX with JAX_PLATFORMS=no_such_platform failed: ",
    ):
        assert part in ran.stdout
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        ran = run("--no-self-test", JAX_PLATFORMS="cuda")
        assert ran.returncode == 1, ran
        assert "JAX has no plugin for a platform. Install it, such as by" in ran.stdout
    ran = run("--no-self-test", XLA_FLAGS="--xla_no_such_flag=1")
    assert ran.returncode == 1, ran
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in ran.stderr


@pytest.mark.deep
@pytest.mark.multiprocess
def test_a_job_that_is_fine():
    ran = run("--sizes", "4000", "1000000", job=(2, 2))
    assert ran.returncode == 0, ran
    lines = [line for line in ran.stdout.splitlines() if line.startswith("[0] ")]
    assert any("4 × cpu, 2 of this process" in line for line in lines)
    assert any("2, from environment variables; this is 0, connected" in line for line in lines)
    assert sum(line.endswith(" right") for line in lines) == 2
    assert lines[-1] == "[0] Nothing looks wrong."
    # Only the first has said anything.
    assert len(lines) == len(ran.stdout.splitlines())


STANDS = (
    "from crossshard.tools import diagnosis as d; d._all_reduce = "
    "lambda *a: os.kill(os.getpid(), signal.SIGSTOP); crossshard.doctor(sizes=[4000])"
)


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import jax; jax.devices(); time.sleep(60)", ": process 1 has not entered it."),
        (STANDS, ", and all processes have entered it: one of them stands still"),
    ],
    ids=["does not come", "stands still"],
)
def test_a_process_that_others_wait_for_is_named(script: str, says: str):
    # The command in process 0, and in process 1 something else.
    joins = f"import os, signal, time, crossshard; crossshard.distributed.initialize(); {script}"
    shell = f'[ "$JAX_PROCESS_ID" = 1 ] && exec {AS_MODULE[0]} -c "$1"; shift; exec "$@"'
    doctor = [*DOCTOR, "--timeout", "8", "--sizes", "4000"]
    ran = run("sh", "-c", shell, "sh", joins, *doctor, job=(2, 1))
    assert ran.returncode == 1, ran
    assert f"The all-reduce of 4.00 kB has not ended in 8 seconds{says}" in ran.stdout


@pytest.mark.deep
@pytest.mark.multiprocess
def test_processes_that_do_not_meet():
    address = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:61009", "JAX_NUM_PROCESSES": "2"}
    ran = run("--timeout", "2", JAX_PROCESS_ID="1", **address)
    assert (ran.returncode, ran.stderr) == (1, ""), ran
    assert "Process 1 of 2 did not meet the others at 127.0.0.1:61009 in 2 seconds: " in ran.stdout
