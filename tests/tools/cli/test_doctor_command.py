"""`crossshard doctor` in interpreters and jobs of its own: words, JSON, exit codes, no hanging."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossshard.tools.cli import main

DOCTOR = [sys.executable, "-m", "crossshard.tools.cli", "doctor"]


def run(
    *words: str, job: tuple[int, int] | None = None, path: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command, in a job of so many processes and CPU devices of each if ``job`` says so."""
    dropped = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and "proxy" not in k}
    before = [path, str(Path(__file__).parents[3] / "src"), kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, before))
    command = [*words] if words[0] == "sh" else [*DOCTOR, *words]
    if job is not None:
        launch = [sys.executable, "-m", "crossshard.tools.cli", "launch", "-n", str(job[0])]
        command = [*launch, "--cpu-devices", str(job[1]), "--grace", "1", "--", *command]
    return subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, timeout=240
    )


def test_a_machine_that_is_fine():
    ran = run("--devices", "2", "--json", "--sizes", "4000")
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    found = json.loads(ran.stdout)
    assert found["ok"]
    assert (found["devices"]["number"], found["mesh"]) == (2, {"shards": 2})
    assert [each["size"] for each in found["tests"]] == [4000]
    assert all(each["right"] for each in found["tests"])


def test_what_is_wrong_at_once():
    words = ("--json", "--no-self-test")
    ran = run(*words, JAX_NUM_CPU_DEVICES="8", NPROC="4", WORLD_SIZE="4")
    assert (ran.returncode, ran.stderr) == (1, ""), ran
    found = json.loads(ran.stdout)
    assert [each["kind"] for each in found["findings"]] == ["job", "threads"]
    assert found["settings"]["JAX_NUM_CPU_DEVICES"] == "8"


@pytest.mark.deep
def test_platforms_with_which_jax_does_not_start():
    ran = run("--no-self-test", JAX_PLATFORMS="no_such_platform")
    assert (ran.returncode, ran.stderr) == (1, ""), ran
    assert "devices    none" in ran.stdout
    assert "One thing looks wrong:" in ran.stdout
    assert "The start of JAX with JAX_PLATFORMS=no_such_platform failed: " in ran.stdout


@pytest.mark.deep
def test_what_xla_says_before_it_ends_the_process_is_seen():
    ran = run("--no-self-test", XLA_FLAGS="--xla_no_such_flag=1")
    assert ran.returncode == 1, ran
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in ran.stderr


def test_it_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--timeout", "0"]) == 2
    assert main(["doctor", "--sizes", "-1"]) == 2
    assert main(["doctor", "--devices", "0"]) == 2
    assert "timeout must be above 0" in capsys.readouterr().err


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
    "from crossshard.tools.diagnosis import doctor as d; d._all_reduce = "
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
    ran = run(*instead(script), job=(2, 1))
    assert ran.returncode == 1, ran
    assert f"The all-reduce of 4.00 kB has not ended in 8 seconds{says}" in ran.stdout


def instead(script: str) -> list[str]:
    """The command in process 0, and in process 1 something else."""
    joins = f"import os, signal, time, crossshard; crossshard.distributed.initialize(); {script}"
    shell = f'[ "$JAX_PROCESS_ID" = 1 ] && exec {sys.executable} -c "$1"; shift; exec "$@"'
    doctor = [*DOCTOR, "--timeout", "8", "--sizes", "4000"]
    return ["sh", "-c", shell, "sh", joins, *doctor]


@pytest.mark.deep
@pytest.mark.multiprocess
def test_processes_that_do_not_meet():
    address = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:61009", "JAX_NUM_PROCESSES": "2"}
    ran = run("--timeout", "2", JAX_PROCESS_ID="1", **address)
    assert (ran.returncode, ran.stderr) == (1, ""), ran
    assert "Process 1 of 2 did not meet the others at 127.0.0.1:61009 in 2 seconds: " in ran.stdout
