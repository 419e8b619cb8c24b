"""Conclusion: from the evidence to faults, each once, with the parameters that have it."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from crossshard._text import listed
from crossshard.tools.verification import kinds
from crossshard.tools.verification.arithmetic import norm, rms
from crossshard.tools.verification.evidence import Case, Evidence, Leaf, joined
from crossshard.tools.verification.explain import (
    explain_copies,
    explain_simply,
    explain_together,
    explain_without,
    is_fine,
    is_sixteen_bit,
)
from crossshard.tools.verification.report import Fault, LeafReport, Verification

# Smaller than the largest leaf by so much, a gradient may be nothing but rounding.
_VANISHING = 1e-5
_ROUNDED = Fault(kinds.LOW_PRECISION, "rounded to 16 bits, as if it was reduced in them")
_FINE, _TOO_SMALL = "fine", "too small"
_OWN_STATISTICS = (
    "each shard normalises by the statistics of its own rows; one device would by those of all rows"
)


def conclude(evidence: Evidence) -> Verification:
    """What is wrong, in words."""
    found = _of_parameters(evidence)
    notes = list(evidence.notes)
    if None in found.values():
        notes.append(_OWN_STATISTICS)
    if evidence.counters:
        words = f"{evidence.counters}; the step reads it"
        for name, fault in found.items():
            if isinstance(fault, Fault):
                found[name] = Fault(kinds.COUNTER, words, ratio=fault.ratio)
    faults = [*_faults(found), *evidence.beside]
    if evidence.at_one_key.keys_are_equal:
        words = "random keys are equal on all shards: shards that swap rows leave the step as it is"
        # What a shared key does to the mean is no fault of its own.
        faults = [f for f in faults if f.kind not in (kinds.OTHER, kinds.SCALED)]
        faults.insert(0, Fault(kinds.KEYS_EQUAL, words))
    if evidence.samples > 1:
        notes.append(_of_noise(evidence, found))
    reports = tuple(_report(leaf, found[leaf.name]) for leaf in evidence.leaves)
    return Verification(evidence.number, evidence.rows, tuple(faults), reports, tuple(notes))


def with_flops(found: Verification, flops: tuple[float, float, float] | str) -> Verification:
    """With a fault if each shard computes with all rows, or a note if that is not known.

    Args:
      found: what is known.
      flops: as ``Measurement.flops`` returns them.
    """
    if isinstance(flops, str):
        return dataclasses.replace(found, notes=(*found.notes, *([flops] if flops else [])))
    many, one, part = flops
    if part >= 0.6 * one or many <= 0.9 * one:
        return found
    words = (
        f"the batch is not split: a shard computes {many / one:.2f} of what one device does with "
        f"all rows; with its own rows it would be {part / one:.2f}"
    )
    return dataclasses.replace(found, faults=(*found.faults, Fault(kinds.BATCH_NOT_SPLIT, words)))


def _of_parameters(evidence: Evidence) -> dict[str, Fault | str | None]:
    """A fault or a verdict for each; ``None`` for a difference that is one of statistics alone."""
    found: dict[str, Fault | str | None] = {}
    wrong: dict[str, Case] = {}
    largest = max(rms(np.stack([case.one for case in leaf.cases])) for leaf in evidence.leaves)
    for leaf in evidence.leaves:
        case = next((case for case in leaf.cases if not is_fine(case)), None)
        missing = evidence.at_one_key.without_effect.get(leaf.name)
        if missing and not (case and case.copies_differ):
            found[leaf.name] = explain_without(_case_of(leaf, missing[0]), missing)
        elif case is None:
            found[leaf.name] = _of_right(leaf)
        elif _is_too_small(leaf, largest):
            found[leaf.name] = _TOO_SMALL
        else:
            explain = explain_copies if case.copies_differ else explain_simply
            fault = _of_groups(leaf) or explain(case)
            if fault is None:
                wrong[leaf.name] = case
            else:
                found[leaf.name] = fault
    return found | _of_several(wrong, evidence.has_statistics)


def _case_of(leaf: Leaf, shard: int) -> Case:
    """That of the group of a shard."""
    return next(case for case in leaf.cases if shard in case.members)


def _of_noise(evidence: Evidence, found: Mapping[str, Fault | str | None]) -> str:
    """How exactly a random step was compared, and what was not."""
    words = (
        f"the step draws other random numbers on {evidence.number} shards than on one device, so "
        f"means of {evidence.samples} steps are compared"
    )
    off = lambda leaf: max(case.noise / max(norm(case.one), 1e-300) for case in leaf.cases)
    fine = [off(leaf) for leaf in evidence.leaves if found[leaf.name] == _FINE]
    hidden = [leaf.name for leaf in evidence.leaves if _is_hidden(leaf)]
    words += f", to within {100 * max(fine):.0f}% of an update" if fine else ""
    return words + (f"; noise hides that of {listed(hidden, 4)}" if hidden else "")


def _is_hidden(leaf: Leaf) -> bool:
    """Whether the updates of a parameter are smaller than what may be chance."""
    largest = lambda case: max(norm(case.update), norm(case.one))
    return any(case.is_random and case.noise >= largest(case) for case in leaf.cases)


def _of_right(leaf: Leaf) -> Fault | str:
    if _is_hidden(leaf):
        return _TOO_SMALL
    return _ROUNDED if is_sixteen_bit(leaf.cases[0]) else _FINE


def _is_too_small(leaf: Leaf, largest: float) -> bool:
    case = leaf.cases[0]
    floor = _VANISHING * largest * np.sqrt(len(case.one)) + case.noise
    return len(case.many) == 1 and max(norm(case.update), norm(case.one)) <= floor


def _of_groups(leaf: Leaf) -> Fault | None:
    mean = np.mean([case.one for case in leaf.cases], axis=0)
    every = all(case.close(copy, mean) for case in leaf.cases for copy in case.many)
    if len(leaf.cases) == 1 or not every:
        return None
    words = "the mean over all shards, not over each group: the groups are ignored"
    return Fault(kinds.GROUPS_IGNORED, words)


def _of_several(wrong: dict[str, Case], has_statistics: bool) -> dict[str, Fault | None]:
    """Explain parameters together, since it takes many numbers to tell the parts of a sum."""
    if not wrong:
        return {}
    first = next(iter(wrong.values())).members
    same_group = [case for case in wrong.values() if case.members == first]
    together = explain_together(joined(same_group), has_statistics)
    if together is not None and together.kind != kinds.OTHER:
        return dict.fromkeys(wrong, together)
    return {name: explain_together(case, has_statistics) for name, case in wrong.items()}


def _report(leaf: Leaf, found: Fault | str | None) -> LeafReport:
    case = leaf.cases[0]
    return LeafReport(
        name=leaf.name,
        shape=leaf.shape,
        ratio=case.ratio,
        residual=case.residual,
        tolerance=case.tolerance + case.noise / max(norm(case.one), 1e-300),
        verdict=found.kind if isinstance(found, Fault) else found or _FINE,
    )


def _faults(found: Mapping[str, Fault | str | None]) -> list[Fault]:
    """One fault for all parameters that have it."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, fault in found.items():
        if isinstance(fault, Fault):
            alike.setdefault((fault.kind, fault.shards), []).append(name)
    faults = []
    for names in alike.values():
        fault = found[names[0]]
        assert isinstance(fault, Fault)
        every = len(names) == len(found) > 1
        which = f"all {len(found)} parameters" if every else listed(names, 4)
        sentence = f"{which}: {fault.sentence}"
        faults.append(dataclasses.replace(fault, sentence=sentence, leaves=tuple(names)))
    return faults
