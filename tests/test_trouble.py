"""The messages of docs/guide/trouble.md that its own code does not print are real ones."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import crossshard

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guide" / "trouble.md").read_text()


def plain(text: str) -> str:
    """Without what another machine, version or port would write otherwise."""
    text = re.sub(r"`[^`]*`", "``", re.sub(r"[\d.]*\d", "0", text))
    return " ".join(text.split())


# The messages of the page's console blocks, whose further lines are indented.
SHOWN = {
    plain(message)
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for message in re.split(r"\n(?! )", block.strip())
}

ONE_SHARD = """
import crossshard, optax
crossshard.make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1))
"""
OTHER_JAXLIB = """
import jaxlib.version
jaxlib.version.__version__ = "99.0.0"
import jax
"""
MEETING = """
import sys
import crossshard
try:
    crossshard.distributed.initialize("127.0.0.1:PORT", 2, PROCESS, timeout=6)
except crossshard.errors.DistributedError as error:
    print(f"{type(error).__name__}: {error}")
"""
JOB = """
import sys, time
import crossshard, numpy as np, optax
job = crossshard.distributed.initialize(stall_timeout=6)
odd = job.process_id == 1
rate = 0.11 if odd and "differ" in sys.argv else 0.1
step = crossshard.make_train_step(lambda w, x: ((x @ w - 1) ** 2).mean(), optax.sgd(rate))
state = step.init(np.zeros(3, np.float32))
for number in range(10):
    if odd and number == 4:
        time.sleep(60)
    try:
        state, metrics = step(state, np.ones((4, 3), np.float32))
    except crossshard.errors.ProgramMismatchError as error:
        print(f"{type(error).__name__}: {error}")
        break
    float(metrics["loss"])
"""


def prints(*arguments: str, **variables: str) -> set[str]:
    """The lines that Python prints on both of its streams."""
    ours = ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    path = str(Path(crossshard.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *arguments],
        env=kept | {"PYTHONPATH": path} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return {plain(re.sub(r"^\[\d\] ", "", line)) for line in done.stdout.splitlines()}


def shown(start: str) -> str:
    """The only line of the page that starts so."""
    (line,) = (each for each in SHOWN if each.startswith(start))
    return line


def test_every_message_has_its_test():
    starts = (
        *("crossshard trains on", "RuntimeError: jaxlib", "DistributedError: Process 0 of 0 did"),
        *("crossshard: process 0 has not", "DeadlockWarning", "ProgramMismatchError"),
    )
    assert not {line for line in SHOWN if not line.startswith(starts)}


def test_few_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NPROC", "2")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    with pytest.warns(crossshard.errors.DeadlockWarning) as warned:
        crossshard.make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), mesh=mesh)
    assert f"DeadlockWarning: {plain(str(warned[0].message))}" == shown("DeadlockWarning")


@pytest.mark.deep
def test_one_device():
    assert shown("crossshard trains on") in prints("-c", ONE_SHARD)


@pytest.mark.deep
def test_another_jaxlib():
    assert shown("RuntimeError: jaxlib") in prints("-c", OTHER_JAXLIB)


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_alone(process: int):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code = MEETING.replace("PORT", port).replace("PROCESS", str(process))
    said = prints("-c", code)
    assert [line for line in said & SHOWN if line.startswith("DistributedError")]


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.parametrize("case", ["differ", "stall"])
def test_a_job(case: str, tmp_path: Path):
    (tmp_path / "d.py").write_text(JOB)
    launch = ["-m", "crossshard.tools.cli", "launch", "-n", "2", "--cpu-devices", "1", "--"]
    said = prints(*launch, sys.executable, str(tmp_path / "d.py"), case)
    start = "ProgramMismatchError" if case == "differ" else "crossshard: process"
    assert shown(start) in said
