"""Spare processes: they have imported everything, and the next run takes them."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from crossshard.distributed.launcher import _Spares
from tests.distributed.jobs import PATIENCE, launch

# In the first run process 1 fails, once two more processes have begun, and the others are ended.
RUN = """
import os, subprocess, sys, time
from pathlib import Path
folder, fails = Path(sys.argv[1]), sys.argv[2]
if fails == "600":
    (folder / f"child-{subprocess.Popen(['sleep', '600']).pid}").touch()
(folder / f"began-{os.getpid()}").touch()
print("begins")
import crossshard, numpy as np, optax
job = crossshard.distributed.initialize()
step = crossshard.make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1))
state, _ = step(step.init(np.float32(1)), np.ones(2, np.float32))
(folder / f"ran-{os.getpid()}").touch()
is_first = not (folder / "failed").exists()
while is_first and len([*folder.glob("began-*")]) < 4:
    time.sleep(0.02)
if is_first and job.process_id == 1:
    time.sleep(float(fails))
    (folder / "failed").touch()
    os._exit(3)
if is_first:
    time.sleep(600)
step.finish(state)
"""


def numbers(folder: Path, what: str) -> set[str]:
    return {path.name.removeprefix(f"{what}-") for path in folder.glob(f"{what}-*")}


@pytest.mark.multiprocess
def test_the_next_run_takes_those_that_wait(tmp_path: Path):
    (tmp_path / "run.py").write_text(RUN)
    words = "-n", 2, "--cpu-devices", 1, "--restarts", 1, "--spares", 2, "--", sys.executable
    ran = launch(*words, tmp_path / "run.py", tmp_path, 1)
    out, said = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0, said
    assert "process 1 ended with code 3; trains again after " in said
    # No process was started for the second run, and none waits in vain during it.
    began, both = (numbers(tmp_path, what) for what in ("began", "ran"))
    assert len(began) == len(both) == 4
    # Also what they have printed while they waited.
    for process in (0, 1):
        assert out.count(f"[{process}] begins") == 2


@pytest.mark.multiprocess
@pytest.mark.deep
def test_they_end_with_the_launcher(tmp_path: Path):
    (tmp_path / "run.py").write_text(RUN)
    words = "-n", 2, "--cpu-devices", 1, "--restarts", 1, "--spares", 2, "--", sys.executable
    ran = launch(*words, tmp_path / "run.py", tmp_path, 600)
    until = time.monotonic() + PATIENCE
    while len(found := numbers(tmp_path, "began")) < 4:
        assert time.monotonic() < until
        time.sleep(0.05)
    ran.send_signal(signal.SIGKILL)
    ran.communicate()
    # And what they have started.
    found |= numbers(tmp_path, "child")
    while any(Path(f"/proc/{pid}/cmdline").exists() and is_there(pid) for pid in found):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_a_spare_has_started_keeps_no_launcher_waiting():
    code = (
        "import subprocess, time\n"
        "own = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(own.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    spares = _Spares([sys.executable, "-S", "-c", code])
    spares.wanted, spares.environment = 1, {**os.environ}
    spares.fill()
    (spare,) = spares._waiting
    assert spare.stdout is not None
    # It has the spare's standard output, which does not end.
    own, begun = int(spare.stdout.readline()), time.monotonic()
    spares.close()
    assert time.monotonic() < begun + 30
    os.kill(own, signal.SIGKILL)


def is_there(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
