"""Progress: how far this process is, counted in calls that all processes make."""

import collections
import contextlib
import re
from collections.abc import Iterator

from crossshard import _check
from crossshard._hash import crc32
from crossshard.errors import ArgumentError

# What other processes take for a name, too.
NAME = re.compile(r"[a-z][a-z_]{0,19}")
NO_ROWS = "nothing"
_LONGEST = 140


class Progress:
    """The calls that this process has entered; the others have entered as many, or will."""

    def __init__(self) -> None:
        self.calls: int = 0
        self.latest: str = "nothing"
        # The calls that are under way, one within another.
        self.inside: int = 0
        # Whether a job of one process is watched, so that its steps are entered, too.
        self.is_alone: bool = False
        # The rows that the last step was given, in one word, and the first call with them.
        self.rows: tuple[str, int] = (NO_ROWS, 0)
        self._of_name: collections.Counter[str] = collections.Counter()

    def enter(self, name: str) -> None:
        """Note a call."""
        self._of_name[name] += 1
        self.latest = f"{name} {self._of_name[name]}"
        self.calls += 1

    def take(self, rows: str) -> None:
        """Note the rows of the latest call, of which others see one word."""
        if len(rows) > _LONGEST:
            rows = f"{rows[:_LONGEST]}...{crc32(rows)}"
        if rows != self.rows[0]:
            self.rows = (rows, self.calls)

    def withdraw(self, name: str) -> None:
        """Take a call back that has failed, and that the others may wait for."""
        self._of_name[name] -= 1
        self.calls -= 1


PROGRESS = Progress()


@contextlib.contextmanager
def entering(name: str = "step") -> Iterator[None]:
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
    PROGRESS.enter(name)
    PROGRESS.inside += 1
    try:
        yield
    except BaseException:
        PROGRESS.withdraw(name)
        raise
    finally:
        PROGRESS.inside -= 1
