"""The loggers of the page on logging, each where its package is installed."""

import re
from typing import Any

import pytest

from crossshard.tools.meter import _PEAKS
from tests.test_docs import ROOT, blocks, run

PAGE = ROOT / "docs" / "guide" / "logging.md"
# The package of each logger that the page shows.
LOGGERS = {
    "TensorBoard": "tensorboardX",
    "Weights & Biases": "wandb",
    "clu": "clu.metric_writers",
}


@pytest.mark.deep
@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_takes_all_numbers_of_each_step_and_writes_them(name: str):
    package = LOGGERS[name]
    pytest.importorskip(package, exc_type=ImportError)
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks(PAGE, "python"):
        run(PAGE, code, names)
    (code,) = (each for each in blocks(PAGE, "py") if package.partition(".")[0] in each.split()[1])
    run(PAGE, code, names)
    written = [path for path in names["folder"].rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in written) > 1000


def test_the_page_has_a_test_for_each_block_and_all_peaks():
    text = PAGE.read_text()
    packages = {code.split()[1].partition(".")[0] for code in blocks(PAGE, "py")}
    assert packages == {package.partition(".")[0] for package in LOGGERS.values()}
    shown = re.findall(r"^\| (?:NVIDIA|TPU) .* \| (\d+) \|$", text, re.MULTILINE)
    assert sorted(map(int, shown)) == sorted(int(peak / 1e12) for peak in _PEAKS.values())
