"""However a run ends, it says so, writes what it can, and leaves with the code it documents."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from examples.byte_lm import run as running
from examples.byte_lm.processes import ALONE, Processes
from examples.byte_lm.stopping import Stopping
from tests.examples.byte_lm.small import (
    PATIENCE,
    bare_environment,
    read_metrics,
    run,
    start,
    summary_of,
    wait_for_steps,
)

ENDLESS = ["--steps", "1000000", "--shards", "2"]


@pytest.mark.deep
@pytest.mark.parametrize(("module", "number"), [("tyro", signal.SIGINT), ("optax", signal.SIGTERM)])
def test_a_signal_before_the_first_line_ends_it_at_once(tmp_path, module, number):
    # Imported by Python itself when it starts, in this process only.
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, sys

class Interrupting:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), {int(number)})
            except BaseException:
                pass  # as a plugin might
        return None

sys.meta_path.insert(0, Interrupting())
""")
    path = os.pathsep.join([str(tmp_path), bare_environment()["PYTHONPATH"]])
    process = start(tmp_path, env={"PYTHONPATH": path})
    assert process.communicate(timeout=PATIENCE) == ("", "")
    assert process.returncode == -number
    assert not (tmp_path / "out").exists()


@pytest.mark.deep
@pytest.mark.parametrize("stopped", [True, False])
def test_a_reader_that_leaves_ends_the_run_with_everything_written(tmp_path, stopped):
    process = start(tmp_path, *ENDLESS)
    wait_for_steps(process, tmp_path / "out")
    assert process.stdout is not None
    process.stdout.close()
    if stopped:  # Ctrl-C reaches tee, too
        process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(PATIENCE) == (130 if stopped else 1)
    summary = summary_of(tmp_path / "out")
    assert err.startswith("byte_lm: Cannot write to standard output: Broken pipe.")
    assert f"Ended after step {summary['steps']}" in err
    assert err.count("\n") == 1


@pytest.mark.deep
def test_a_disk_that_fills_ends_the_run_with_what_there_is_and_code_1(tmp_path):
    words = ["--steps", "400", "--shards", "2"]
    # No file may grow beyond 16 blocks of 512 bytes, nor would one of a compiled program.
    without_cache = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    process = start(tmp_path, *words, shell='ulimit -f 16; exec "$@"', env=without_cache)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    metrics = tmp_path / "out" / "metrics.jsonl"
    assert err.startswith(f"byte_lm: Cannot write to {metrics.relative_to(tmp_path)}: ")
    assert err.count("\n") == 1
    # Whole lines, and as many as there was room for.
    written = read_metrics(tmp_path / "out")
    assert 8192 - 400 < metrics.stat().st_size <= 8192
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["steps"] == len(written) + 1 < 400
    assert f"after {summary['steps']:,} steps: Cannot write to" in out
    # The picture is too large, and half a picture is not left behind.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "metrics.jsonl",
        "options.json",
        "summary.json",
    ]


@pytest.mark.deep
def test_a_run_stopped_within_its_proof_does_not_claim_one(tmp_path, monkeypatch, capsys):
    compare = running.compare

    def stopped_meanwhile(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return compare(*given)

    monkeypatch.setattr(running, "compare", stopped_meanwhile)
    assert run(tmp_path, "out", "--shards", 2, "--steps", 3) == 130
    said = capsys.readouterr().out
    assert "as you asked" in said
    assert "trained as one does" not in said
    assert "Not shown" in said


@pytest.mark.deep
def test_a_second_signal_ends_the_process_at_once():
    script = """
import os, signal
from examples.byte_lm.processes import ALONE
from examples.byte_lm.stopping import Stopping
with Stopping(ALONE) as stopping:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.agree()
    print("kept", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("not reached")
"""
    words = [sys.executable, "-c", script]
    ran = subprocess.run(words, env=bare_environment(), capture_output=True, text=True)
    assert ran.returncode == 130
    assert ran.stdout == "kept\n"
    assert ran.stderr.strip().startswith("byte_lm: stopped at once;")


class Told(Processes):
    """Processes of which another one has had a signal, and this one not yet."""

    def largest(self, value: int) -> int:
        return max(value, signal.SIGTERM)


def test_a_signal_that_comes_after_that_of_another_process_is_the_first():
    with Stopping(Told()) as stopping:
        assert stopping.agree()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.signal == signal.SIGTERM


def test_signals_that_are_ignored_stay_ignored_and_the_others_come_back():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handler = signal.getsignal(signal.SIGINT)
        with Stopping(ALONE):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
