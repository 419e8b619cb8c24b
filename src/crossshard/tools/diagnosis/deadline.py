"""Deadline: what may never end is run in a thread, and left there when its time is over.

The processes of a job tell each other what they have entered, to name the one that is missing.
"""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from crossshard import _jax
from crossshard._text import listed

_ENTERED, _WAITING = "crossshard/doctor/entered", "crossshard/doctor/waiting"
# For the others to find, too, that they wait in vain.
_PATIENCE = 2.0
_entered = itertools.count(1)


class LateError(Exception):
    """What was to be run has not come to an end in time; it may still go on."""


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What a function returns or raises.

    Raises:
      LateError: it has not come to an end after so many seconds.

    >>> within(60, lambda: 3)
    3
    """
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="crossshard doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise LateError
    return found[0]


def enter() -> int:
    """Tell the other processes that this one enters something that all enter; its number."""
    number = next(_entered)
    if _jax.has_coordinator():
        _jax.tell_again(f"{_ENTERED}/{_jax.processes_of_job()[1]}", str(number))
    return number


def late(what: str, number: int, seconds: float) -> str:
    """A sentence on something that has not ended, and on the processes that have not entered it."""
    sentence = f"{what} has not ended in {seconds:g} seconds"
    processes, own = _jax.processes_of_job()
    if processes == 1:
        return f"{sentence}. See what else runs on this machine, and run it again alone."

    def ask() -> tuple[str, str]:
        _jax.tell_again(f"{_WAITING}/{own}", str(number))
        time.sleep(_PATIENCE)
        return _behind(_ENTERED, number, processes), _behind(_WAITING, number, processes)

    try:
        behind, still = within(seconds, ask)
    except Exception:  # nobody answers
        return f"{sentence}, and the coordinator does not answer. See what process 0 does."
    if behind:
        return f"{sentence}: process {behind} has not entered it. See what that one does."
    if still:
        return f"{sentence}: process {still} has entered it and stands still. See its log."
    return (
        f"{sentence}, and all processes wait in it: they do not reach each other. Open all ports "
        f"between their hosts, or name the interface, as in NCCL_SOCKET_IFNAME=eth0."
    )


def _behind(folder: str, number: int, processes: int) -> str:
    """The processes that have told no number as large as this one."""
    told = _jax.told_below(f"{folder}/")
    latest = {process: told.get(str(process), "") for process in range(processes)}
    has_told = lambda text: text.isdecimal() and int(text) >= number
    return listed([str(each) for each, text in latest.items() if not has_told(text)], 10)
