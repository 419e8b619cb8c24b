"""Conclusion: from the evidence to faults, each once, with the leaves that have it."""

import numpy as np

from crossshard._text import listed
from crossshard.tools.verification import kinds
from crossshard.tools.verification.arithmetic import rms
from crossshard.tools.verification.evidence import Evidence, LeafEvidence, StateEvidence
from crossshard.tools.verification.explain import (
    ROUNDING,
    Case,
    Explanation,
    explain_copies,
    explain_simply,
    explain_together,
    is_fine,
    is_sixteen_bit,
    norm,
)
from crossshard.tools.verification.report import Fault, LeafReport, Verification

# Smaller than the largest leaf by so much, a gradient may be nothing but rounding.
_VANISHING = 1e-5
_ROUNDED = Explanation(kinds.LOW_PRECISION, "rounded to 16 bits, as if it was reduced in them")
_FINE, _TOO_SMALL = "fine", "too small"


def conclude(evidence: Evidence, flops: tuple[float, float, float] | None = None) -> Verification:
    """What is wrong, in words.

    Args:
      evidence: what was measured.
      flops: operations of a device: on N shards, alone with all rows, alone with a shard's rows.
    """
    notes = list(evidence.notes)
    faults, reports = _of_parameters(evidence, notes)
    faults += _of_statistics(evidence, notes)
    faults += _of_metrics(evidence)
    if evidence.keys_are_equal:
        words = "random keys are equal on all shards: shards that swap rows leave the step as it is"
        faults.insert(0, Fault(kinds.KEYS_EQUAL, words))
        # What a shared key does to the mean is no fault of its own.
        faults = [f for f in faults if f.kind not in (kinds.OTHER, kinds.SCALED)]
    if not faults and flops is not None:
        many, one, part = flops
        if part < 0.6 * one and many > 0.9 * one:
            words = (
                f"the batch is not split: a shard computes {many / one:.2f} of what one device "
                f"does with all rows; with its own rows it would be {part / one:.2f}"
            )
            faults.append(Fault(kinds.BATCH_NOT_SPLIT, words))
    number = sum(map(len, evidence.groups))
    return Verification(number, evidence.rows, tuple(faults), tuple(reports), tuple(notes))


def _of_parameters(evidence: Evidence, notes: list[str]) -> tuple[list[Fault], list[LeafReport]]:
    largest = max((rms(leaf.one) for leaf in evidence.parameters), default=0.0)
    found: dict[str, Explanation | str] = {}
    open_: list[LeafEvidence] = []
    for leaf in evidence.parameters:
        floor = _VANISHING * largest * np.sqrt(leaf.many.shape[1]) + leaf.noise
        cases = _cases(evidence, [leaf])
        if all(map(is_fine, cases)):
            found[leaf.name] = _ROUNDED if is_sixteen_bit(cases[0]) else _FINE
        elif max(norm(leaf.many[0]), norm(leaf.one[0])) <= floor and len(leaf.many) == 1:
            found[leaf.name] = _TOO_SMALL
        else:
            finding = _of_leaf(leaf, cases)
            if finding is None:
                open_.append(leaf)
            else:
                found[leaf.name] = finding
    if open_:
        found |= _of_several(evidence, open_, notes)
    reports = [_report(evidence, leaf, found[leaf.name]) for leaf in evidence.parameters]
    return _faults(found), reports


def _of_leaf(leaf: LeafEvidence, cases: list[Case]) -> Explanation | None:
    if len(cases) > 1:
        mean = leaf.one.mean(axis=0)
        if all(cases[0].close(copy, mean) for copy in leaf.many):
            words = "the mean over all shards, not over each group: the groups are ignored"
            return Explanation(kinds.GROUPS_IGNORED, words)
    for case in cases:
        if is_fine(case):
            continue
        return explain_copies(case) if case.copies_differ else explain_simply(case)
    return None


def _of_several(
    evidence: Evidence, leaves: list[LeafEvidence], notes: list[str]
) -> dict[str, Explanation | str]:
    """Explain leaves together, since it takes many numbers to tell the parts of a sum."""
    has_statistics = bool(evidence.others)
    case = next(case for case in _cases(evidence, leaves) if not is_fine(case))
    together = explain_together(case, has_statistics)
    if together is not None and together.kind != kinds.OTHER:
        return dict.fromkeys((leaf.name for leaf in leaves), together)
    found: dict[str, Explanation | str] = {}
    for leaf in leaves:
        case = next(case for case in _cases(evidence, [leaf]) if not is_fine(case))
        finding = explain_together(case, has_statistics)
        if finding is None:
            note = (
                "each shard normalises by the statistics of its own rows; one device would by "
                "those of all rows"
            )
            if note not in notes:
                notes.append(note)
        found[leaf.name] = finding or _FINE
    return found


