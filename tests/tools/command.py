"""Runs the command `crossshard`, in an interpreter of its own or in this one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crossshard.tools.cli import main

ROOT = Path(__file__).parents[2]
# Seconds for a process, on a machine on which everything else happens, too.
PATIENCE = 240
AS_MODULE = (sys.executable, "-m", "crossshard.tools.cli")

Ended = subprocess.CompletedProcess[str]


def bare_environment(**changed: str) -> dict[str, str]:
    """Ours without what the tests' configuration sets for themselves, but the kind of device."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC"))}
    return {**ours, "JAX_PLATFORMS": "cpu", "TERM": "xterm-256color", **changed}


def process(folder: Path, *words: str, command: Any = AS_MODULE, **kwargs: Any) -> Ended:
    """The command in an interpreter of its own, with nothing set."""
    given = {"capture_output": True, "env": bare_environment(), "timeout": PATIENCE, **kwargs}
    return subprocess.run([*command, *words], cwd=folder, text=True, **given)


def program(*words: str, **kwargs: Any) -> str:
    """What a Python program prints, which must end well; with nothing set, too."""
    done = process(ROOT, *words, command=(sys.executable,), **{"timeout": 900, **kwargs})
    assert done.returncode == 0, done.stderr
    return done.stdout


class Command:
    """Calls ``main`` in a folder, whose modules come first, and keeps what it prints.

    A module that it imports stays, so each has a name of its own.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        self._captured = captured

    def __call__(self, *words: str) -> Ended:
        self._captured.readouterr()
        try:
            code = main(words)
        except SystemExit as leaving:  # argparse, after --help
            code = int(leaving.code or 0)
        return Ended(words, code, *self._captured.readouterr())
