"""The picture: as wide as it is, whatever the names in its title."""

import dataclasses
import io
from typing import Any

import matplotlib.image
from matplotlib.figure import Figure

from examples.byte_lm.job import prepare
from examples.byte_lm.plots import draw_curves
from examples.byte_lm.summary import Summary
from tests.examples.byte_lm.small import small_options

SUMMARY = Summary(3, "finished", "", 4, 0.1, 10, 5.0, [5.5], [], 2.0, 100, 10.0, 1.0)
STEPS = [{"step": number, "bits_per_byte": 5.0 / number} for number in (1, 2, 3)]


def test_a_long_name_leaves_the_axes_their_width(monkeypatch, tmp_path):
    job = prepare(small_options(tmp_path, optimizer="sgd"))
    inner = dataclasses.replace(job.inner, name=f"{'package.' * 20}module:sgd")
    widths = []
    save = Figure.savefig

    def save_and_measure(self: Figure, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **options)
        widths.append(self.axes[0].get_position().width)

    monkeypatch.setattr(Figure, "savefig", save_and_measure)
    for name in ("text.txt", "folder/" * 40 + "text.txt", "$a_{" * 20):
        text = dataclasses.replace(job.text, name=name)
        drawn = draw_curves(dataclasses.replace(job, text=text, inner=inner), STEPS, SUMMARY)
        assert matplotlib.image.imread(io.BytesIO(drawn)).shape[:2] == (780, 1350)
    assert len(widths) == 3
    assert min(widths) > 0.9
