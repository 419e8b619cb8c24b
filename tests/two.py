"""Two threads that stand for the processes of a job, for what these tell each other."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from crossshard.distributed import agreement


def told_by_two(monkeypatch: pytest.MonkeyPatch, call: Callable[[int], Any]) -> list[str]:
    """What each of two processes is told of a call, which gets its number: the error, or "taken".

    Steps that they run must have one shard: programs of two threads that wait for the same devices
    could wait for ever.
    """
    barrier, told, this = threading.Barrier(2, timeout=10), dict[int, Any](), threading.local()

    def exchange(name: str, text: str, *_: Any, **__: Any) -> tuple[str, str]:
        told[this.number] = name, text
        barrier.wait()
        (one, first), (other, second) = told[0], told[1]
        barrier.wait()
        assert one == other
        return first, second

    def run(number: int) -> str:
        this.number = number
        try:
            call(number)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "taken"

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as threads:
        patched.setattr(agreement, "exchange", exchange)
        patched.setattr(agreement, "processes_of", lambda mesh: (0, 1))
        return list(threads.map(run, range(2)))
