"""Every pair of what a whole step may be asked for trains as one device does."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from crossshard.errors import NonfiniteError
from tests.harness import (
    BATCHES,
    CASES,
    Row,
    build,
    check,
    difference,
    few,
    oracle,
    rows,
    start_of,
)
from tests.quick import deep_but

ROWS = rows()
# In all these rows every value is; `make test` tries those that show most.
QUICK = few(ROWS)[:3]


@pytest.mark.parametrize("row", deep_but(QUICK, ROWS), ids=str)
def test_a_row_trains_as_one_device_does(row: Row, tmp_path: Path):
    check(row, tmp_path)


def test_a_shard_that_is_not_finite_ends_the_run():
    row = Row(guard="raise", arrays="params sharded")
    step, batch = build(row), {**BATCHES[0], "x": BATCHES[0]["x"].copy()}
    batch["x"][-1, 0] = np.nan
    state, _ = step(step.init(start_of(row)), batch)
    for name, x in start_of(row).items():
        np.testing.assert_array_equal(state.params[name], x)
    with pytest.raises(NonfiniteError, match="on shard 3"):
        step.finish(state)


@pytest.mark.parametrize("case", deep_but(["mlp", "masked", "tokens"], CASES))
def test_a_wrong_scale_would_be_seen(case: str):
    """One shard of eight is left out, or counts twice, in the roughest row."""
    for row in (Row(case), Row(case, precision="bfloat16"), Row(case, wire="int8")):
        want = oracle(case, "sgd", row.precision)
        start = CASES[case].params
        for factor in (7 / 8, 9 / 8):
            params = {k: start[k] + factor * (x - start[k]) for k, x in want.params.items()}
            assert difference(row, dataclasses.replace(want, params=params), want) > 1
