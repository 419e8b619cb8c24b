"""The output folder of a run: checked first, created later, used by one run only."""

import datetime
import itertools
import os
from pathlib import Path

from crossshard.errors import ArgumentError

_RUNS = Path("runs")


def check_free(asked: Path | None) -> None:
    """Raise unless the folder is new or empty and can be written to; creates nothing.

    Args:
      asked: the folder; ``None`` for a fresh one under ``runs/``.

    Raises:
      ArgumentError: not empty, not a folder, or cannot be created or written to.
    """
    out = asked or _RUNS
    try:
        if out.exists() and not out.is_dir():
            raise ArgumentError(f"{out} is not a folder. Name a new --out folder.")
        if asked and out.exists() and any(out.iterdir()):
            raise ArgumentError(
                f"{out} holds files, and files are not overwritten. Name a new --out folder."
            )
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:
        raise ArgumentError(cannot_write(out, error)) from None
    if not there.is_dir():
        raise ArgumentError(f"Cannot write to {out}: {there} is not a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ArgumentError(f"Cannot write to {out}: no permission to write in {there}.")


def make_folder(asked: Path | None) -> Path:
    """Create the folder; two runs that start in the same second get different ones.

    Raises:
      ArgumentError: the folder cannot be created.
    """
    if asked is None:
        return _make_fresh(_RUNS / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S"))
    try:
        asked.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(cannot_write(asked, error)) from None
    return asked


def _make_fresh(first: Path) -> Path:
    out = first
    for number in itertools.count(2):
        try:
            out.mkdir(parents=True)
            break
        except FileExistsError:
            out = first.with_name(f"{first.name}-{number}")
        except OSError as error:
            raise ArgumentError(cannot_write(out, error)) from None
    return out


def cannot_write(path: Path, error: OSError) -> str:
    """The sentence for an error of the operating system."""
    return f"Cannot write to {path}: {error.strerror}."
