"""Keeping: which checkpoints of a folder stay, and the deletion of the others."""

import math
import threading
from typing import Any

from crossshard import _check
from crossshard.checkpoints import manifest
from crossshard.checkpoints.files import read
from crossshard.checkpoints.folder import Folder
from crossshard.errors import ArgumentTypeError

# Beside a checkpoint's manifest. Who wants to keep a checkpoint can make the first file by hand.
_PINNED, _SCORE = "pinned", "score.txt"
# Of a number.
_MOST_BYTES = 64


class Keeping:
    """Deletes all checkpoints but the newest ones, the best ones, and those that are pinned.

    Args:
      folder: the folder.
      newest: how many of the newest ones stay.
      best: how many of those with the highest scores stay.
    """

    def __init__(self, folder: Folder, newest: int, best: int):
        self._folder, self._newest, self._best = folder, newest, best
        self._scores: dict[int, float | None] = {}
        self._deleting: list[threading.Thread] = []

    def too_many(self, numbers: list[int], damaged: set[int]) -> list[int]:
        """Those of these ascending numbers that do not stay."""
        good = [number for number in numbers if number not in damaged]
        oldest = good[-self._newest :][0]
        scored = [(score, number) for number in good if (score := self._score(number)) is not None]
        best = {number for _, number in sorted(scored, reverse=True)[: self._best]}
        return [
            number
            for number in numbers
            if number < oldest and number not in best and not self._note(number, _PINNED).exists()
        ]

    def delete(self, number: int) -> None:
        """Delete a checkpoint, in the background; it may be gone already.

        Raises:
          OSError: it cannot be deleted.
        """
        try:
            path = self._folder.take_out(number)
        except FileNotFoundError:
            return
        deleting = threading.Thread(target=self._folder.delete, args=(path,), name="crossshard")
        deleting.start()
        self._deleting.append(deleting)

    def wait(self) -> None:
        """Wait until all are deleted."""
        while self._deleting:
            self._deleting.pop().join()

    def _score(self, number: int) -> float | None:
        """The score of a checkpoint; ``None`` if it has none that is a number, or none counts."""
        if self._best and number not in self._scores:
            try:
                found = float(read(self._note(number, _SCORE), _MOST_BYTES))
            except (OSError, ValueError):
                found = math.nan
            self._scores[number] = None if math.isnan(found) else found
        return self._scores.get(number)

    def _note(self, number: int, name: str) -> Any:
        return self._folder.of(number) / manifest.FOLDER / name


def notes_of(score: Any, pin: Any) -> dict[str, str]:
    """What stands beside the manifest: texts by the names of their files.

    Raises:
      ArgumentTypeError: the score is no number, or ``pin`` no bool.
    """
    _check.flag("pin", pin)
    if score is None:
        return {_PINNED: ""} if pin else {}
    number: Any = None if isinstance(score, bool | str) else score
    try:
        number = float(number)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"score must be a number; got {type(score).__name__}.") from None
    return {_SCORE: repr(number), **({_PINNED: ""} if pin else {})}
