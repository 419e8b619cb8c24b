"""Real processes, one of which dies, fails, leaves or stands still: the others name it."""

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from crossshard import _jax
from crossshard.distributed import PROCESS_LOST, PROCESS_STALLED
from crossshard.distributed.judge import Report, State, Timeouts, left_before
from crossshard.distributed.watch import VERDICTS, Watch
from tests.distributed.jobs import PATIENCE, STALL_SECONDS, TRAIN, started
from tests.quick import deep_but


@pytest.fixture
def start() -> Iterator[object]:
    with contextlib.ExitStack() as stack:
        yield lambda *given, **named: stack.enter_context(started(*given, **named))


def wait_for_fault(process: subprocess.Popen[str]) -> float:
    """Wait until the process is about to fail; return when that was."""
    for line in process.stdout:
        if line == "now\n":
            return time.monotonic()
    raise AssertionError(process.communicate())


STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
UNHEARD = f"has not been heard of for {STALL_SECONDS} seconds."
SLEEPS = (
    f"has not entered step 6 for {STALL_SECONDS} seconds, and others wait for it. "
    "It stands at <string>:1."
)
LEFT = "left before step 6, which others have entered."
# What one process does, what the others say of it, their code, its own, and what it says itself.
FAULTS = [
    (0, STOP, UNHEARD, PROCESS_STALLED, PROCESS_STALLED, "has not "),
    (1, STOP, "has not ", PROCESS_STALLED, PROCESS_STALLED, "has not "),
    *(
        (who, *fault)
        for who in (0, 1)
        for fault in [
            ("time.sleep(600)", SLEEPS, PROCESS_STALLED, PROCESS_STALLED, SLEEPS),
            ("os.kill(os.getpid(), signal.SIGKILL)", "died.", PROCESS_LOST, -signal.SIGKILL, ""),
            ("raise ValueError('wrong')", "ended with ValueError.", PROCESS_LOST, 1, ""),
            ("sys.exit(7)", LEFT, PROCESS_LOST, 7, ""),
            ("sys.exit()", LEFT, PROCESS_LOST, 0, ""),
        ]
    ),
]
SLEEP_OF_1 = next(each for each in FAULTS if each[:3] == (1, "time.sleep(600)", SLEEPS))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("who", "fault", "says", "code", "own_code", "own_says"), deep_but([SLEEP_OF_1], FAULTS)
)
def test_the_others_name_a_process_and_it_keeps_its_code(
    start, who, fault, says, code, own_code, own_says
):
    processes = start(who, fault)
    began = wait_for_fault(processes[who])
    for own, process in enumerate(processes):
        if own != who:
            _, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == code, err
            assert f"crossshard: process {who} {says}" in err
            assert err.endswith(f" Process {own} leaves.\n")
    # On a busy machine; JAX itself would take 100 seconds.
    assert time.monotonic() - began < STALL_SECONDS + 45
    # If it was stopped, it takes nobody for dead when it goes on.
    os.kill(processes[who].pid, signal.SIGCONT)
    _, err = processes[who].communicate(timeout=PATIENCE)
    assert processes[who].returncode == own_code, err
    if own_says:
        assert f"crossshard: process {who} {own_says}" in err
    if own_says == SLEEPS:
        assert re.search(r"^The main thread:\n  <string>:1 in <module>$", err, re.MULTILINE)


CHATTER = """
import os, threading, time
from crossshard.distributed.judge import Kind, Verdict
from crossshard.distributed.watch import _leave

def chatter():
    while True:
        os.write(2, b"as the main thread prints an exception\\n")
        time.sleep(0.0002)  # or the pipe is full, and a write waits in it

for _ in range(20):
    threading.Thread(target=chatter, daemon=True).start()
time.sleep(0.1)
_leave(0, Verdict.of(Kind.DIED, 1, "died"))
"""


def test_the_word_comes_last_while_another_thread_prints(tmp_path: Path):
    verdicts = tmp_path / "verdicts"
    verdicts.touch()
    words, ours = [sys.executable, "-c", CHATTER], {**os.environ, VERDICTS: str(verdicts)}
    run = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=ours)
    assert verdicts.read_text().startswith("0 ")
    assert run.returncode == PROCESS_LOST
    assert run.stderr.endswith("crossshard: process 1 died. Process 0 leaves.\n")


