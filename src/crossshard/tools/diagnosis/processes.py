"""Processes: which train together, what they have that others have not, and who keeps them waiting.

What may never end is run in a thread, and left there when its time is over. The processes of a job
tell each other what they have entered, to name the one that is missing.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from crossshard import _jax
from crossshard._text import listed
from crossshard.distributed.initialize import initialize
from crossshard.distributed.job import ADDRESS, NUMBER, OWN, Job, find_job, split_address
from crossshard.errors import CrossshardError
from crossshard.tools.diagnosis.report import Finding
from crossshard.tools.quiet import quiet

# What gRPC reads; in capitals it does not.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
# A process's own, or nothing that a program depends on.
_OF_ONE = ("JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG")
_FIRST, _ENTERED, _WAITING = (f"crossshard/doctor/{each}" for each in ("first", "in", "waiting"))
# For the others to find, too, that they wait in vain.
_PATIENCE = 2.0
_calls, _entered = itertools.count(1), itertools.count(1)


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


def find(timeout: float, *, meet: bool) -> tuple[Job, list[Finding]]:
    """The job that the environment describes, unless this process has met the others, and findings.

    Args:
      timeout: how many seconds a cluster's own service may take to answer, and the others to come.
      meet: whether to meet the others.
    """
    job = Job()
    if _jax.has_coordinator():
        return job, []
    try:
        job = find_job(timeout)
        if job.num_processes == 1:
            return job, []
        if proxy := _of_proxy(job):
            return job, [proxy]
        if meet:
            with quiet():
                # What stands still is named here, before the watch of the job ends the process.
                initialize(timeout=timeout, stall_timeout=max(1, 2 * timeout))
            return job, []
    except CrossshardError as error:
        return job, [Finding("job", str(error))]
    except Exception as error:  # whatever a cluster's detection raises
        first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        why = f"JAX cannot tell the job: {first:.300}. Set {ADDRESS}, {NUMBER} and {OWN}."
        return job, [Finding("job", why)]
    sentence = (
        f"{job.found_in} says that {job.num_processes} processes train together, but this one has "
        f"not met the others and trains alone. Call crossshard.distributed.initialize() before "
        f"the first JAX operation."
    )
    return job, [Finding("alone", sentence)]


def _of_proxy(job: Job) -> Finding | None:
    environ = os.environ
    host, _ = split_address(str(job.coordinator_address))
    name = next((each for each in _PROXIES if environ.get(each)), None)
    excepted = (environ.get("no_grpc_proxy") or environ.get("no_proxy") or "").split(",")
    if not name or any(each.strip() and host.endswith(each.strip()) for each in excepted):
        return None
    why = f"{name} is set, so JAX asks a proxy for the coordinator at {host}, and aborts when that"
    return Finding("proxy", f"{why} does not answer. Unset it, or set no_proxy={host}.")


def of_this_one(
    found: Iterable[Finding], facts: Mapping[str, str], seconds: float
) -> list[Finding]:
    """What is wrong in this process and not in process 0, which it may differ from.

    Args:
      found: what is wrong here.
      facts: versions and settings by name, which process 0 is to have, too.
      seconds: how long to wait for process 0.
    """
    found = list(found)
    facts = {name: each for name, each in facts.items() if name not in _OF_ONE}
    if not _jax.has_coordinator():
        return found
    key = f"{_FIRST}/{next(_calls)}"
    _, own = _jax.processes_of_job()
    if own == 0:
        _jax.tell_processes(key, json.dumps([facts, [each.sentence for each in found]]))
        return found
    try:
        first, sentences = json.loads(_jax.told_by_processes(key, seconds) or "[{}, []]")
    except ValueError:
        return found
    return [each for each in found if each.sentence not in sentences] + [
        Finding(
            "other than process 0",
            f"Process {own} has {name}={facts.get(name, '(nothing)')}, and process 0 "
            f"{str(first.get(name, '(nothing)'))!r:.100}. Give all processes the same.",
        )
        for name in sorted({*facts, *first})
        if first and facts.get(name) != first.get(name)
    ]
