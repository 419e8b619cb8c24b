"""Real processes under `crossshard launch`: what they train, what is printed, how they end."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard.tools.cli import main
from tests.distributed.jobs import PATIENCE, launch, launched, python, wait_until_ready
from tests.quick import deep

TRAIN = """
import sys
import crossshard

job = crossshard.distributed.initialize()

import jax.numpy as jnp, numpy as np, optax

loss_fn = lambda w, batch: jnp.mean((jnp.tanh(batch @ w) - 1) ** 2)
rows = np.random.default_rng(0).normal(size=(5, 8, 64)).astype(np.float32)
found = {}
for rule, weight_update in ((optax.sgd(0.1), "replicated"), (optax.adam(0.1), "sharded")):
    step = crossshard.make_train_step(loss_fn, rule, weight_update=weight_update)
    state = step.init(np.zeros((64, 32), np.float32))
    for batch in rows:
        state, metrics = step(state, np.split(batch, job.num_processes)[job.process_id])
    found[weight_update] = np.asarray(state.params)
if job.process_id == 0:
    np.savez(sys.argv[1], **found)
# Several threads of the collectives' library write parts of lines to standard output.
sys.stderr.write(f"trained on {step.mesh.size} devices\\n")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("processes", "devices"),
    [(2, 2), deep((1, 4)), deep((4, 1))],
)
def test_processes_train_like_one_device(tmp_path: Path, processes: int, devices: int):
    script, saved = tmp_path / "train.py", tmp_path / "params.npz"
    script.write_text(TRAIN)
    command = ["--", sys.executable, script, saved]
    ran = launch("-n", processes, "--cpu-devices", devices, *command)
    _, err = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0, err
    assert sorted(line for line in err.splitlines() if "trained" in line) == [
        f"[{own}] trained on {processes * devices} devices" for own in range(processes)
    ]
    loss_fn = lambda w, batch: jnp.mean((jnp.tanh(batch @ w) - 1) ** 2)
    found = np.load(saved)
    for update, optimizer in {"replicated": optax.sgd(0.1), "sharded": optax.adam(0.1)}.items():
        params = jnp.zeros((64, 32))
        state = optimizer.init(params)
        for batch in np.random.default_rng(0).normal(size=(5, 8, 64)).astype(np.float32):
            updates, state = optimizer.update(jax.grad(loss_fn)(params, batch), state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(found[update], params, atol=1e-6)


ON_CPUS = """
import os
import crossshard
crossshard.distributed.initialize()
import jax.numpy as jnp, numpy as np, optax
params = [np.zeros((300, 300), np.float32), np.zeros((500, 300), np.float32)]
loss_fn = lambda params, x: sum(jnp.mean(x * w.sum()) for w in params)
step = crossshard.make_train_step(loss_fn, optax.sgd(1.0), weight_update="replicated")
report = crossshard.inspect(step.lower(step.init(params), np.ones((1, 3), np.float32)))
print(os.environ["GLIBC_TUNABLES"], [len(each.operands) for each in report.collectives])
"""


@pytest.mark.deep
@pytest.mark.multiprocess
def test_between_cpus_larger_arrays_share_a_bucket_and_memory_comes_in_large_pages():
    out, err = launch("-n", 2, "--cpu-devices", 1, *python(ON_CPUS)).communicate(timeout=PATIENCE)
    tunables = (
        "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:"
        "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
    )
    assert sorted(out.splitlines()) == [f"[{own}] {tunables} [1]" for own in range(2)], err


def test_lines_have_the_number_of_their_process(capfd: pytest.CaptureFixture[str]):
    write = "import os, sys; print('out'); print('err', file=sys.stderr); print('end', end='')"
    _, out, err = launched(capfd, "-n", 12, *python(write))
    assert sorted(out.splitlines()) == sorted(
        f"[{own:>2}] {word}" for own in range(12) for word in ("out", "end")
    )
    assert sorted(err.splitlines()) == [f"[{own:>2}] err" for own in range(12)]


@pytest.mark.deep
def test_long_lines_of_two_processes_do_not_mix():
    write = "import sys\nfor i in range(300): print('x' * 3000 if sys.argv[1:] else 'y' * 3000)"
    out, _ = launch("-n", 2, *python(write)).communicate(timeout=PATIENCE)
    assert len(out.splitlines()) == 600
    assert all(re.fullmatch(r"\[[01]\] (x{3000}|y{3000})", line) for line in out.splitlines())


def test_when_one_is_killed_the_others_end(capfd: pytest.CaptureFixture[str]):
    kills_itself = "[ $JAX_PROCESS_ID = 1 ] && kill -KILL $$; exec sleep 600"
    code, _, err = launched(capfd, "-n", 3, "--", "sh", "-c", kills_itself)
    assert code == 128 + signal.SIGKILL
    assert "crossshard: process 1 ended by SIGKILL; the others are ended.\n" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", 0, "--", "true"), "-n must be at least 1; got 0"),
        (("-n", 10**9, "--", "true"), "-n must be at most "),
        (("-n", 2, "--cpu-devices", 0, "--", "true"), "--cpu-devices must be at least 1"),
        (("-n", 2, "--port", 70000, "--", "true"), "--port must be from 1 to 65535"),
        (("-n", 2, "--restarts", -1, "--", "true"), "--restarts must be at least 0; got -1"),
        (("-n", 2, "--spares", 2, "--", "true"), "--spares needs --restarts; got 2 spares"),
        (("-n", 2, "--min-processes", 1, "--", "true"), "needs --restarts; got 1"),
        (
            ("-n", 2, "--restarts", 1, "--min-processes", 3, "--", "true"),
            "--min-processes must be from 1 to 2",
        ),
        (("-n", 2, "--", "no-such-program"), "'no-such-program' cannot be started"),
        (("-n", 2), "the following arguments are required"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(arguments, message, capfd):
    assert main(["launch", *map(str, arguments)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.deep
def test_where_no_further_process_can_start_those_that_have_are_ended():
    words = f"{sys.executable} -m crossshard.tools.cli launch -n 43 -- sleep 600"
    limited = f"ulimit -n 40; exec {words}"
    ran = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 2
    assert ran.stderr.endswith(" cannot be started: Too many open files.\n")


@pytest.mark.deep
def test_a_reader_that_leaves_does_not_stop_the_processes(tmp_path: Path):
    done = tmp_path / "done"
    write = (
        "import time\n"
        "for i in range(200): print('x' * 1000)\n"
        f"time.sleep(0.5); open({str(done)!r}, 'a').write('done')\n"
    )
    ran = launch("-n", 2, *python(write))
    ran.stdout.close()
    assert ran.wait(PATIENCE) == 0
    assert done.read_text() == "donedone"


DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "a").write(f"{os.getpid()}\\n{child.pid}\\n")
print("ready")
if os.environ["JAX_PROCESS_ID"] == "1" and sys.argv[2] == "ends":
    while len(open(sys.argv[1]).readlines()) < 4: time.sleep(0.01)
    sys.exit(5)
time.sleep(600)
"""


@pytest.mark.deep
@pytest.mark.parametrize("what", ["a process ends", "the launcher is killed"])
def test_processes_that_ignore_sigterm_end_with_what_they_have_started_when(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pids = tmp_path / "pids"
    is_killed = what == "the launcher is killed"
    ran = launch("-n", 2, "--grace", 0.5, *python(DEAF), pids, "stays" if is_killed else "ends")
    below = []
    if is_killed:
        wait_until_ready(ran)
        # The guard ends, too.
        below = running_below(ran.pid)
        ran.kill()
    ran.communicate(timeout=PATIENCE)
    assert ran.returncode == (-signal.SIGKILL if is_killed else 5)
    numbers = {int(line) for line in pids.read_text().split()}
    assert len(numbers) == 4
    assert not is_killed or numbers < set(below)
    until = time.monotonic() + 30
    while any(_is_running(number) for number in numbers.union(below)):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert [*tmp_path.iterdir()] == [pids]


def running_below(pid: int) -> list[int]:
    """The process ids of what a process has started, and of what these have."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, found) for each in (child, *running_below(child))]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Process 1 appends a line in each run, and fails in the first ones.
FAILS_AT_FIRST = """
import os, sys, time
log, runs = sys.argv[1:]
if os.environ["JAX_PROCESS_ID"] == "1":
    with open(log, "a") as lines:
        lines.write(os.environ["JAX_NUM_PROCESSES"] + "\\n")
    sys.exit(9 if len(open(log).readlines()) <= int(runs) else 0)
time.sleep(0.5)
"""


@pytest.mark.parametrize(
    ("flags", "runs", "code", "starts"),
    [
        (["--restarts", 2], 1, 0, ["3", "3 processes; 1 more restart"]),
        deep(([], 1, 9, ["3"])),
        deep(
            (
                ["--restarts", 2],
                5,
                9,
                ["3", "3 processes; 1 more restart", "3 processes; 0 more restarts"],
            )
        ),
        deep(
            (
                ["--restarts", 3, "--min-processes", 2],
                2,
                0,
                ["3", "2 processes; 2 more restarts", "2 processes; 1 more restart"],
            )
        ),
    ],
)
def test_a_failed_run_is_started_again(tmp_path: Path, capfd, flags, runs, code, starts):
    log = tmp_path / "log"
    found, _, err = launched(capfd, "-n", 3, *flags, *python(FAILS_AT_FIRST), log, runs)
    assert found == code, err
    assert log.read_text().split() == [start[0] for start in starts]
    said = [line for line in err.splitlines() if "started again" in line]
    assert said == [f"crossshard: started again with {start} left." for start in starts[1:]]
