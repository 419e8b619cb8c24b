"""A small run to test with: a text that is quickly learnt, a model that compiles in a second."""

import json
import os
import sys
from pathlib import Path

import jax

from examples.byte_lm.options import TrainOptions

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "examples.byte_lm"]
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
