"""The files of the page on Slurm, Kubernetes and Ray: they fit together, and runs come back."""

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from crossshard.distributed.job import Job, find_job
from tests.distributed.jobs import launch

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "engines.md"
PATIENCE = 240


def file_of(language: str) -> str:
    """The first block of the page in a language."""
    return re.search(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]


def test_the_jobset_is_one_and_its_variables_are_those_of_a_job(monkeypatch: pytest.MonkeyPatch):
    jobset = yaml.safe_load(file_of("yaml"))
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]

    # Kubernetes numbers the pods of an Indexed Job, and JobSet names them.
    number = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == number
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    name = jobset["metadata"]["name"]
    variables = {each["name"]: each for each in container["env"]}
    given = {name: each["value"] for name, each in variables.items() if "value" in each}
    own = variables["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert own == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert variables["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert 'bind=os.environ.get("POD_IP")' in file_of("python")
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    for key, value in {**given, "JAX_PROCESS_ID": "1"}.items():
        monkeypatch.setenv(key, value)
    first = f"{name}-{replicated['name']}-0-0.{name}"
    assert find_job(1) == Job(number, 1, f"{first}:8476", None, "environment variables")

    # A container that is started again finds its memory, which must fit.
    assert pod["spec"]["restartPolicy"] == "OnFailure"
    assert job["spec"]["backoffLimit"] > 10 * number
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert mounted.keys() == volumes.keys()
    assert volumes["memory"]["emptyDir"]["medium"] == "Memory"
    of = lambda text: int(re.fullmatch(r"(\d+)Gi", text)[1])
    size = of(volumes["memory"]["emptyDir"]["sizeLimit"])
    assert size < of(container["resources"]["limits"]["memory"])
    _, script, folder, memory, steps = container["command"]
    assert (script, int(steps)) == ("train.py", 10_000)
    assert Path(folder).parent == Path(mounted["checkpoints"])
    assert Path(memory).parent == Path(mounted["memory"])


def test_the_batch_script_asks_for_what_the_page_says():
    script = file_of("bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", script, re.MULTILINE))
    # One task for each GPU, and the signal to the tasks: `B:` would keep it from them.
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert re.fullmatch(r"TERM@\d+", asked["signal"])
    assert {"requeue", "open-mode"} <= asked.keys()
    # What one attempt leaves in memory, the next one finds.
    assert "/dev/shm/mine-$SLURM_JOB_ID" in script


# Slurm's part, of which there is none here: two tasks, and a queue that only notes what it is told.
SRUN = f"""#!/bin/sh
[ "$1" = --kill-on-bad-exit=1 ] && shift
[ "$1" = python ] && shift
echo $$ >> attempts
exec {sys.executable} -m crossshard.tools.cli launch -n 2 --cpu-devices 1 -- {sys.executable} "$@"
"""
SCONTROL = """#!/bin/sh
echo "$@" >> requeued
"""


def hashes(folder: Path, number: int) -> list[str]:
    """What a checkpoint says of the bits of each array."""
    manifest = json.loads((folder / f"{number:08}" / "manifest" / "manifest.json").read_text())
    return [leaf["hash"] for leaf in manifest["leaves"]]


def wait_for(what: Any, running: subprocess.Popen[Any]) -> None:
    """Wait until a function returns something, while this process runs."""
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until
        assert running.poll() is None
        time.sleep(0.02)


def kill_the_writer(folder: Path, running: subprocess.Popen[Any]) -> int:
    """Kill process 0, by what it says of itself, once it has saved; return when it last did."""
    saved = lambda: [int(each.name) for each in folder.glob("[0-9]" * 8)]
    wait_for(saved, running)
    os.kill(json.loads((folder / "writer.json").read_text())["process"], signal.SIGKILL)
    return max(saved())


# Enough that a fast machine is stopped before it comes to the end.
STEPS = 3000


@pytest.mark.deep
@pytest.mark.multiprocess
def test_the_batch_script_begins_again_from_memory_and_from_the_queue(tmp_path: Path):
    (tmp_path / "train.py").write_text(file_of("python"))
    memory = tmp_path / "shm-41"
    script = file_of("bash").replace("/dev/shm/mine", str(tmp_path / "shm"))
    (tmp_path / "train.sbatch").write_text(script.replace(" 10000", f" {STEPS}"))
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    environment |= {"SLURM_JOB_ID": "41", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def begin() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            words = ["bash", "train.sbatch"]
            return subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=log, stderr=log)

    def attempts() -> list[int]:
        with contextlib.suppress(OSError):
            return list(map(int, (tmp_path / "attempts").read_text().split()))
        return []

    folder = tmp_path / "runs" / "mine"
    running = begin()
    saved = kill_the_writer(folder, running)
    wait_for(lambda: len(attempts()) == 2, running)
    # The second attempt has gone on, and is told that the time is over.
    wait_for(lambda: (folder / f"{saved + 100:08}").exists(), running)
    os.kill(attempts()[-1], signal.SIGTERM)
    assert running.wait(PATIENCE) == 0, (tmp_path / "log").read_text()[-3000:]
    assert (tmp_path / "requeued").read_text() == "requeue 41\n"
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700
    running = begin()
    assert running.wait(PATIENCE) == 0, (tmp_path / "log").read_text()[-3000:]
    assert len(attempts()) == 3
    quiet = tmp_path / "quiet"
    words = [tmp_path / "train.py", quiet, tmp_path / "other", STEPS]
    ran = launch("-n", 2, "--cpu-devices", 1, "--", sys.executable, *words)
    _, said = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0, said
    assert hashes(folder, STEPS) == hashes(quiet, STEPS)
