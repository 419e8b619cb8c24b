"""Every loss of the table: right on any number of shards, or refused; never wrong."""

import collections

import pytest

from tests.losses.cases import COMPARING, MEAN, RATIO, TOLERANCE, WRONG_WEIGHT, apart_in_pieces, run
from tests.losses.table import CASES
from tests.quick import deep_but

NAMES = list(CASES)
QUICK, FEW = set(NAMES[::12]), set(NAMES[::40])
# Each form of each case in float32, and one form of each in fewer bits; `python -m tests.losses`
# tries each dtype on each number of shards.
PLACES, OTHERS = (3, 8, 2), [("mixed", 8), ("bfloat16", 2)]


def runs() -> list[object]:
    """Each case in each of its forms, with dtypes and numbers of shards."""
    pairs = [(name, form) for name, case in CASES.items() for form in case.forms]
    given = [(*pair, "float32", PLACES[place % 3]) for place, pair in enumerate(pairs)]
    few_bits = [
        (name, case.forms[0], *OTHERS[place % 2])
        for place, (name, case) in enumerate(CASES.items())
    ]
    return deep_but(lambda each: each[0] in QUICK and each[2] == "float32", given + few_bits)


@pytest.mark.parametrize(("name", "form", "dtype", "number"), runs())
def test_the_gradient_is_that_of_one_device_or_refused(
    name: str, form: str, dtype: str, number: int
):
    found = run(CASES[name], form, dtype, number)
    assert CASES[name].is_as_expected(form, dtype, found.outcome), found


REFUSED = [
    name
    for name, case in CASES.items()
    if case.kind in (COMPARING, WRONG_WEIGHT) and not case.on_axis
]


@pytest.mark.parametrize("name", deep_but(FEW, REFUSED))
def test_what_is_to_be_refused_is_another_number(name: str):
    """The shards' mean, or their weighted mean, with plain JAX alone."""
    assert apart_in_pieces(CASES[name]) > 1000 * TOLERANCE


def test_the_table_is_as_large_as_it_should_be():
    counts = collections.Counter(case.kind for case in CASES.values())
    assert counts[MEAN] + counts[RATIO] >= 55
    assert counts[COMPARING] >= 40
    assert counts[WRONG_WEIGHT] >= 20
