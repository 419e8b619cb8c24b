"""Workers of Ray Train: they find each other, come back when one is killed, and leave nothing."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.jobs import launch
from tests.distributed.test_engines import file_of, hashes, kill_the_writer

ROOT = Path(__file__).parents[2]
PATIENCE = 300

# What workers do, also those of `crossshard launch`. One that is to be killed says so, and waits.
WORK = """
import hashlib, json, os, pathlib, sys, time


def train(config):
    import crossshard, jax, jax.numpy as jnp, numpy as np, optax

    folder, kills = pathlib.Path(config["folder"]), config["kills"]
    job = crossshard.distributed.initialize(stall_timeout=60)
    step = crossshard.make_train_step(
        lambda w, x: jnp.mean((x @ w - 1) ** 2), optax.sgd(0.1, momentum=0.9),
        params="sharded", nonfinite="quarantine",
    )
    params, froms = np.zeros(8, np.float32), folder / f"from-{job.process_id}"
    with crossshard.Checkpoints(folder / "disk", step, **config["options"]) as checkpoints:
        found = checkpoints.restore_latest(step.abstract_init(params))
        state, data = found or (step.init(params), {"batch": 0})
        with froms.open("a") as file:
            print(data["batch"], job.found_in, job.coordinator_address, file=file)
        for batch in range(data["batch"], 20):
            x = np.random.default_rng(batch).normal(size=(4, 8)).astype(np.float32)
            if kills.get(batch) == job.process_id and not (folder / f"kill-{batch}").exists():
                checkpoints.wait()
                (folder / "pid").write_text(str(os.getpid()))
                (folder / "pid").rename(folder / f"kill-{batch}")
                time.sleep(100)
            state, _ = step(state, np.split(x, job.num_processes)[job.process_id])
            if (batch + 1) % 5 == 0:
                checkpoints.save(state, data={"batch": batch + 1})
            if config["options"]:
                checkpoints.snapshot(state, data={"batch": batch + 1})
    leaves = jax.tree.leaves(step.unshard(state))
    bits = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
    (folder / f"bits-{job.process_id}").write_text(bits.hexdigest())


if __name__ == "__main__":
    train({"folder": sys.argv[1], "kills": {}, "options": {}})
"""

# Ray's part. Each of its processes writes what it has found into a file of its own.
DRIVER = """
import dataclasses, json, os, pathlib, runpy, sys, time
import crossshard, ray, ray.train, ray.tune
from crossshard.distributed.job import find_job
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig
import work

here = pathlib.Path(__file__).parent


def fit(name, function, workers=2, failures=0, use_gpu=False, jax_config=None, **config):
    JaxTrainer(
        function,
        train_loop_config={"folder": str(here / name), **config},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        jax_config=jax_config or JaxConfig(),
        run_config=RunConfig(
            name=name,
            storage_path=str(here / "ray"),
            failure_config=FailureConfig(max_failures=failures),
        ),
    ).fit()


def note(name, seconds=60):
    try:
        job = dataclasses.astuple(find_job(seconds))
    except Exception as error:
        job = f"{type(error).__name__}: {error}"
    (here / name).write_text(json.dumps(job))


def of_worker(config):
    rank = ray.train.get_context().get_world_rank()
    name = pathlib.Path(config["folder"]).name
    if name == "late" and rank:
        time.sleep(6)
    else:
        note(f"{name}-{rank}", seconds=2 if name == "late" else 60)


ray.init(
    num_cpus=3, num_gpus=2, include_dashboard=False,
    _temp_dir=os.environ["RAY_FOLDER"], _node_ip_address="127.0.0.1",
)
match sys.argv[1]:
    case "killed":
        memory = {"memory": str(here / "memory"), "memory_every": 1}
        fit("killed", work.train, failures=2, kills={7: 1, 13: 0}, options=memory)
    case "connected":
        # Ray's own branch for CPUs, in which JAX is connected before the function begins.
        on_cpus = JaxConfig(use_gpu=True)
        fit("connected", work.train, failures=1, kills={7: 1}, options={}, jax_config=on_cpus)
    case "page":
        run, memory, storage = (str(here / name) for name in ("run", "memory", "ray"))
        sys.argv[1:] = [run, memory, "1500", storage]
        runpy.run_path(str(here / "train_ray.py"), run_name="__main__")
    case "found":
        note("driver")
        ray.get(ray.remote(note).remote("task"))
        ray.tune.Tuner(lambda config: note("trial")).fit()
        fit("alone", of_worker, workers=1)
        fit("shared", of_worker, use_gpu=True)
        fit("late", of_worker)
