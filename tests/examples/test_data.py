"""The guide to data: loops with each loader go on after a restart as if there had been none."""

import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossshard
from examples.data import loop
from tests.distributed.jobs import PATIENCE, launch
from tests.test_docs import ROOT

PAGE = (ROOT / "docs" / "guide" / "data.md").read_text()
FOLDER = ROOT / "examples" / "data"
# What each imports besides.
LOADERS = {"numpy": "numpy", "grain": "grain", "torch": "torch", "tf": "tensorflow"}


@pytest.mark.parametrize("name", ["grain", "torch", "tf"])
def test_the_page_shows_the_files(name: str):
    _, shown = (FOLDER / f"with_{name}.py").read_text().split("\n\n", 1)
    assert f"```py\n{shown.partition('if __name__')[0].rstrip()}\n```" in PAGE


def test_the_page_shows_the_class_of_numbered_batches():
    text = (FOLDER / "loop.py").read_text()
    shown = text[text.index("class Numbered") : text.index("def train(")].rstrip()
    assert f"```python\n{shown}\n```" in PAGE


def losses(name: str, folder: Path, steps: int, processes: int) -> dict[int, list[str]]:
    """The loss of each step that a run takes, from each of its processes."""
    words = [sys.executable, str(FOLDER / f"with_{name}.py"), str(folder), str(steps)]
    if processes > 1:
        running = launch("-n", processes, "--cpu-devices", 4, "--", *words)
    else:
        without = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running = subprocess.Popen(words, env=without, **pipes)
    out, said = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, said[-3000:]
    found: dict[int, list[str]] = {}
    for number, loss in re.findall(r"^(?:\[\d\] )?(\d+) (\d+\.\d{9})$", out, re.MULTILINE):
        found.setdefault(int(number), []).append(loss)
    return found


def test_a_run_goes_on_at_the_right_row_after_a_batch_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    skipping = functools.partial(crossshard.make_train_step, nonfinite="skip")
    monkeypatch.setattr(crossshard, "make_train_step", skipping)
    read = []

    def make(start: int) -> Iterator[dict[str, np.ndarray]]:
        for number in itertools.count(start):
            read.append(number)
            rows = {name: x[np.arange(64) + number] for name, x in loop.data().items()}
            yield rows | {"y": rows["y"] + np.float32(np.nan if number == 7 else 0)}

    def printed(folder: str, steps: int) -> tuple[list[str], Any]:
        read.clear()
        state = loop.train(loop.Numbered(make), tmp_path / folder, steps)
        return capsys.readouterr().out.splitlines(), state

    whole, expected = printed("whole", 20)
    assert [line for line in whole if "nan" in line] == ["8 nan"]
    assert int(expected.step) == 19
    assert printed("two", 13)[0] == whole[:13]
    again, found = printed("two", 20)
    assert read[0] == 10
    assert again == whole[10:]
    for name, x in expected.params.items():
        np.testing.assert_array_equal(found.params[name], x)


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_goes_on_at_the_right_row(name: str, tmp_path: Path):
    pytest.importorskip(LOADERS[name])
    whole = losses(name, tmp_path / "whole", 23, 1)
    assert sorted(whole) == [*range(1, 24)]
    # The last checkpoint is that of step 15, in the midst of the first epoch.
    one, two = tmp_path / "one", tmp_path / "two"
    assert losses(name, one, 18, 1) == {n: whole[n] for n in range(1, 19)}
    assert losses(name, one, 23, 1) == {n: whole[n] for n in range(16, 24)}
    first, again = losses(name, two, 18, 2), losses(name, two, 23, 2)
    assert sorted(first) == [*range(1, 19)]
    assert sorted(again) == [*range(16, 24)]
    assert first[16] == again[16]
    for number, found in (first | again).items():
        assert len(found) == 2, number
        assert float(found[0]) == pytest.approx(float(whole[number][0]), rel=1e-5)
    # The two processes have saved step 20; one goes on.
    for number, found in losses(name, two, 23, 1).items():
        assert float(found[0]) == pytest.approx(float(whole[number][0]), rel=1e-5)
