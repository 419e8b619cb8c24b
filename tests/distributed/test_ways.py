"""What a whole step may be asked for, in two processes: each trains as one device does."""

import json
import sys
import traceback
from pathlib import Path

import pytest

from tests.harness import FACTORS, check, few, made
from tests.processes import join, run_processes
from tests.quick import covering

# Of the meshes those that have devices of both processes, of the paths those that stay on them.
OF_BOTH = {
    "mesh": ("8", "beside a model axis", "split over a model axis"),
    "path": ("calls", "restored"),
}


def main(process: int, port: int, out: str) -> None:
    """One process: which rows are not as on one device."""
    join(process, port, 2, 4)
    wrong = {}
    for number, row in enumerate(few(covering(FACTORS | OF_BOTH, made, seed=1))):
        # So that a job which waits for ever says in what.
        print(row, file=sys.stderr, flush=True)
        try:
            check(row, Path(out).parent / str(number))
        except Exception:
            wrong[str(row)] = traceback.format_exc()
    Path(out).write_text(json.dumps(wrong))


@pytest.mark.deep
@pytest.mark.multiprocess
def test_rows_of_two_processes_train_as_one_device_does(tmp_path: Path):
    for wrong in run_processes("distributed.test_ways", tmp_path, patience=900):
        assert not wrong, "\n".join(wrong.values())