@pytest.mark.soak
@pytest.mark.multiprocess
def test_stalls_at_random_moments(soak_steps: int, capsys: pytest.CaptureFixture[str]):
    rng, seconds = np.random.default_rng(0), {"sleep": [], "SIGSTOP": []}
    of_first = 0
    for number in range(max(2, soak_steps // 400)):
        who, later = int(rng.integers(2)), float(rng.random()) / 2
        if number % 2:
            kind, fault = "sleep", f"time.sleep({later}); time.sleep(600)"
        else:
            # Between two steps, or within one.
            kind, stop = "SIGSTOP", "os.kill, (os.getpid(), signal.SIGSTOP)"
            fault = f"threading.Timer({later}, {stop}).start()"
        with started(who, fault, number=2) as processes:
            began = wait_for_fault(processes[who]) + later
            other = processes[1 - who]
            _, err = other.communicate(timeout=PATIENCE)
            seconds[kind].append(time.monotonic() - began)
            assert other.returncode == PROCESS_STALLED, err
            assert f"crossshard: process {who} has not " in err
            of_first += who == 0
    found = sorted(seconds["sleep"] + seconds["SIGSTOP"])
    with capsys.disabled():
        print(
            f"\n{len(seconds['sleep'])} processes that slept and {len(seconds['SIGSTOP'])} that "
            f"were stopped, {of_first} of them process 0: all named with a timeout of "
            f"{STALL_SECONDS} s, after {statistics.median(found):.1f} s (median), "
            f"{found[-1]:.1f} s at most"
        )
    # Only the median: on a busy machine the other process may get no time for as long.
    assert statistics.median(found) <= STALL_SECONDS + 5


def test_that_process_0_has_come_to_its_end_does_not_end_the_others(monkeypatch):
    told = {"report": str(Report(7, calls=5, latest="step 5", state=State.LEFT))}
    monkeypatch.setattr(_jax, "kv_get_dir", lambda folder: told)
    watch = Watch(3, 1, "127.0.0.1:1", Timeouts(STALL_SECONDS))
    assert watch._of_first() is None
    told["verdict"] = str(left_before("step 6", 0))
    assert watch._of_first() == left_before("step 6", 0)


# They do not wait for the timeout of the call.
OTHER_ROWS = TRAIN.replace(f"stall_timeout={STALL_SECONDS}", "stall_timeout=600")
STATEFUL = """
import sys
import crossshard

job = crossshard.distributed.initialize(stall_timeout=600)

import jax, numpy as np, optax
from flax import nnx

model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
opt = crossshard.CrossShardOptimizer(optax.sgd(0.1))

@crossshard.shard(num_shards=2)
def step(model, opt, x):
    return opt.minimize(lambda: (model(x) ** 2).mean(), var_list=model)

for number in range(1, 1_000_000):
    rows = 4 if number == 6 and job.process_id == int(sys.argv[1]) else 2
    jax.block_until_ready(step(model, opt, np.ones((rows, 3), np.float32)))
"""


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.parametrize("script", [OTHER_ROWS, STATEFUL], ids=["step", "shard"])
def test_a_process_with_other_rows_in_mid_run_is_named_with_them(start, script: str):
    processes = start(1, "step(state, np.ones((4, 3), np.float32))", script=script, number=2)
    for own, process in enumerate(processes):
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == PROCESS_STALLED, err
        assert (
            "crossshard: process 1 has entered step 6 with float32[4,3], and process 0 with "
            "float32[2,3]. Pass as many rows, of the same dtypes, in every process, or weight=, "
        ) in err
        assert err.endswith(f" Process {own} leaves.\n")


ALONE = """
import time
import crossshard

crossshard.distributed.initialize(stall_timeout={"alone": 2})

import jax.numpy as jnp, numpy as np, optax

def loss_fn(w, x):
    time.sleep(3)  # as if it compiled
    return jnp.mean((x @ w - 1) ** 2)
step = crossshard.make_train_step(loss_fn, optax.sgd(0.1), num_shards=1)
state = step.init(np.zeros(3, np.float32))
time.sleep(3)  # before the first step nothing is said
state, _ = step(state, np.ones((2, 3), np.float32))
print("now", flush=True)
time.sleep(600)
"""


@pytest.mark.deep
def test_a_single_process_that_stands_still_leaves_with_its_stack():
    ran = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ran.returncode, ran.stdout) == (PROCESS_STALLED, "now\n"), ran.stderr
    assert ran.stderr == (
        "\nThe main thread:\n"
        "  <string>:17 in <module>\n"
        "crossshard: nothing was entered for 2 seconds after step 1. It stands at <string>:17. "
        "Process 0 leaves.\n"
    )


# Process 0 works on for longer than the timeout, and nobody waits for it in a step.
UNEVEN = f"""{TRAIN.replace("1_000_000", "2")}
if job.process_id == 0:
    time.sleep({STALL_SECONDS + 2})
print("end", flush=True)
"""


@pytest.mark.deep
@pytest.mark.multiprocess
def test_processes_that_come_to_their_ends_wait_for_each_other(start):
    for process in start(0, "", script=UNEVEN):
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, err) == (0, "")
        assert out.endswith("end\n")
