"""`find_nonfinite` names the line, the shard and the rows of planted faults.

`pytest -m deep -n 0 tests/step/test_find_nonfinite.py` prints how many of 110 are right.
"""

from typing import Any

import numpy as np
import pytest

from tests.step.planted import FAULTS, MODELS, ROWS, SHARDS, batch, line_of, nothing


def _planted(name: str, kind: str, number: int) -> tuple[Any, Any, int]:
    """A model with a fault, the batch, and its bad row."""
    model, given = MODELS[name](FAULTS[kind]), batch(number)
    row = int(np.random.default_rng(number).integers(ROWS))
    if kind == "of_batch":
        given["x"][row, 1, 2] = np.nan
    else:
        given["bad"][row] = 1
    return model, given, row


def _verdict(found: Any, kind: str, row: int) -> tuple[bool, bool]:
    """Whether the line, and the shard with the row, are right."""
    if found is None:
        return False, False
    rows = found.shard == row // (ROWS // SHARDS) and found.rows == (row,)
    if kind == "of_batch":
        return found.array == "batch['x']" and found.index == (row, 1, 2), rows
    is_here = found.file.endswith("planted.py") and found.line == line_of(FAULTS[kind])
    return is_here and "# here" in found.text, rows


@pytest.mark.deep
def test_of_all_models(capsys: Any):
    lines, rows, wrong = 0, 0, []
    for place, name in enumerate(MODELS):
        model = MODELS[name](nothing)
        assert model.step.find_nonfinite(model.step.init(model.initial), batch()) is None
        for number, kind in enumerate(FAULTS):
            model, given, row = _planted(name, kind, 10 * place + number)
            state = model.step.init(model.initial)
            found = model.step.find_nonfinite(state, given)
            line, of_row = _verdict(found, kind, row)
            lines, rows = lines + line, rows + of_row
            if not (line and of_row):
                wrong.append(f"{name}, {kind}, row {row}: {found}")
    number = len(MODELS) * len(FAULTS)
    with capsys.disabled():
        print("", *wrong, f"{lines} lines and {rows} rows of {number} are right", sep="\n")
    assert lines >= 0.97 * number
    assert rows >= 0.95 * number
