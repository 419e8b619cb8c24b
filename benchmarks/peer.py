"""Candidates of another framework: a process in an environment of its own, told when to step.

Its script stands in `peers/` and imports nothing of ours. It is started with one argument, JSON of
what to solve, and answers the first line with its versions. From then on every line is one turn:
``{"variant": ..., "steps": ...}`` is answered with ``{"seconds": ..., "sample": [...]}``. Between
lines it sleeps; at the end of its input it leaves.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.baselines import Turn
from crossshard.errors import CrossshardError

_SCRIPTS = Path(__file__).parent / "peers"
_SECONDS_TO_LEAVE = 20
_SECONDS_TO_LEAVE_IN_HASTE = 2


class PeerError(CrossshardError):
    """A peer cannot be run here, or has left while it was needed."""


class Peer:
    """A process that takes turns; a context, so that none outlives the bench.

    Args:
      name: of the framework.
      python: the interpreter of its environment.
      script: its file in ``peers/``.
      problem: what it is to solve, as JSON can hold it.

    Raises:
      PeerError: it cannot be started, now or when it is first asked.
    """

    def __init__(self, name: str, python: Path, script: str, problem: Mapping[str, Any]) -> None:
        self._name = name
        if not python.exists():
            raise PeerError(f"{name}, since there is no {python}. Run make bench-peers to have it.")
        # A file and not a pipe: nobody reads along, and a full pipe would stop the peer.
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed on exit
        self._process = subprocess.Popen(
            [python, _SCRIPTS / script, json.dumps(problem)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=_environment(),
            # Ctrl-C is for us, who then let it go in good order.
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_LEAVE if kind is None else _SECONDS_TO_LEAVE_IN_HASTE)
        except subprocess.TimeoutExpired:
            # With the ranks that it has started: it leads a session of its own.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()

    def versions(self) -> dict[str, str]:
        """What it runs with; waits until it is ready."""
        return self._ask({"variant": "versions"})["versions"]

    def run(self, variant: str, steps: int) -> Turn:
        """Let it take so many steps in one of its ways."""
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


class PeerCandidate:
    """One of a peer's ways to take a step."""

    def __init__(self, name: str, peer: Peer, variant: str) -> None:
        self.name = name
        self._peer = peer
        self._variant = variant

    def run(self, steps: int) -> Turn:
        """Let the peer take so many steps."""
        return self._peer.run(self._variant, steps)


def _environment() -> dict[str, str]:
    """Ours without what would lead its Python to our packages, and without its chatter."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**ours, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
