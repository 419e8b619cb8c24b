"""Differences: what processes tell each other of themselves, as text, and what is not the same."""

import itertools
import json
from collections.abc import Mapping, Sequence

from crossshard import _jax
from crossshard.tools.diagnosis.report import Finding

_FOLDER = "crossshard/doctor"
_calls = itertools.count(1)
# A process's own, or nothing that a program depends on.
_OWN = ("JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG")


def findings(facts: Mapping[str, str], seconds: float) -> list[Finding]:
    """What this process has other than process 0: versions and settings, by name."""
    facts = {name: each for name, each in facts.items() if name not in _OWN}
    first = _of_the_first("facts", facts, seconds)
    if not isinstance(first, dict):
        return []
    _, own = _jax.processes_of_job()
    other = sorted(each for each in {*facts, *first} if facts.get(each) != first.get(each))
    return [
        Finding(
            "other than process 0",
            f"Process {own} has {name}={facts.get(name, '(nothing)')}, and process 0 "
            f"{str(first.get(name, '(nothing)'))!r:.100}. Give all processes the same.",
        )
        for name in other
    ]


def own(found: Sequence[Finding], seconds: float) -> list[Finding]:
    """The findings that process 0 does not have; all of them in process 0."""
    sentences = _of_the_first("found", [each.sentence for each in found], seconds)
    _, process = _jax.processes_of_job()
    if process == 0 or not isinstance(sentences, list):
        return list(found)
    return [each for each in found if each.sentence not in sentences]


def _of_the_first(what: str, value: object, seconds: float) -> object:
    """What process 0 has told; ``None`` alone, in process 0, or if it does not come."""
    if not _jax.has_coordinator():
        return None
    key = f"{_FOLDER}/{what}/{next(_calls)}"
    _, own = _jax.processes_of_job()
    if own == 0:
        _jax.tell_processes(key, json.dumps(value))
        return None
    try:
        return json.loads(_jax.told_by_processes(key, seconds) or "null")
    except ValueError:
        return None
