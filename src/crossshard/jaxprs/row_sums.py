"""What becomes of sums over rows, of their ratios, and of what divides by them."""

from collections.abc import Sequence
from dataclasses import replace

from crossshard.jaxprs.row_facts import (
    ADDS,
    CHOOSES,
    LINEAR,
    MOVES,
    Fact,
    Free,
    Inverse,
    Obstacle,
    Pair,
    Ratio,
    Some,
    Total,
    chosen,
    joined,
)

ADDS_UNLIKE = "terms that depend differently on the number of rows"

# What may be added to a sum that divides; and a sum of at least so much is none of less.
_SMALL, _LEAST = 1e-3, 1.0


def of_sums(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    """The fact of an output, of inputs that are sums over rows or free of the batch."""
    found = _of_sums(pair, inputs)
    if isinstance(found, Total):
        found = replace(found, single=pair.name in MOVES and found.single)
    return found


def _of_sums(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    name, sums = pair.name, [fact for fact in inputs if not isinstance(fact, Free)]
    mixed = pair.compared(f"{name} of a sum over rows")
    if any(isinstance(fact, Some) for fact in inputs):
        return _guarded(pair, inputs)
    if not all(isinstance(fact, Free | Total | Ratio | Inverse) for fact in inputs):
        # In a mean over rows, what is added to each row is still added to the mean.
        reason = f"{name} of a row and of a sum over rows"
        return pair.undecided(reason) if name in ("add", "add_any") else pair.compared(reason)
    match inputs:
        case [Total(entry=int(of), single=True), Free(number=0)] if name in ("gt", "ne", "eq"):
            return Some(of, isnt=name == "eq")
        case [Free(number=0), Total(entry=int(of), single=True)] if name in ("lt", "ne", "eq"):
            return Some(of, isnt=name == "eq")
    if pair.converts():
        return mixed
    if name == "div":
        return _divided(pair, inputs, mixed)
    if name == "mul" and len(sums) == 2:
        match sorted(sums, key=lambda fact: isinstance(fact, Inverse)):
            case [Total(power, moved=False), Inverse(by, entry)] if power + by == 0:
                return Ratio(entry, pair.one)
        return mixed
    if name == "mul" or (name == "dot_general" and len(sums) == 1):
        power = sum(fact.power for fact in inputs if isinstance(fact, Free))
        match sums[0]:
            case Total(own, _, moved=False):
                return Total(own + power)
            case Ratio() if power == 0:
                return sums[0]
        return mixed
    if name == "max":
        return _at_least(inputs, mixed)
    if name in ADDS:
        kinds = set(map(type, inputs))
        if kinds == {Total}:
            return added(inputs, mixed)
        # Two ratios may divide by the same.
        of_one_loss = Total in kinds or kinds == {Ratio, Free}
        grows = pair.compared(ADDS_UNLIKE) if of_one_loss else pair.undecided(ADDS_UNLIKE)
        return added(inputs, grows)
    if name in CHOOSES:
        chooses, rest = chosen(name, inputs)
        if any(not isinstance(fact, Free) or fact.power for fact in chooses):
            return mixed
        filled = pair.one.params.get("fill_value") is not None
        return pair.undecided(f"{name} that fills") if filled else _all(pair, rest)
    return _all(pair, inputs) if name in LINEAR else mixed


def _guarded(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    """Of what is something else where a sum over rows is 0."""
    name, mixed = pair.name, pair.compared("a sum over rows decides")
    if name in MOVES and len(inputs) == 1:
        return inputs[0]
    some, *cases = inputs
    if name == "select_n" and isinstance(some, Some):
        match cases[::-1] if some.isnt else cases:
            case [Free(0), Total(power, by, _, True)] if by == some.entry:
                return Total(power, by, moved=True, single=True)
            case [Free(0), Ratio(by) as ratio] if by == some.entry:
                return ratio
    elif name == "mul":
        match inputs:
            case [Some(own), Ratio(by) as ratio] | [Ratio(by) as ratio, Some(own)] if own == by:
                return ratio
    return mixed


def _all(pair: Pair, facts: Sequence[Fact]) -> Fact:
    """Of values whose elements are copied or added up."""
    found = facts[0]
    for fact in facts[1:]:
        found = joined(found, fact)
    if isinstance(found, Total) and pair.name not in MOVES:
        return replace(found, entry=None)
    if isinstance(found, Obstacle) and found.equation is None:
        return replace(found, equation=pair.one)
    return found


def _divided(pair: Pair, inputs: Sequence[Fact], mixed: Obstacle) -> Fact:
    match inputs:
        case [Total(power, _, False), Free(by)]:
            return Total(power - by)
        case [Ratio() as ratio, Free(0)]:
            return ratio
        case [Total(_, _, False) | Free(), Total(single=False)]:
            return pair.undecided("div by several sums over rows")
        case [Total(power, _, False), Total(by, entry)] if power == by:
            return Ratio(entry, pair.one)
        case [Free(power), Total(by, entry)]:
            return Inverse(power - by, entry)
    return mixed


def _at_least(inputs: Sequence[Fact], mixed: Obstacle) -> Fact:
    match sorted(inputs, key=lambda fact: isinstance(fact, Free)):
        case [Total(power) as total, Free(0, _, float(bound))]:
            if bound <= (_LEAST if power == 1 else _SMALL):
                return replace(total, moved=True)
    return mixed


def added(facts: Sequence[Fact], mixed: Obstacle) -> Fact:
    """A sum, or a difference, of two facts."""
    one, other = facts
    if isinstance(one, Free):
        one, other = other, one
    match one, other:
        case (_, Free(number=0)):
            return one
        case Total(power, _, False), Free(by) if power == by:
            return Total(power)
        case Total(), Free(0, _, float(number)) if abs(number) <= _SMALL:
            return replace(one, moved=True)
        case Ratio(), Free(0):
            return one
        case Total(power, _, False), Total(by, _, False) if power == by:
            return Total(power)
        case Ratio(entry), Ratio(by) if entry == by is not None:
            return one
    return mixed
