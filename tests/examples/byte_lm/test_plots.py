"""The picture: as wide as it is, whatever the names in its title."""

import dataclasses
from typing import Any

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from examples.byte_lm.job import Job, prepare
from examples.byte_lm.loop import Step
from examples.byte_lm.plots import draw_curves
from examples.byte_lm.summary import Summary
from tests.examples.byte_lm.small import small_options

SUMMARY = Summary(
    steps=3,
    ended="finished",
    fault="",
    shards=4,
    learning_rate=0.1,
    parameters=10,
    bits_per_byte=5.0,
    held_out_bits_per_byte=[5.5],
    held_out_bits_per_byte_ema=[],
    gzip_bits_per_byte=2.0,
    held_out_bytes=100,
    tokens_per_second=10.0,
    seconds=1.0,
    sent=None,
    proof=None,
    verification=None,
)
STEPS = [Step(number, 4.0 / number, (4.0 / number,), 0.1) for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return prepare(small_options(tmp_path_factory.mktemp("plots"), optimizer="sgd"))


@pytest.mark.parametrize("name", ["text.txt", "folder/" * 40 + "text.txt", "$a_{" * 20])
def test_a_long_name_leaves_the_axes_their_width(job, monkeypatch, tmp_path, name):
    widths = []
    save = Figure.savefig

    def save_and_measure(self: Figure, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **options)
        widths.append(self.axes[0].get_position().width)

    monkeypatch.setattr(Figure, "savefig", save_and_measure)
    renamed = dataclasses.replace(
        job,
        text=dataclasses.replace(job.text, name=name),
        inner=dataclasses.replace(job.inner, name=f"{'package.' * 20}module:sgd"),
    )
    (tmp_path / "curves.png").write_bytes(draw_curves(renamed, STEPS, SUMMARY))
    assert matplotlib.image.imread(tmp_path / "curves.png").shape[:2] == (780, 1350)
    assert widths[0] > 0.9
