"""How jobs of a launcher end: by signals that nobody heeds or that come early, and whose fault."""

import signal
import socket
from pathlib import Path

import pytest

from crossshard.distributed import PROCESS_STALLED
from crossshard.distributed.judge import Kind, Verdict
from tests.distributed.jobs import (
    PATIENCE,
    STALL_SECONDS,
    TRAIN,
    launch,
    launched,
    python,
    wait_until_ready,
)
from tests.quick import deep

IMPORTS, SLEEP = "import os, signal, sys, time\n", "time.sleep(600)"
SAYS_SO = "lambda number, _: (print('got', number), sys.exit(0))"
# As JAX's notice of a preemption does it.
SWALLOWS = "lambda number, _: None"


@pytest.mark.parametrize(
    ("number", "handler", "code", "says"),
    [
        *(
            deep((number, SAYS_SO, 0, f"got {int(number)}"))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        ),
        # Python's own words on Ctrl-C are left out.
        deep((signal.SIGINT, "signal.SIG_DFL", 128 + signal.SIGINT, "")),
        deep((signal.SIGQUIT, "signal.SIG_DFL", 128 + signal.SIGQUIT, "")),
        (signal.SIGTERM, SWALLOWS, 128 + signal.SIGTERM, ""),
    ],
)
def test_a_signal_goes_to_all_processes_which_have_a_grace_to_end(
    number: signal.Signals, handler: str, code: int, says: str
):
    waits = f"signal.signal({int(number)}, {handler}); print('ready'); {SLEEP}"
    grace = 0.5 if handler == SWALLOWS else PATIENCE
    ran = launch("-n", 2, "--grace", grace, "--restarts", 3, *python(IMPORTS + waits))
    wait_until_ready(ran)
    ran.send_signal(number)
    out, err = ran.communicate(timeout=PATIENCE / 2)
    assert ran.returncode == code
    assert sorted(out.splitlines()) == ([f"[{own}] {says}" for own in range(2)] if says else [])
    killed = "crossshard: killed 0.5 seconds after SIGTERM: process 0 1.\n"
    assert err == (killed if handler == SWALLOWS else "")


@pytest.mark.deep
def test_who_saves_after_a_signal_has_its_grace_and_hears_of_it_once(tmp_path: Path):
    saved = tmp_path / "saved"
    saves = (
        "def save(number, frame):\n"
        "    time.sleep(1)\n"
        f"    open({str(saved)!r}, 'a').write('saved ')\n"
        "    sys.exit(0)\n"
        "if os.environ['JAX_PROCESS_ID'] == '0': signal.signal(signal.SIGTERM, save)\n"
        f"print('ready'); {SLEEP}\n"
    )
    ran = launch("-n", 2, *python(IMPORTS + saves))
    wait_until_ready(ran)
    ran.send_signal(signal.SIGTERM)
    _, err = ran.communicate(timeout=PATIENCE)
    # Process 1 has ended by the signal, long before.
    assert (ran.returncode, err) == (128 + signal.SIGTERM, "")
    assert saved.read_text() == "saved "


@pytest.mark.deep
def test_a_signal_while_processes_are_started_reaches_all_of_them():
    # The first one sends it, while 40 more are being started, and then listens to it.
    first = "if [ $JAX_PROCESS_ID = 0 ]; then kill -TERM $PPID; fi"
    script = f"trap 'exit 0' TERM; {first}; while true; do sleep 0.05; done"
    ran = launch("-n", 40, "--grace", PATIENCE, "--", "sh", "-c", script)
    ran.communicate(timeout=PATIENCE / 2)
    assert ran.returncode == 128 + signal.SIGTERM


