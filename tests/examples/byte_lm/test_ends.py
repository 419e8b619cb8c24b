"""However a run ends, it says so, writes what it can, and leaves with the code it documents."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from examples.byte_lm import run as running
from examples.byte_lm.__main__ import main
from examples.byte_lm.stopping import Stopping
from tests.examples.byte_lm.small import (
    COMMAND,
    PATIENCE,
    SMALL,
    bare_environment,
    check_picture,
    quick_environment,
    read_metrics,
    small_text,
)

ENDLESS = [*SMALL, "--steps", "1000000", "--shards", "2"]


def start(folder: Path, *words: str, shell: str | None = None, **options: Any) -> subprocess.Popen:
    """The command in a folder, its output in pipes unless told otherwise.

    With a line for a shell, it is that line's ``"$@"``.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given = [*COMMAND, "--data", str(small_text(folder)), "--out", "out", *words]
    given = given if shell is None else ["sh", "-c", shell, "sh", *given]
    environment = {**quick_environment(), **options.pop("env", {})}
    return subprocess.Popen(given, cwd=folder, env=environment, **{**pipes, **options})


def wait_for_steps(process: subprocess.Popen, out: Path, number: int = 3) -> None:
    """Until so many steps are written down."""
    until = time.monotonic() + PATIENCE
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def check_all_is_written(out: Path) -> dict[str, Any]:
    """The summary, once it agrees with the metrics and a picture lies beside it."""
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ended"] == "stopped"
    assert summary["steps"] == len(read_metrics(out))
    check_picture(out / "curves.png")
    return summary


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step_with_all_that_belongs_to_it(tmp_path, number):
    process = start(tmp_path, *ENDLESS)
    wait_for_steps(process, tmp_path / "out")
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    summary = check_all_is_written(tmp_path / "out")
    assert summary["held_out_bits_per_byte"]
    why = ", as you asked" if number == signal.SIGINT else f", by {number.name}"
    assert f"after {summary['steps']:,} steps{why}" in out
    assert err == ""


# What is imported on the way to the first line: tyro and JAX long before, the last ones shortly.
@pytest.mark.deep
@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("tyro", signal.SIGINT),
        ("jax._src.core", signal.SIGTERM),
        ("flax.nnx", signal.SIGINT),
        ("matplotlib.figure", signal.SIGINT),
    ],
)
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
    process = start(tmp_path, *SMALL, env={"PYTHONPATH": path})
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert out == ""
    assert err.strip() == "byte_lm: stopped before training began; nothing was written."
    assert not (tmp_path / "out").exists()


@pytest.mark.deep
def test_ctrl_c_reaches_tee_of_both_streams_too(tmp_path):
    process = start(tmp_path, *ENDLESS, stderr=subprocess.STDOUT)
    wait_for_steps(process, tmp_path / "out")
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    check_all_is_written(tmp_path / "out")


@pytest.mark.deep
def test_ctrl_c_reaches_tee_too_and_everything_is_still_written(tmp_path):
    process = start(tmp_path, *ENDLESS)
    wait_for_steps(process, tmp_path / "out")
    assert process.stdout is not None
    process.stdout.close()  # tee is gone
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(PATIENCE) == 130
    summary = check_all_is_written(tmp_path / "out")
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
    check_all_is_written(tmp_path / "out")
    assert err.startswith("byte_lm: Cannot write to standard output: Broken pipe.")
    assert err.count("\n") == 1


@pytest.mark.deep
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_stdout_is_said_and_nothing_is_trained(tmp_path):
    with Path("/dev/full").open("w") as full:
        process = start(tmp_path, *SMALL, "--steps", "3", stdout=full)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.startswith("byte_lm: Cannot write to standard output: No space left on device.")
    assert err.count("\n") == 1
    assert read_metrics(tmp_path / "out") == []


@pytest.mark.deep
def test_a_closed_stdout_and_stderr_do_no_harm(tmp_path):
    words = [*SMALL, "--steps", "3", "--shards", "2"]
    process = start(tmp_path, *words, shell='exec "$@" >&- 2>&-')
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert [line["step"] for line in read_metrics(tmp_path / "out")] == [1, 2, 3]


