"""What becomes of sums over rows, of their ratios, and of what divides by them."""

import math
from collections.abc import Sequence
from dataclasses import replace

from crossshard.jaxprs.primitives import ADDS, CHOOSES, ELEMENTWISE, LINEAR, MOVES
from crossshard.jaxprs.row_facts import (
    Fact,
    Free,
    Inverse,
    Obstacle,
    Pair,
    Ratio,
    Rows,
    Some,
    Total,
    are_counts,
    chosen,
    is_inexact,
    is_zero,
    joined,
)

ADDS_UNLIKE = "terms that depend differently on the number of rows"

# What may be added to a sum, which then divides; a sum and more than that are two terms of a loss.
_SMALL = 1.0
# What is not linear, and known to be none of a sum that is done in another way.
_KNOWN = (
    ELEMENTWISE | set(CHOOSES) | LINEAR | set("dot_general reduce_max reduce_min top_k".split())
)


def of_sums(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    """The fact of an output, of inputs among which are sums over rows."""
    found = _of_sums(pair, inputs)
    if isinstance(found, Total) and pair.name not in MOVES and not found.moved:
        found = replace(found, single=False, of=None, counts=are_counts(pair, inputs))
        if pair.name not in ADDS and any(x.bound for x in inputs if isinstance(x, Total)):
            found = replace(found, bound=math.inf)
    return found


def _of_sums(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    name, sums = pair.name, [fact for fact in inputs if not isinstance(fact, Free)]
    mixed = _mixed(pair, inputs, f"{name} of a sum over rows")
    if any(isinstance(fact, Some) for fact in inputs):
        return _guarded(pair, inputs)
    if not all(isinstance(fact, Free | Total | Ratio | Inverse) for fact in inputs):
        return _of_rows_and_sums(pair, inputs)
    match inputs:
        # Of a sum with something behind it, too: a guard of that does nothing, or the same.
        case [Total(of=of, single=True), Free(number=0)] if name in ("gt", "ne", "eq"):
            return Some(of, name == "eq", pair.one)
        case [Free(number=0), Total(of=of, single=True)] if name in ("lt", "ne", "eq"):
            return Some(of, name == "eq", pair.one)
    if pair.converts():
        return mixed
    if name == "div":
        return _divided(pair, inputs, mixed)
    if name == "mul" and len(sums) == 2:
        match sorted(sums, key=lambda fact: isinstance(fact, Inverse)):
            case [Total(power, moved=""), Inverse(by, divisor)]:
                return Ratio(divisor, pair.one, power + by)
        return mixed
    if name == "mul" or (name == "dot_general" and len(sums) == 1):
        power = sum(fact.power for fact in inputs if isinstance(fact, Free))
        match sums[0]:
            case Total(own, moved="") | Ratio(power=own) | Inverse(own):
                return replace(sums[0], power=own + power)
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


def _mixed(pair: Pair, inputs: Sequence[Fact], reason: str) -> Obstacle:
    """That rows meet, if the operation is known; several counts may only say where rows go."""
    counts = any(
        isinstance(fact, Total) and not fact.single and not is_inexact(atom)
        for fact, atom in zip(inputs, pair.one.invars, strict=True)
    )
    known = pair.name in _KNOWN and not counts
    return (pair.compared if known else pair.undecided)(reason)


def _of_rows_and_sums(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    reason = f"{pair.name} of a row and of a sum over rows"
    match inputs:
        case [Rows(power=power) as rows, Total(by, single=True) as total] if pair.name == "div":
            return replace(rows, power=power - by, over=total, entry=None, counts=False)
        case [Rows() as rows, Inverse() as one] | [Inverse() as one, Rows() as rows] if (
            pair.name == "mul"
        ):
            power = rows.power + one.power
            return replace(rows, power=power, over=one.by, entry=None, counts=False)
        case [Rows(), Total()] if pair.name == "div":
            return pair.undecided(reason)
    # In a mean over rows, what is added to each row is still added to the mean.
    return (
        pair.undecided(reason) if pair.name in ("add", "add_any") else _mixed(pair, inputs, reason)
    )


def divisor_of(pair: Pair, inputs: Sequence[Fact]) -> Total | Obstacle:
    """The sum that divides some of the inputs, if the output is linear in what it divides."""
    name = pair.name
    reason = f"{name} of rows that a sum over rows divides"
    divided = [fact for fact in inputs if isinstance(fact, Rows) and fact.over is not None]
    by = divided[0].over
    assert by is not None
    if not all(isinstance(fact, Rows | Free) for fact in inputs) or pair.converts():
        return pair.undecided(reason)
    linear = name in LINEAR and len(inputs) == 1
    if name in ("mul", "dot_general"):
        linear = len(divided) == 1
    elif name == "div":
        linear = len(divided) == 1 and divided[0] is inputs[0]
    elif name in ADDS or name in ("select_n", "gather", "dynamic_slice", "concatenate", "stack"):
        chooses, rest = chosen(name, inputs)
        same = [fact == by or by.is_same(fact) for fact in (x.over for x in divided) if fact]
        apart = [fact for fact in rest if fact not in divided and not is_zero(fact)]
        linear = all(same) and not apart and not any(fact in divided for fact in chooses)
    if linear:
        return by
    return _mixed(pair, inputs, reason)


def divided(pair: Pair, fact: Fact, by: Total) -> Fact:
    """What is known of a value, if all of it is divided by a sum over rows."""
    match fact:
        case Rows():
            return replace(fact, over=by)
        case Total(power, moved=""):
            return Ratio(by, pair.one, power)
        case Free(power, own=False):
            return Inverse(power, by)
        case Obstacle():
            return fact
    return pair.undecided(f"{pair.name} of rows that a sum over rows divides")


def _guarded(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    """Of what is something else where a sum over rows is 0."""
    name, reason = pair.name, "a sum over rows decides"
    # The sum that is asked may be the one that divides, computed once more.
    again = any(isinstance(fact, Total | Ratio) for fact in inputs)
    mixed = (pair.undecided if again else pair.compared)(reason)
    if name in MOVES and len(inputs) == 1:
        return inputs[0]
    some, *cases = inputs
    if name == "select_n" and isinstance(some, Some):
        match cases[::-1] if some.isnt else cases:
            case [Free(0, number=number), Total(single=True) as total] if some.asks(total):
                if total.moved:
                    return total
                return replace(total, moved="guard", bound=number or 0.0)
            case [Free(0), Ratio(by) as ratio] if some.asks(by):
                return ratio
            case [Free(number=0), Inverse(by=by) as inverse] if some.asks(by):
                return inverse
    elif name == "mul":
        match inputs:
            case [Some() as asked, Ratio(by) as ratio] | [Ratio(by) as ratio, Some() as asked] if (
                asked.asks(by)
            ):
                return ratio
    return mixed


def _all(pair: Pair, facts: Sequence[Fact]) -> Fact:
    """Of values whose elements are copied or added up."""
    found = facts[0]
    for fact in facts[1:]:
        found = joined(found, fact)
    if isinstance(found, Obstacle) and found.equation is None:
        return replace(found, equation=pair.one)
    return found


def _divided(pair: Pair, inputs: Sequence[Fact], mixed: Obstacle) -> Fact:
    match inputs:
        case [Total(power, moved=""), Free(by)]:
            return Total(power - by)
        case [Ratio(power=power) | Inverse(power) as fact, Free(by)]:
            return replace(fact, power=power - by)
        case [Total(moved="") | Free(), Total(single=False)]:
            return pair.undecided("div by several sums over rows")
        case [Total(power, moved=""), Total(by) as divisor]:
            return Ratio(divisor, pair.one, power - by)
        case [Free(power), Total(by) as divisor]:
            return Inverse(power - by, divisor)
        # Such as Dice's: a sum and a number, of which each shard would add its own.
        case [Total(moved="plus"), _]:
            return pair.compared(ADDS_UNLIKE)
    return mixed


def _at_least(inputs: Sequence[Fact], mixed: Obstacle) -> Fact:
    match sorted(inputs, key=lambda fact: isinstance(fact, Free)):
        case [Total(power, moved="" | "guard") as total, Free(0, _, float(bound))]:
            if power in (0, 1):
                return replace(total, moved="max", bound=bound)
    return mixed


def added(facts: Sequence[Fact], mixed: Obstacle) -> Fact:
    """A sum, or a difference, of two facts."""
    one, other = facts
    if isinstance(one, Free):
        one, other = other, one
    match one, other:
        case (_, Free(number=0)):
            return one
        case Total(power, moved=""), Free(by, number=number) if power == by:
            return Total(power, bound=math.inf if number is None or one.bound else number)
        case Total(1, moved="" | "guard"), Free(0, _, float(number)) if abs(number) <= _SMALL:
            return replace(one, moved="plus", bound=number)
        case Ratio(power=power), Free(by) if power == by:
            return one
        case Total(power, moved=""), Total(by, moved="") if power == by:
            return Total(power, bound=math.inf if one.bound or other.bound else 0.0)
        case Ratio(by), Ratio(also) if by.is_same(also) and one.power == other.power:
            return one
    return mixed
