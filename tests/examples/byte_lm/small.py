"""A small run to test with: a text that is quickly learnt, a model that compiles in a second."""

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from examples.byte_lm.__main__ import main
from examples.byte_lm.options import TrainOptions

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "examples.byte_lm"]
LAUNCH = [sys.executable, "-m", "crossshard.tools.cli", "launch"]
SMALL = ["--layers", "1", "--width", "32", "--context", "16"]
# For a machine on which everything else happens, too.
PATIENCE = 240


def small_text(folder: Path) -> Path:
    """A file of some thousand bytes in which the next one can be told."""
    path = folder / "text.txt"
    path.write_text("".join(f"{n} sheep jumped over {n % 7} fences.\n" for n in range(600)))
    return path


def small_options(folder: Path, **changes: object) -> TrainOptions:
    """Options for a run on it, with its output below the same folder."""
    given: dict[str, object] = {
        "data": small_text(folder),
        "out": folder / "out",
        "layers": 1,
        "width": 32,
        "context": 16,
        "steps": 6,
        "shards": 4,
        **changes,
    }
    return TrainOptions(**given)  # type: ignore[arg-type]


def bare_environment() -> dict[str, str]:
    """Ours without what the tests' configuration sets for themselves, but the kind of device."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC"))}
    path = os.pathsep.join([str(ROOT), ours.get("PYTHONPATH", "")])
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {
        **ours,
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        # As in this process, or their bits would differ.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"],
        "XLA_FLAGS": " ".join(flags),
        "TERM": "xterm-256color",
        "COLUMNS": "100",
    }


def quick_environment() -> dict[str, str]:
    """The same, where programs that these tests have compiled already are not compiled again.

    For one process at a time, since two may write and read the same file.
    """
    folder = jax.config.jax_compilation_cache_dir
    assert folder is not None
    return {
        **bare_environment(),
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def read_metrics(out: Path) -> list[dict]:
    """What a run wrote down, step by step."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_picture(path: Path) -> None:
    """That it is one, and not an empty one."""
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def run(folder: Path, out: str, *words: object) -> int:
    """The command in this process."""
    given = ["--data", small_text(folder), "--out", folder / out, *SMALL, *words]
    return main(list(map(str, given)))


def start(
    folder: Path,
    *words: str,
    out: str = "out",
    launch: list[str] | None = None,
    shell: str | None = None,
    **options: Any,
) -> subprocess.Popen[str]:
    """The command in a process of its own, its output in pipes unless told otherwise.

    Args:
      folder: where it runs.
      words: those of the command.
      out: the output folder.
      launch: the words of a launcher of several processes.
      shell: a line for a shell, whose ``"$@"`` the command is.
      options: for ``Popen``; ``env`` adds to the environment.
    """
    given = [*COMMAND, "--data", str(small_text(folder)), "--out", out, *SMALL, *words]
    given = [*LAUNCH, *launch, "--", *given] if launch else given
    given = ["sh", "-c", shell, "sh", *given] if shell else given
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    usual = bare_environment() if launch else quick_environment()
    environment = {**usual, **options.pop("env", {})}
    return subprocess.Popen(given, cwd=folder, env=environment, **{**pipes, **options})


def wait_for_steps(process: subprocess.Popen[str], out: Path, number: int = 3) -> None:
    """Until so many steps are written down."""
    until = time.monotonic() + PATIENCE
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def summary_of(out: Path, ended: str = "stopped") -> dict[str, Any]:
    """The summary, once it agrees with the metrics and a picture is beside it."""
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ended"] == ended
    assert summary["steps"] == len(read_metrics(out))
    check_picture(out / "curves.png")
    return summary


def numbers(out: Path) -> list[int]:
    """The complete checkpoints that --resume may take; others may be beside them."""
    names = (path.name for path in (out / "checkpoints").iterdir())
    return sorted(int(name) for name in names if name.isdigit())


def saved_hashes(out: Path, number: int, of: str = "") -> dict[str, str]:
    """The hashes of the arrays of a checkpoint whose paths begin so."""
    manifest = out / "checkpoints" / f"{number:08}" / "manifest" / "manifest.json"
    leaves = json.loads(manifest.read_text())["leaves"]
    found = {leaf["path"]: leaf["hash"] for leaf in leaves if leaf["path"].startswith(of)}
    assert found
    return found


def own_loss(monkeypatch: pytest.MonkeyPatch, job: Any) -> None:
    """Say that each shard's own loss is meant, as one that is faulty on purpose is no mean."""
    own = functools.partial(job.make_train_step, loss_over="shard")
    monkeypatch.setattr(job, "make_train_step", own)