ray.shutdown()
"""


@contextlib.contextmanager
def ray(case: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the driver, and see that no process of Ray is left behind it."""
    pytest.importorskip("ray")
    (folder / "work.py").write_text(WORK)
    (folder / "driver.py").write_text(DRIVER)
    ours = ("XLA_FLAGS", "NPROC")
    # Ray's sockets are there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        environment = {name: x for name, x in os.environ.items() if name not in ours}
        environment |= {
            "RAY_FOLDER": short,
            "RAY_USAGE_STATS_ENABLED": "0",
            "HOME": short,
            # As trainers of other frameworks do it.
            "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_VISIBLE_DEVICES": "4,5",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)]),
        }
        words = [sys.executable, str(folder / "driver.py"), case]
        with (folder / "log").open("wb") as log:
            running = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        try:
            yield running
            assert running.wait(PATIENCE) == 0, (folder / "log").read_text()[-3000:]
        finally:
            # Ray's own processes end once the driver has.
            running.kill()
            running.wait()
            until = time.monotonic() + 20
            while (left := naming(short)) and time.monotonic() < until:
                time.sleep(0.2)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert not left


def naming(words: str) -> list[int]:
    """The processes whose command line has these words, or whose Ray has this folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (each / "cmdline").read_bytes() + (each / "environ").read_bytes()
            if words.encode() in text and int(each.name) != os.getpid():
                found.append(int(each.name))
    return found


def kill(running: subprocess.Popen[bytes], asked: Path) -> None:
    """Kill the worker that has written its process id here."""
    until = time.monotonic() + PATIENCE
    while not asked.exists():
        assert running.poll() is None, (asked.parents[1] / "log").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.1)
    os.kill(int(asked.read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def quiet_bits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the same work ends with where nobody is killed, and Ray is not there."""
    folder = tmp_path_factory.mktemp("quiet")
    script = folder / "quiet.py"
    script.write_text(WORK)
    ran = launch("-n", 2, "--cpu-devices", 1, "--", sys.executable, script, folder)
    _, said = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0, said
    return (folder / "bits-0").read_text()


def lines(file: Path) -> list[list[str]]:
    return [line.split() for line in file.read_text().splitlines()]


@pytest.mark.deep
@pytest.mark.multiprocess
def test_killed_workers_come_back_from_memory_with_the_same_bits(tmp_path: Path, quiet_bits: str):
    folder = tmp_path / "killed"
    folder.mkdir()
    with ray("killed", tmp_path) as running:
        kill(running, folder / "kill-7")
        kill(running, folder / "kill-13")
    for process in range(2):
        begun = lines(folder / f"from-{process}")
        assert [words[0] for words in begun] == ["0", "7", "13"]
        assert {" ".join(words[1:3]) for words in begun} == {"Ray Train"}
        # All are on one host, so nobody else needs to reach them; each start has a port of its own.
        addresses = [words[3] for words in begun]
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+", each) for each in addresses)
        assert (folder / f"bits-{process}").read_text() == quiet_bits


@pytest.mark.deep
@pytest.mark.multiprocess
def test_a_job_that_ray_has_connected_is_watched_and_comes_back(tmp_path: Path, quiet_bits: str):
    folder = tmp_path / "connected"
    folder.mkdir()
    with ray("connected", tmp_path) as running:
        kill(running, folder / "kill-7")
    assert "crossshard: process 1 died. Process 0 leaves." in (tmp_path / "log").read_text()
    for process in range(2):
        assert [words[:2] for words in lines(folder / f"from-{process}")] == [
            ["0", "jax.distributed"],
            ["5", "jax.distributed"],
        ]
        assert (folder / f"bits-{process}").read_text() == quiet_bits


@pytest.mark.deep
@pytest.mark.multiprocess
def test_who_is_a_worker_of_ray_and_who_is_not(tmp_path: Path):
    with ray("found", tmp_path):
        pass
    found = lambda name: json.loads((tmp_path / name).read_text())
    for name in ("driver", "task", "trial"):
        assert found(name) == [1, 0, None, None, "nothing"], name
    assert found("alone-0") == [1, 0, None, None, "Ray Train"]
    first, second = found("shared-0"), found("shared-1")
    # Each sees both GPUs, and takes its own.
    assert (first[3], second[3]) == ([0], [1])
    assert first[2] == second[2]
    assert found("late-0") == (
        "DistributedError: Process 0 of 2 did not meet the other workers of Ray in 2 seconds: "
        "another one has not called initialize."
    )


@pytest.mark.deep
@pytest.mark.multiprocess
def test_the_files_of_the_page_come_back_with_the_same_bits(tmp_path: Path):
    (tmp_path / "train.py").write_text(file_of("python"))
    (tmp_path / "train_ray.py").write_text(file_of("py"))
    with ray("page", tmp_path) as running:
        kill_the_writer(tmp_path / "run", running)
    words = [tmp_path / "train.py", tmp_path / "quiet", tmp_path / "other", 1500]
    ran = launch("-n", 2, "--cpu-devices", 1, "--", sys.executable, *words)
    _, said = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0, said
    assert hashes(tmp_path / "run", 1500) == hashes(tmp_path / "quiet", 1500)
