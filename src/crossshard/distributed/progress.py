"""Progress: how far this process is, counted in calls that all processes make."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from crossshard import _check
from crossshard._hash import crc32
from crossshard.distributed.judge import NAME, Report
from crossshard.errors import ArgumentError

_LONGEST = 140
# How many calls back others can see where this process went another way.
_REMEMBERED = 8


class Progress:
    """The calls that this process has entered; the others have entered as many, or will."""

    def __init__(self) -> None:
        # What others are told.
        self.now = Report(0)
        # How many calls of each name it has entered.
        self.of_name: collections.Counter[str] = collections.Counter()
        # The calls that are under way, one within another.
        self.inside = 0
        # Whether a job of one process is watched, so that its steps are entered, too.
        self.is_alone = False
        # For how many seconds others may wait in a call; ``None`` if nobody watches them.
        self.seconds: Callable[[str], float] | None = None

    def note(self, **changed: Any) -> None:
        """Change what others are told."""
        self.now = dataclasses.replace(self.now, **changed)

    def take(self, rows: str) -> None:
        """Note the rows of the latest call, of which others see one word."""
        if len(rows) > _LONGEST:
            rows = f"{rows[:_LONGEST]}...{crc32(rows)}"
        if rows != self.now.rows:
            self.note(rows=rows, rows_since=self.now.calls)


PROGRESS = Progress()


def entering(name: str = "step") -> AbstractContextManager[None]:
    """Tell the other processes that this one enters a step, which all of them must enter.

    Steps of ``make_train_step`` and functions of ``crossshard.shard`` tell it themselves. Write it
    around a step of your own that all processes take together, so that a process which does not
    come is named.

    Args:
      name: what to call it, in small letters and underscores.

    Raises:
      ArgumentError: another name.

    >>> with entering("step"):
    ...     pass
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ArgumentError(
            f"A name must have 1 to 20 small letters and underscores, as train_step; got "
            f"{_check.shown(name)}."
        )
    return _inside(name, stays=True)


def for_now(name: str) -> AbstractContextManager[None]:
    """As ``entering``, for a call that not all processes need to make: it counts until it ends."""
    return _inside(name, stays=False)


@contextlib.contextmanager
def _inside(name: str, *, stays: bool) -> Iterator[None]:
    before, of_name = PROGRESS.now, PROGRESS.of_name
    PROGRESS.of_name = of_name + collections.Counter([name])
    PROGRESS.note(
        calls=before.calls + 1,
        latest=f"{name} {PROGRESS.of_name[name]}",
        before=", ".join(before.trail[1 - _REMEMBERED :]),
        waits=0,
    )
    PROGRESS.inside += 1
    try:
        yield
    except BaseException:
        stays = False
        raise
    finally:
        PROGRESS.inside -= 1
        if not stays:
            # The others may wait for a call that has failed.
            PROGRESS.now, PROGRESS.of_name = before, of_name


@contextlib.contextmanager
def waiting(name: str, within: str = "") -> Iterator[None]:
    """Tell the others that this process waits for all of them, within what it has entered.

    Args:
      name: the call that it enters, unless it is in one.
      within: what they may take longer for than for the call, by its name among the timeouts.
    """
    name = name.lower().replace(" ", "_")[:20]
    with contextlib.nullcontext() if PROGRESS.inside else entering(name):
        before = PROGRESS.now.inner
        PROGRESS.note(waits=PROGRESS.now.waits + 1, inner=within or before)
        try:
            yield
        finally:
            PROGRESS.note(inner=before)
