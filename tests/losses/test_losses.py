"""Every loss of the table: right on any number of shards, or refused; never wrong."""

import collections

import pytest

from tests.losses.cases import (
    COMPARING,
    MEAN,
    RATIO,
    TOLERANCE,
    WRONG_WEIGHT,
    Case,
    apart_as_sums,
    apart_in_pieces,
    run,
)
from tests.losses.table import CASES
from tests.quick import deep_but

NAMES = list(CASES)
QUICK, FEW = set(NAMES[::10]), set(NAMES[::30])
# What is refused though it is right, as a part of all means and ratios.
AT_MOST_REFUSED = 0.04


# In float32, and in one of the others in turn; `python -m tests.losses` tries each dtype on each
# number of shards.
FIRST, OTHERS = ("float32", 3), [("mixed", 8), ("bfloat16", 2)]


def runs() -> list[object]:
    """Each case in each of its forms, with dtypes and numbers of shards."""
    pairs = [(name, form) for name, case in CASES.items() for form in case.forms]
    given = [
        (*pair, *run) for place, pair in enumerate(pairs) for run in (FIRST, OTHERS[place % 2])
    ]
    return deep_but(lambda each: each[0] in QUICK and each[2:] == FIRST, given)


@pytest.mark.parametrize(("name", "form", "dtype", "number"), runs())
def test_the_gradient_is_that_of_one_device_or_refused(
    name: str, form: str, dtype: str, number: int
):
    found = run(CASES[name], form, dtype, number)
    assert CASES[name].is_as_expected(form, dtype, found.outcome), found


def is_told_apart(case: Case) -> bool:
    """Whether the shards' mean, or their weighted mean, says what the case is."""
    return not (case.on_axis or (case.weight is None and case.kind == RATIO))


@pytest.mark.parametrize("name", deep_but(FEW, filter(lambda n: is_told_apart(CASES[n]), NAMES)))
def test_a_case_is_what_the_table_calls_it(name: str):
    # With plain JAX alone: a table that is wrong shows nothing.
    apart = apart_in_pieces(CASES[name])
    if CASES[name].kind in (MEAN, RATIO):
        assert apart <= TOLERANCE
    else:
        assert apart > 1000 * TOLERANCE


@pytest.mark.parametrize(
    "name",
    deep_but(FEW, [n for n in NAMES if "Mean" in CASES[n].forms and CASES[n].kind == RATIO]),
)
def test_totals_and_counts_add_up(name: str):
    assert apart_as_sums(CASES[name]) <= TOLERANCE


def test_the_table_is_as_large_as_it_should_be():
    counts = collections.Counter(case.kind for case in CASES.values())
    assert counts[MEAN] + counts[RATIO] >= 90
    assert counts[COMPARING] >= 60
    assert counts[WRONG_WEIGHT] >= 30
    excused = sum(bool(case.may_refuse) for case in CASES.values())
    assert excused <= AT_MOST_REFUSED * (counts[MEAN] + counts[RATIO])
