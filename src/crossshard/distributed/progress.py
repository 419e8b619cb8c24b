"""Progress: how far this process is, counted in calls that all processes make."""

import collections
import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from crossshard import _check
from crossshard._hash import crc32
from crossshard.errors import ArgumentError

# What other processes take for a name, too.
NAME = re.compile(r"[a-z][a-z_]{0,19}")
NO_ROWS = "nothing"
_LONGEST = 140
# How many calls back others can see where this process went another way.
_REMEMBERED = 8


class Progress:
    """The calls that this process has entered; the others have entered as many, or will."""

    def __init__(self) -> None:
        self.calls = 0
        # The latest calls, such as "step 7", the newest last.
        self.trail = ["nothing"]
        # How often this process has waited for the others within the latest call.
        self.waits = 0
        # Where it waits longer than the call says, such as "compile".
        self.inner = ""
        # The calls that are under way, one within another.
        self.inside = 0
        # Whether a job of one process is watched, so that its steps are entered, too.
        self.is_alone = False
        # For how many seconds others may wait in a call; ``None`` if nobody watches them.
        self.seconds: Callable[[str], float] | None = None
        # The rows that the last step was given, in one word, and the first call with them.
        self.rows = (NO_ROWS, 0)
        self._of_name: collections.Counter[str] = collections.Counter()

    @property
    def latest(self) -> str:
        """The latest call that was entered, such as ``"step 7"``."""
        return self.trail[-1]

    def enter(self, name: str) -> None:
        """Note a call."""
        self._of_name[name] += 1
        self.trail = [*self.trail[1 - _REMEMBERED :], f"{name} {self._of_name[name]}"]
        self.calls += 1
        self.waits = 0

    def take(self, rows: str) -> None:
        """Note the rows of the latest call, of which others see one word."""
        if len(rows) > _LONGEST:
            rows = f"{rows[:_LONGEST]}...{crc32(rows)}"
        if rows != self.rows[0]:
            self.rows = (rows, self.calls)

    def withdraw(self, name: str, waits: int) -> None:
        """Take a call back that has failed, and that the others may wait for."""
        label = f"{name} {self._of_name[name]}"
        self.trail = [each for each in self.trail if each != label] or ["nothing"]
        self._of_name[name] -= 1
        self.calls -= 1
        self.waits = waits


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
    waits = PROGRESS.waits
    PROGRESS.enter(name)
    PROGRESS.inside += 1
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        PROGRESS.inside -= 1
        if has_failed or not stays:
            PROGRESS.withdraw(name, waits)


@contextlib.contextmanager
def waiting(name: str, within: str = "") -> Iterator[None]:
    """Tell the others that this process waits for all of them, within what it has entered.

    Args:
      name: the call that it enters, unless it is in one.
      within: what they may take longer for than for the call, by its name among the timeouts.
    """
    name = name.lower().replace(" ", "_")[:20]
    with contextlib.nullcontext() if PROGRESS.inside else entering(name):
        before, PROGRESS.inner = PROGRESS.inner, within or PROGRESS.inner
        PROGRESS.waits += 1
        try:
            yield
        finally:
            PROGRESS.inner = before
