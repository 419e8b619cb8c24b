"""However a run ends, it says so, writes what it can, and leaves with the code it documents."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.byte_lm import run as running
from examples.byte_lm.__main__ import main
from examples.byte_lm.processes import ALONE
from examples.byte_lm.stopping import Stopping
from tests.examples.byte_lm.small import (
    PATIENCE,
    SMALL,
    bare_environment,
    check_picture,
    read_metrics,
    run,
    small_text,
    start,
    summary_of,
    wait_for_steps,
)

ENDLESS = ["--steps", "1000000", "--shards", "2"]


@pytest.mark.deep
@pytest.mark.parametrize("module", ["tyro", "matplotlib.figure"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
@pytest.mark.parametrize("both", [False, True])
def test_ctrl_c_reaches_tee_too_and_everything_is_still_written(tmp_path, both):
    process = start(tmp_path, *ENDLESS, stderr=subprocess.STDOUT if both else subprocess.PIPE)
    wait_for_steps(process, tmp_path / "out")
    assert process.stdout is not None
    process.stdout.close()  # tee is gone
    process.send_signal(signal.SIGINT)
    err = process.stderr.read() if process.stderr else None
    assert process.wait(PATIENCE) == 130
    summary = summary_of(tmp_path / "out")
    if err is not None:
        assert "Traceback" not in err
        assert f"Ended after step {summary['steps']}" in err


@pytest.mark.deep
def test_a_reader_that_leaves_ends_the_run_with_everything_written(tmp_path):
    process = start(tmp_path, *ENDLESS)
    wait_for_steps(process, tmp_path / "out")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(PATIENCE) == 1
    summary_of(tmp_path / "out")
    assert err.startswith("byte_lm: Cannot write to standard output: Broken pipe.")
    assert err.count("\n") == 1


@pytest.mark.deep
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_stdout_is_said_and_nothing_is_trained(tmp_path):
    with Path("/dev/full").open("w") as full:
        process = start(tmp_path, "--steps", "3", stdout=full)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.startswith("byte_lm: Cannot write to standard output: No space left on device.")
    assert err.count("\n") == 1
    assert read_metrics(tmp_path / "out") == []


@pytest.mark.deep
def test_a_closed_stdout_and_stderr_do_no_harm(tmp_path):
    words = ["--steps", "3", "--shards", "2"]
    process = start(tmp_path, *words, shell='exec "$@" >&- 2>&-')
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert [line["step"] for line in read_metrics(tmp_path / "out")] == [1, 2, 3]


@pytest.mark.deep
def test_a_disk_that_fills_ends_the_run_with_what_there_is_and_code_1(tmp_path):
    words = ["--steps", "400", "--shards", "2"]
    # No file may grow beyond 16 blocks of 512 bytes.
    process = start(tmp_path, *words, shell='ulimit -f 16; exec "$@"')
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
def test_a_write_that_fails_after_the_training_is_code_1(tmp_path, capsys):
    out = tmp_path / "out"
    write = running.draw_curves

    def draw_where_a_folder_is(*arguments: Any) -> bytes:
        (out / "curves.png").mkdir()
        (out / "curves.png" / "full").touch()
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "draw_curves", draw_where_a_folder_is)
        assert run(tmp_path, "out", "--steps", 3, "--shards", 2) == 1
    said = capsys.readouterr()
    assert "curves.png: Is a directory" in said.err or "curves.png: Directory not empty" in said.err
    assert "written   metrics.jsonl, options.json, summary.json in" in said.out


@pytest.mark.deep
@pytest.mark.parametrize(
    "name", ["字" * 60 + " $a_{ $b.txt", b"not \xff utf-8\n.txt"], ids=["signs", "bytes"]
)
def test_any_name_of_a_file_can_be_trained_on(tmp_path, capfd, name):
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    with open(path, "wb") as file:
        file.write(small_text(tmp_path).read_bytes())
    out = tmp_path / "out"
    words = [*SMALL, "--steps", "3", "--shards", "2", "--data", os.fsdecode(path)]
    assert main([*words, "--out", str(out)]) == 0
    assert capfd.readouterr().err == ""
    check_picture(out / "curves.png")


@pytest.mark.deep
def test_an_unknown_backend_of_matplotlib_does_no_harm():
    unknown = {**bare_environment(), "MPLBACKEND": "no_such_backend"}
    words = [sys.executable, "-c", "import examples.byte_lm.plots"]
    assert subprocess.run(words, env=unknown).returncode == 0


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
