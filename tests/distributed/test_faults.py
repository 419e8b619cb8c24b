"""Real processes with a fault at each stage of a run: the job ends soon, and names who it was."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from crossshard.distributed import PROCESS_LOST, PROCESS_STALLED
from tests.distributed.jobs import PATIENCE, launch

STALL_SECONDS, MORE_SECONDS = 5, 15
# For processes to connect; as long as it takes, unless that is the fault.
CONNECT_SECONDS, NEVER_CONNECT_SECONDS = 60, 8

SLEEP, LEAVE, FAIL, RAISE = "stand_still()", "sys.exit()", "sys.exit(7)", "raise ValueError('x')"
KILL, STOP = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGKILL", "SIGSTOP"))
FULL = "raise OSError(28, 'No space left on device')"
FINISH = "step.finish(state); sys.exit()"
EVALUATE = "step.evaluate(state, [rows], lambda w, x: x @ w)"

STALLED, LOST, KILLED = PROCESS_STALLED, PROCESS_LOST, 128 + signal.SIGKILL
# Which process, where, what it does there, the exit code of the job, and what is said of it.
FAULTS = [
    (1, "before initialize", SLEEP, 1, "has not entered initialize for"),
    (0, "before initialize", SLEEP, 1, "has not entered initialize for"),
    (1, "before initialize", LEAVE, LOST, "left before initialize, which others have entered"),
    (0, "before initialize", FAIL, 7, "ended with code 7"),
    (0, "before initialize", KILL, KILLED, "ended by SIGKILL"),
    (1, "after initialize", SLEEP, STALLED, "has not entered the first JAX operation for"),
    (0, "after initialize", LEAVE, LOST, "left before the first JAX operation"),
    (1, "after initialize", FAIL, 7, "ended with code 7"),
    (1, "before init", SLEEP, STALLED, "has not entered init 1 for"),
    (0, "in init", SLEEP, STALLED, "has stood still in init 1 for"),
    (1, "in init", RAISE, 1, "ended with code 1"),
    (0, "in init", FAIL, 7, "ended with code 7"),
    (0, "before restore", SLEEP, STALLED, "has not entered restore 1 for"),
    (1, "before restore", LEAVE, LOST, "left before restore 1, which others have entered"),
    (0, "in restore", SLEEP, STALLED, "has stood still in restore 2 for"),
    (1, "in restore", KILL, KILLED, "ended by SIGKILL"),
    (1, "before make_train_step", "rate = 0.2", 1, "differs. Its line"),
    (1, "in the trace", SLEEP, STALLED, "has stood still in step 1 for"),
    (1, "before step 5", SLEEP, STALLED, "has not entered step 5 for"),
    (0, "before step 5", RAISE, 1, "ended with code 1"),
    (1, "before step 5", FINISH, LOST, "left before step 5, which others have entered"),
    (1, "before step 5", EVALUATE, STALLED, "has entered evaluate 1, and process 0 step 5 in its"),
    (1, "before step 5", "other_rows()", STALLED, "has entered step 5 with float32[4,4096]"),
    (1, "before step 5", "os._exit(0)", LOST, "died"),
    (1, "in step 5", KILL, KILLED, "ended by SIGKILL"),
    (0, "in step 5", KILL, KILLED, "ended by SIGKILL"),
    (1, "in step 5", STOP, STALLED, "has not "),
    (0, "in step 5", STOP, STALLED, "has not been heard of for"),
    (1, "in step 5", "hold_python()", STALLED, "has not "),
    (1, "in step 5", "os.abort()", 128 + signal.SIGABRT, "ended by SIGABRT"),
    (0, "in save", SLEEP, STALLED, "has stood still in save 1 for"),
    (1, "in save", FAIL, 7, "ended with code 7"),
    (1, "at the write", FULL, 7, "ended with code 7"),
    (0, "in write 2", FULL, 7, "ended with code 7"),
    (1, "in write 6", FULL, 7, "ended with code 7"),
    (1, "after save 2", LEAVE, LOST, "left before step 3, which others have entered"),
    (1, "before unshard", SLEEP, STALLED, "has not entered unshard 1 for"),
    (0, "in reshard", SLEEP, STALLED, "has stood still in reshard 1 for"),
    (1, "in reshard", LEAVE, LOST, "left before reshard 1, which others have entered"),
    (0, "before evaluate", FAIL, 7, "ended with code 7"),
    (1, "the end", FAIL, 7, "ended with code 7"),
]


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.parametrize(("who", "stage", "fault", "code", "says"), FAULTS)
def test_a_job_ends_soon_after_a_fault_and_names_the_process(
    tmp_path: Path, who: int, stage: str, fault: str, code: int, says: str
):
    connect = CONNECT_SECONDS
    if (stage, fault) == ("before initialize", SLEEP):
        connect = NEVER_CONNECT_SECONDS
    words = [who, stage, fault, tmp_path / "checkpoints"]
    script = [sys.executable, Path(__file__).with_name("staged.py"), *words]
    ran = launch("-n", 2, "--cpu-devices", 1, "--", *script, STALL_SECONDS, connect)
    # It ends them all; one that hangs would never close its pipes.
    hangs = threading.Timer(PATIENCE, ran.terminate)
    hangs.start()
    began = None
    for line in ran.stdout:
        began = time.monotonic() if line == f"[{who}] now\n" else began
    _, err = ran.communicate()
    hangs.cancel()
    assert began is not None, err
    seconds = time.monotonic() - began - (connect if connect == NEVER_CONNECT_SECONDS else 0)
    assert ran.returncode == code, err
    named = [line for line in err.splitlines() if f"process {who} {says}" in line]
    assert named, err
    print(f"process {who}, {stage}, {fault}: {seconds:.1f} s, {named[-1]}")
    assert seconds <= STALL_SECONDS + MORE_SECONDS, err
    assert not _still_running(tmp_path)


def _still_running(folder: Path) -> list[str]:
    """The process ids of what was started with this folder, and runs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in command and int(process.name) != os.getpid():
            found.append(process.name)
    return found
