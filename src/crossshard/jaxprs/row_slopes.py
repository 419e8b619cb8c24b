"""What the derivatives of a mean over rows are, to which a function's own derivative is held."""

from dataclasses import replace

from crossshard.jaxprs.row_facts import (
    Fact,
    Free,
    Obstacle,
    OneRow,
    OverRows,
    Rows,
    Total,
    is_zero,
    layout,
)

_NO_SLOPE = Obstacle(OverRows.UNDECIDED, "a derivative by what is no row and no sum")


def tangent(fact: Fact) -> Fact:
    """What a small change of a value is."""
    match fact:
        case Free(power, own):
            return Free(power, own)
        case Rows(over=None):
            return replace(fact, zero=False, entry=None)
        case Total(power, moved=""):
            return Total(power)
        case OneRow():
            return fact
    return _NO_SLOPE


def cotangent(fact: Fact) -> Fact:
    """What the derivative of a mean over rows by a value is."""
    match fact:
        case Free(power):
            return Total(-power)
        case Rows(axis, outer, inner, power, over=None):
            return Rows(axis, outer, inner, -1 - power)
        case Total(power, moved=""):
            return Free(-power)
        case OneRow(power):
            return OneRow(-1 - power)
    return _NO_SLOPE


def is_slope(fact: Fact, expected: Fact) -> bool:
    """Whether a fact is the expected one, where 0 is as good."""
    if is_zero(fact):
        return True
    match fact, expected:
        case Rows(), Rows():
            alike = layout([fact, expected]) is not None
            same = (fact.axis, fact.power, fact.over) == (expected.axis, expected.power, None)
            return alike and same
        case ((Total(power, moved="") | Free(power)), Total(by)):
            return power == by
        case OneRow(power), Total(by):
            return power == by - 1
        case (Free(power), Free(by)) | ((OneRow(power) | Free(power)), OneRow(by)):
            return power == by
    return False