@pytest.mark.deep
def test_a_disk_that_fills_ends_the_run_with_what_there_is_and_code_1(tmp_path):
    words = [*SMALL, "--steps", "400", "--shards", "2"]
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
    out, data = tmp_path / "out", small_text(tmp_path)
    write = running.draw_curves

    def draw_where_a_folder_is(*arguments: Any) -> bytes:
        (out / "curves.png").mkdir()
        (out / "curves.png" / "full").touch()
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "draw_curves", draw_where_a_folder_is)
        words = [*SMALL, "--steps", "3", "--shards", "2", "--data", str(data), "--out", str(out)]
        assert main(words) == 1
    said = capsys.readouterr()
    assert "curves.png: Is a directory" in said.err or "curves.png: Directory not empty" in said.err
    assert "written   metrics.jsonl, options.json, summary.json in" in said.out


@pytest.mark.deep
def test_runs_that_start_in_the_same_second_get_a_folder_each(tmp_path):
    data = str(small_text(tmp_path))
    words = [*COMMAND, "--data", data, *SMALL, "--steps", "2", "--shards", "1"]
    # As their clocks say: both start at the same time.
    (tmp_path / "sitecustomize.py").write_text("""
import datetime

class Stopped(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

datetime.datetime = Stopped
""")
    path = os.pathsep.join([str(tmp_path), bare_environment()["PYTHONPATH"]])
    environment = {**bare_environment(), "PYTHONPATH": path}
    both = [
        subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait(PATIENCE) for process in both] == [0, 0]
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == ["2026-01-02-030405", "2026-01-02-030405-2"]
    assert all(len(read_metrics(folder)) == 2 for folder in folders)


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
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("JAX_PLATFORMS", "cuda", "JAX_PLATFORMS=cuda"),
        ("NPROC", "²", "NPROC.* 1 to 4096.*'²'"),
        ("NPROC", "100000", "NPROC.* 1 to 4096.*'100000'"),
        ("NPROC", "0", "NPROC.* 1 to 4096.*'0'"),
    ],
)
def test_an_environment_it_cannot_run_in_is_one_line_and_code_2(tmp_path, variable, value, says):
    process = start(tmp_path, *SMALL, "--steps", "3", env={variable: value})
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith("byte_lm: ")
    assert err.count("\n") == 1
    assert re.search(says, err), err
    assert not (tmp_path / "out").exists()


@pytest.mark.deep
def test_an_unknown_backend_of_matplotlib_does_no_harm():
    unknown = {**bare_environment(), "MPLBACKEND": "no_such_backend"}
    words = [sys.executable, "-c", "import examples.byte_lm.plots"]
    assert subprocess.run(words, env=unknown).returncode == 0


def test_an_optimizer_that_fails_on_this_model_alone_is_refused_before_training(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "only_small_ones.py").write_text(
        "import optax\n"
        "def sgd():\n"
        "    def update(updates, state, params=None):\n"
        "        if any('embedding' in name for name in updates):\n"
        "            raise ValueError('no embeddings, please')\n"
        "        return optax.sgd(0.1).update(updates, state, params)\n"
        "    return optax.GradientTransformation(optax.sgd(0.1).init, update)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--data", str(small_text(tmp_path)), "--out", str(tmp_path / "out"), *SMALL]
    assert main([*words, "--optimizer", "only_small_ones:sgd"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "failed in a trial step on this model: ValueError: no embeddings" in said.err
    assert not (tmp_path / "out").exists()


def test_a_run_stopped_within_its_proof_does_not_claim_one(tmp_path, monkeypatch, capsys):
    prove = running.Proof.of_run

    def stopped_meanwhile(self: Any, *given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return prove(self, *given)

    monkeypatch.setattr(running.Proof, "of_run", stopped_meanwhile)
    words = ["--data", str(small_text(tmp_path)), "--out", str(tmp_path / "out"), *SMALL]
    assert main([*words, "--shards", "2", "--steps", "3"]) == 130
    said = capsys.readouterr().out
    assert "as you asked" in said
    assert "trained as one does" not in said
    assert "Not shown" in said


def test_a_second_signal_skips_what_is_computed_and_the_rest_is_written(
    tmp_path, monkeypatch, capsys
):
    def endless(*arguments: Any, **options: Any) -> list[float]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("was not skipped")

    words = ["--data", str(small_text(tmp_path)), "--out", str(tmp_path / "out"), *SMALL]
    monkeypatch.setattr(running.HeldOut, "bits_per_byte", endless)
    assert main([*words, "--shards", "2", "--steps", "3"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["ended"] == "stopped"
    assert summary["held_out_bits_per_byte"] == []


def test_a_third_signal_ends_the_process_at_once():
    script = """
import os, signal
from examples.byte_lm.stopping import Stopping
with Stopping() as stopping:
    stopping.begin()
    with stopping.skippable():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.asked
        os.kill(os.getpid(), signal.SIGINT)
        print("not reached")
    print("kept", flush=False)
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
        with Stopping():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