def _cases(evidence: Evidence, leaves: list[LeafEvidence]) -> list[Case]:
    """What is to be explained, of these leaves together, for each group."""
    number = sum(map(len, evidence.groups))
    join = lambda arrays: np.concatenate(arrays, axis=-1)
    copies = max(len(leaf.many) for leaf in leaves)
    many = join([np.broadcast_to(x.many, (copies, x.many.shape[1])) for x in leaves])
    has_own = all(leaf.own is not None for leaf in leaves)
    own = join([leaf.own for leaf in leaves if leaf.own is not None]) if has_own else None
    epsilon = max(leaf.epsilon for leaf in leaves)
    return [
        Case(
            many=many[list(members)] if copies == number else many,
            one=join([leaf.one[index] for leaf in leaves]),
            own=None if own is None else own[list(members)],
            members=members,
            of_all=number,
            rows=evidence.rows * len(members) // number,
            tolerance=max(ROUNDING, 4 * epsilon),
            noise=norm(np.array([leaf.noise for leaf in leaves])),
            is_random=evidence.is_random,
        )
        for index, members in enumerate(evidence.groups)
    ]


def _report(evidence: Evidence, leaf: LeafEvidence, found: Explanation | str) -> LeafReport:
    case = _cases(evidence, [leaf])[0]
    scale = max(norm(case.one), 1e-300)
    return LeafReport(
        name=leaf.name,
        shape=leaf.shape,
        ratio=case.ratio,
        residual=case.residual,
        tolerance=case.tolerance + case.noise / scale,
        verdict=found if isinstance(found, str) else found.kind,
    )


def _faults(found: dict[str, Explanation | str]) -> list[Fault]:
    """One fault for all leaves that have it."""
    by_kind: dict[tuple[str, tuple[int, ...]], list[tuple[str, Explanation]]] = {}
    for name, finding in found.items():
        if isinstance(finding, Explanation):
            by_kind.setdefault((finding.kind, finding.shards), []).append((name, finding))
    faults = []
    for several in by_kind.values():
        names = tuple(name for name, _ in several)
        finding = several[0][1]
        sentence = f"{_listed(names, len(found))}: {finding.sentence}"
        faults.append(Fault(finding.kind, sentence, names, finding.ratio, finding.shards))
    return faults


def _listed(names: tuple[str, ...], of: int) -> str:
    if len(names) == of and of > 1:
        return f"all {of} parameters"
    return listed(names, 4)


# What is no parameter.


def _of_statistics(evidence: Evidence, notes: list[str]) -> list[Fault]:
    found: dict[str, list[str]] = {}
    for each in evidence.others:
        words = _of_state(each, notes)
        if words:
            found.setdefault(words, []).append(each.name)
    return [
        Fault(kinds.STATISTICS, f"{_listed(tuple(names), 0)}: {words}", tuple(names))
        for words, names in found.items()
    ]


def _of_state(each: StateEvidence, notes: list[str]) -> str | None:
    if len(each.one) > 1:
        return None  # with groups each has its own
    one, many = each.one[0], each.many
    if all(_near(copy, one) for copy in many):
        return None
    if any(not _near(copy, many[0], 1e-5) for copy in many[1:]):
        if each.is_stacked:
            note = "each shard keeps statistics of its own: reduce them before you evaluate or save"
            if note not in notes:
                notes.append(note)
            return None
        return "statistics differ between the shards' copies: not reduced"
    if each.own is None or _near(many[0], each.own.mean(axis=0)):
        return None
    for shard, own in enumerate(each.own):
        if _near(many[0], own):
            return f"batch statistics are one shard's, shard {shard}'s"
    for factor, sign in ((len(each.own), "N"), (1 / len(each.own), "1/N")):
        if _near(many[0], factor * one):
            return f"{factor:.3f} = {sign}: statistics are summed or divided once too often"
    notes.append(f"{each.name} is neither that of all rows nor the mean of the shards'")
    return None


def _of_metrics(evidence: Evidence) -> list[Fault]:
    faults = []
    for each in evidence.metrics:
        kind, words = _of_metric(each)
        if kind:
            faults.append(Fault(kind, f"metric {each.name}: {words}", (each.name,)))
    return faults


def _of_metric(each: StateEvidence) -> tuple[str, str]:
    one, many = each.one[0], each.many
    if len(each.one) > 1 or each.is_stacked or all(_near(copy, one) for copy in many):
        return "", ""
    if any(not _near(copy, many[0], 1e-5) for copy in many[1:]):
        return kinds.METRIC_ONE_SHARD, "each shard has its own: not reduced"
    if each.own is not None:
        if _near(many[0], each.own.mean(axis=0)):
            return "", ""
        for shard, own in enumerate(each.own):
            if _near(many[0], own, 1e-4):
                return kinds.METRIC_ONE_SHARD, f"it is shard {shard}'s own: not reduced"
        if _near(many[0], each.own.sum(axis=0)):
            number = len(each.own)
            return kinds.METRIC_SUMMED, f"{number:.3f} = N: summed over the shards, not averaged"
        if _near(many[0], one / len(each.own)):
            return kinds.METRIC_AVERAGED, f"{1 / len(each.own):.3f} = 1/N: averaged twice"
    return "", ""


def _near(one: np.ndarray, other: np.ndarray, within: float = 1e-3) -> bool:
    scale = max(norm(one), norm(other))
    return norm(one - other) <= within * scale + 1e-7
