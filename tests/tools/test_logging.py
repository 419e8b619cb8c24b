"""The loggers of the page on logging, each where its package is installed: what they wrote."""

import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crossshard.tools.meter import _PEAKS
from tests.test_docs import ROOT, blocks, run

PAGE = ROOT / "docs" / "guide" / "logging.md"
NAMES = {
    *("loss", "grad_norm", "steps_per_second", "rows_per_second", "tokens_per_second"),
    *("mfu", "hfu"),
}
Rows = Iterator[tuple[int, str, float]]


def records(path: Path) -> Iterator[bytes]:
    """The records of a file of TensorFlow's: length and check sum, the record, its check sum."""
    data, place = path.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        yield data[place + 12 : place + 12 + length]
        place += length + 16


def of_tensorboard(folder: Path) -> Rows:
    from tensorboardX.proto.event_pb2 import Event

    (file,) = (folder / "tensorboard").iterdir()
    for each in map(Event.FromString, records(file)):
        yield from ((each.step, x.tag, x.simple_value) for x in each.summary.value)


def pieces(path: Path) -> Iterator[bytes]:
    """The records of a log of LevelDB's, in blocks, behind a head of seven bytes."""
    data, place, found = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if left < 7 or not kind:
            place += left
            continue
        found += data[place + 7 : place + 7 + length]
        place += 7 + length
        # A whole record, or its last piece.
        if kind in (1, 4):
            yield found
            found = b""


def of_wandb(folder: Path) -> Rows:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: list[Any] = []
    # Another process writes it, which may end later than the run.
    while not (found and found[-1].WhichOneof("record_type") == "exit"):
        time.sleep(0.1)
        found = list(map(Record.FromString, pieces(file)))
    for record in found:
        for item in record.history.item:
            name = item.key or item.nested_key[0]
            if name in NAMES:
                yield record.history.step.num, name, float(item.value_json)


def of_clu(folder: Path) -> Rows:
    import tensorflow as tf

    (file,) = (folder / "clu").iterdir()
    for each in tf.compat.v1.train.summary_iterator(str(file)):
        for value in each.summary.value:
            yield each.step, value.tag, float(tf.make_ndarray(value.tensor))


LOGGERS: dict[str, tuple[str, Callable[[Path], Rows]]] = {
    "TensorBoard": ("tensorboardX", of_tensorboard),
    "Weights & Biases": ("wandb", of_wandb),
    "clu": ("clu.metric_writers", of_clu),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_gets_all_numbers_of_each_step(name: str):
    package, read = LOGGERS[name]
    pytest.importorskip(package, exc_type=ImportError)
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks(PAGE, "python"):
        run(PAGE, code, names)
    (code,) = (each for each in blocks(PAGE, "py") if package.partition(".")[0] in each.split()[1])
    run(PAGE, code, names)
    found: dict[int, dict[str, float]] = {}
    for step, tag, value in read(names["folder"]):
        found.setdefault(step, {})[tag] = value
    assert list(found) == [10, 20, 30, 40]
    assert all(set(each) == NAMES for each in found.values())
    assert found[40]["loss"] < found[10]["loss"] < 5.6
    for each in found.values():
        assert each["tokens_per_second"] == pytest.approx(1024 * each["steps_per_second"], rel=1e-5)


def test_the_page_has_a_test_for_each_block_and_all_peaks():
    text = PAGE.read_text()
    packages = {code.split()[1].partition(".")[0] for code in blocks(PAGE, "py")}
    assert packages == {package.partition(".")[0] for package, _ in LOGGERS.values()}
    shown = re.findall(r"^\| (?:NVIDIA|TPU) .* \| (\d+) \|$", text, re.MULTILINE)
    assert sorted(map(int, shown)) == sorted(int(peak / 1e12) for peak in _PEAKS.values())
