"""Candidates of another framework: a process with its own environment, controlled by pipe.

Its script is in `peers/` and does not import crossshard. It gets the problem as one argument, in
JSON, and answers the first line with its versions. Every later line is one turn:
``{"variant": ..., "steps": ...}`` is answered with ``{"seconds": ..., "sample": [...]}``. It sleeps
between lines and exits at the end of its input.
"""

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from benchmarks.baselines import Candidate, Turn
from crossshard.errors import CrossshardError

_SCRIPTS = Path(__file__).parent / "peers"
_SECONDS_TO_LEAVE = 20
_SECONDS_TO_LEAVE_IN_HASTE = 2


class PeerError(CrossshardError):
    """A baseline process cannot be started, or has ended too early."""


class Peer:
    """A process that takes turns; a context manager that ends it with the benchmark.

    Args:
      name: the name of the framework.
      python: the interpreter of its environment.
      script: its file in ``peers/``.
      problem: the problem to solve, as JSON values.

    Raises:
      PeerError: the process cannot be started, now or at the first question.
    """

    def __init__(self, name: str, python: Path, script: str, problem: Mapping[str, Any]) -> None:
        self._name = name
        if not python.exists():
            raise PeerError(f"{name}, since there is no {python}. Run make bench-peers.")
        # A file and not a pipe: nobody reads it, and a full pipe would block the process.
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed on exit
        self._process = subprocess.Popen(
            [python, _SCRIPTS / script, json.dumps(problem)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=_environment(),
            # Ctrl-C reaches only this process, which then ends the other one.
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_LEAVE if kind is None else _SECONDS_TO_LEAVE_IN_HASTE)
        except subprocess.TimeoutExpired:
            # With the ranks that it has started: it leads its own session.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()

    def versions(self) -> dict[str, str]:
        """Its versions; waits until it is ready."""
        return self._ask({"variant": "versions"})["versions"]

    def candidates(self, variants: Mapping[str, str]) -> list[Candidate]:
        """A candidate for each variant, by their names in tables; all are built now."""
        for variant in variants:
            # Now, so that a failure leaves out this peer only.
            self.run(variant, steps=0)
        return [PeerCandidate(name, self, variant) for variant, name in variants.items()]

    def run(self, variant: str, steps: int) -> Turn:
        """Let it take this many steps of one variant."""
        answer = self._ask({"variant": variant, "steps": steps})
        return Turn(answer["seconds"], answer["sample"])

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"{self._name}, which ended too early: {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it just ended.")


@dataclasses.dataclass(frozen=True)
class PeerCandidate:
    """One variant of a peer's step."""

    name: str
    peer: Peer
    variant: str

    def run(self, steps: int) -> Turn:
        """Let the peer take this many steps."""
        return self.peer.run(self.variant, steps)


def _environment() -> dict[str, str]:
    """Our environment variables without those of Python, and with less logging."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**ours, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
