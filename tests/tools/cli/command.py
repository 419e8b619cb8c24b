"""Runs the command `crossshard` in this interpreter, which has eight CPU devices already."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crossshard.tools.cli import main

# Seconds for a process, on a machine on which everything else happens, too.
PATIENCE = 240


def bare_environment(**changed: str) -> dict[str, str]:
    """Ours without what the tests' configuration sets for themselves, but the kind of device."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC"))}
    return {**ours, "JAX_PLATFORMS": "cpu", "TERM": "xterm-256color", **changed}


def process(
    folder: Path, *words: str, script: Path | None = None, platforms: str = "cpu", **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter of its own, with nothing set; as a module, or as a script."""
    return subprocess.run(
        [sys.executable, *(["-m", "crossshard.tools.cli"] if script is None else [script]), *words],
        cwd=folder,
        env=bare_environment(JAX_PLATFORMS=platforms),
        text=True,
        timeout=PATIENCE,
        **{"capture_output": True, **kwargs},
    )


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the command ended, as `subprocess.run` would tell it."""

    returncode: int
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class Command:
    """Calls ``main``, and keeps what it prints."""

    patch: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]

    def inside(self, folder: Path) -> "Command":
        """From now on in this folder, whose modules come first."""
        self.patch.chdir(folder)
        self.patch.syspath_prepend(folder)
        return self

    def __call__(self, *words: str) -> Ended:
        self.captured.readouterr()
        try:
            code = main(words)
        except SystemExit as leaving:  # argparse, after --help
            code = int(leaving.code or 0)
        return Ended(code, *self.captured.readouterr())
