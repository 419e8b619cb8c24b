"""Every pair of what a whole step may be asked for trains as one device does."""

import dataclasses
from pathlib import Path

import pytest

from tests.harness import CASES, Row, check, covering, difference, few, oracle
from tests.quick import deep_but

ROWS = covering()
QUICK = few(ROWS)


@pytest.mark.parametrize("row", deep_but(QUICK, ROWS), ids=str)
def test_a_row_trains_as_one_device_does(row: Row, tmp_path: Path):
    check(row, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_scale_would_be_seen(case: str):
    """One shard of eight is left out, or counts twice, in the roughest row."""
    for row in (Row(case), Row(case, precision="bfloat16"), Row(case, wire="int8")):
        want = oracle(case, "sgd", row.precision)
        start = CASES[case].params
        for factor in (7 / 8, 9 / 8):
            params = {k: start[k] + factor * (x - start[k]) for k, x in want.params.items()}
            assert difference(row, dataclasses.replace(want, params=params), want) > 1
