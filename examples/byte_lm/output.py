"""The folder that a run writes to, checked before anything is made."""

import datetime
import os
from pathlib import Path

from crossshard.errors import ArgumentError


def check_free(asked: Path | None) -> Path:
    """The folder to write to, which is not there yet or empty; nothing is made.

    Args:
      asked: the folder; ``None`` for a fresh one under ``runs/``, named after the time.

    Raises:
      ArgumentError: it holds something, is not a folder, or cannot be made or written to.
    """
    out = _fresh(Path("runs")) if asked is None else asked
    try:
        if out.exists():
            if not out.is_dir():
                raise ArgumentError(f"{out} is not a folder. Name a new --out folder.")
            if any(out.iterdir()):
                raise ArgumentError(
                    f"{out} holds files already, and nothing is overwritten. Name a new --out "
                    f"folder."
                )
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:
        raise cannot_write(out, error) from None
    if not there.is_dir():
        raise ArgumentError(f"Cannot write to {out}: {there} is not a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ArgumentError(f"Cannot write to {out}: no permission to write in {there}.")
    return out


def _fresh(parent: Path) -> Path:
    name = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    names = (name if count == 1 else f"{name}-{count}" for count in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())


def cannot_write(path: Path, error: OSError) -> ArgumentError:
    """What to raise for an error of the operating system."""
    return ArgumentError(f"Cannot write to {path}: {error.strerror}.")