def test_a_port_at_which_another_job_meets_is_refused(capfd: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = launched(capfd, "-n", 2, "--port", port, *python("print('started')"))
    assert refused == (
        *(2, ""),
        f"crossshard: Something listens at port {port} of 127.0.0.1 already, perhaps another job. "
        f"Name another port, or none.\n",
    )
    # The port of a job that has ended can be used at once.
    assert launched(capfd, "-n", 1, "--port", port, *python("pass")) == (0, "", "")


# All leave with the same code, the one that stands still, too, unless it dies.
ALL_LEAVE = """
import os, signal, sys, time
own, gpu = os.environ["JAX_PROCESS_ID"], os.environ["JAX_LOCAL_DEVICE_IDS"]
open(sys.argv[1], "a").write(f"{own}{gpu} ")
if os.environ["JAX_NUM_PROCESSES"] == "3":
    if own == "1" and "died" in sys.argv[2]:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2]:
        open(os.environ["CROSSSHARD_VERDICTS"], "a").write(f"{own} {sys.argv[2]}\\n")
    sys.exit(82)
"""


STOOD = "has not entered step 7 for 120 seconds, and others wait for it"


@pytest.mark.parametrize(
    ("verdict", "is_left_out", "says"),
    [
        (Verdict.of(Kind.STALLED, 1, STOOD, "data.py:7"), True, f"process 1 {STOOD}"),
        # A death that the others have seen first.
        (Verdict.of(Kind.DIED, 1, "died"), True, "process 1 ended by SIGKILL"),
        # One of another job.
        (Verdict.of(Kind.DIED, 3, "died"), False, "ended with code 82"),
        # Nobody knows whose fault it was, so nobody is left out.
        ("", False, "ended with code 82"),
    ],
    ids=["stood still", "died", "of another job", "unknown"],
)
def test_the_launcher_leaves_out_whom_the_processes_name(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    verdict: object,
    is_left_out: bool,
    says: str,
):
    log = tmp_path / "log"
    flags = ["--restarts", 1, "--min-processes", 1]
    code, _, err = launched(capfd, "-n", 3, *flags, *python(ALL_LEAVE), log, verdict)
    assert code == (0 if is_left_out else PROCESS_STALLED), err
    again = ["00", "12"] if is_left_out else ["00", "11", "22"]
    assert sorted(log.read_text().split()) == sorted(["00", "11", "22", *again])
    assert f"{says}; the others are ended." in err


DOES_NOT_COME = """
import os, sys, time
import crossshard

number, own = os.environ["JAX_NUM_PROCESSES"], os.environ["JAX_PROCESS_ID"]
if (number, own) == ("3", "1"):
    exec(sys.argv[2])
crossshard.distributed.initialize(timeout=8 if number == "3" else 60)
"""
SAYS_SLOT = """
sys.stderr.write(f"slot {os.environ['JAX_LOCAL_DEVICE_IDS']}\\n")
"""
STOPS = TRAIN.replace("1_000_000", "9")


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("script", "fault", "says"),
    [
        (DOES_NOT_COME, "sys.exit()", "left before initialize, which others have entered"),
        (DOES_NOT_COME, SLEEP, "has not entered initialize for 8 seconds, and others wait for it"),
        (
            STOPS,
            f"if job.num_processes == 3: {SLEEP}",
            f"has not entered step 6 for {STALL_SECONDS} seconds, and others wait for it",
        ),
    ],
)
def test_the_process_that_others_wait_for_is_left_out(
    monkeypatch: pytest.MonkeyPatch, script: str, fault: str, says: str
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    flags = ["--restarts", 1, "--min-processes", 1]
    ran = launch("-n", 3, *flags, *python(script + SAYS_SLOT), 1, fault)
    _, err = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0, err
    assert f"crossshard: process 1 {says}; the others are ended.\n" in err
    assert "crossshard: started again with 2 processes; 0 more restarts left.\n" in err
    assert sorted(line for line in err.splitlines() if "slot" in line) == [
        "[0] slot 0",
        "[1] slot 2",
    ]
    # The one that stood still has been told why, and takes nobody for dead.
    assert "died" not in err
    if script is STOPS:
        for own in range(3):
            assert f"[{own}] The main thread:\n" in err


ENDS_WHILE_IT_LEAVES = """
import sys, threading, time
import crossshard
from crossshard import _jax
from crossshard.distributed import watch

job = crossshard.distributed.initialize(stall_timeout=2)
leaving, flush = threading.Event(), watch._flush

def slowly():
    leaving.set()
    time.sleep(0.4)
    flush()

watch._flush = slowly
if job.process_id == 0:
    with crossshard.distributed.entering("step"):
        leaving.wait()
    _jax.abandon_coordination()
    sys.stderr.write("a part of a line")
    sys.exit(1)
time.sleep(600)
"""


@pytest.mark.deep
@pytest.mark.multiprocess
def test_a_process_whose_script_ends_meanwhile_still_says_where_it_stood():
    ran = launch("-n", 2, *python(ENDS_WHILE_IT_LEAVES))
    _, err = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == PROCESS_STALLED, err
    assert "[0] a part of a line\n" in err
    for own in range(2):
        assert f"[{own}] The main thread:\n" in err
    assert "[0]   <string>:18 in <module>\n" in err
