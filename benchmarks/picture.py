"""The picture of the benchmarks' first page, and the README's rows: a step beside one by hand.

Times are those that `python -m benchmarks step` recorded, memory is counted from the arrays of the
same problem. `python -m benchmarks.picture` draws it, and prints its words and the README's rows.
"""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Draws to a file only, whatever backend the user has set.
os.environ["MPLBACKEND"] = "agg"

import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import crossshard
from benchmarks.age import PAGES
from benchmarks.baselines import HAND_WRITTEN, OURS_AUTO
from benchmarks.models import mlp
from benchmarks.problem import adamw
from benchmarks.timing import Timing

PICTURE = PAGES / "picture.png"
_SIZE, _SHARDS = 10_000_000, (1, 2, 4, 8)
# Greys that stand out from a white page as much as from a black one.
_OURS, _OTHERS, _INK, _RULE = "#4f86c6", "#9a9fa6", "#7a818a", "#9a9fa655"


@dataclasses.dataclass(frozen=True)
class Figures:
    """The values of the picture, one for each number of shards.

    Attributes:
      milliseconds: of a step, ours and by hand: medians.
      megabytes: of optimizer state on each shard, ours and by hand.
    """

    milliseconds: tuple[list[float], list[float]]
    megabytes: tuple[list[float], list[float]]

    def in_words(self) -> str:
        """The picture, for those who do not see it."""
        (ours, by_hand), (ours_mb, by_hand_mb) = (
            map(_listed, pair) for pair in (self.milliseconds, self.megabytes)
        )
        return (
            f"Two bar charts over {_listed(_SHARDS)} shards, for an MLP with 10 million parameters "
            f"and AdamW. A training step takes {by_hand} ms written by hand with pmean and Optax, "
            f"and {ours} ms with crossshard. The optimizer state on each shard takes {by_hand_mb} "
            f"MB by hand, and {ours_mb} MB with crossshard."
        )


def figures() -> Figures:
    """The recorded times and the counted memory."""
    problem = mlp(_SIZE, max(_SHARDS))
    timings = _timings(problem.parameters)
    medians = lambda name: [1000 * timings[n].spread(name).median for n in _SHARDS]
    whole = _megabytes(jax.eval_shape(adamw().init, problem.params))
    return Figures(
        (medians(OURS_AUTO), medians(HAND_WRITTEN)),
        ([_held(problem, shards) for shards in _SHARDS], [whole] * len(_SHARDS)),
    )


def rows() -> list[str]:
    """The README's rows, of the model where most is gained and the one where nothing is."""
    most, nothing = mlp(_SIZE, max(_SHARDS)).parameters, 1_004_640
    names = {most: "MLP, 10 million parameters", nothing: "the demo's transformer, 1 million"}
    found = []
    for parameters, name in names.items():
        timing = _timings(parameters)[max(_SHARDS)]
        by_hand, ours = (1000 * timing.spread(x).median for x in (HAND_WRITTEN, OURS_AUTO))
        ratio = timing.ratio(OURS_AUTO, HAND_WRITTEN).median
        found.append(f"| {name} | {by_hand:.0f} ms | {ours:.0f} ms | {ratio:.2f} |")
    return found


def _timings(parameters: int) -> dict[int, Timing]:
    """What was recorded of the problem with so many parameters, by the number of shards."""
    record = json.loads((PAGES / "step.json").read_text(encoding="utf-8"))
    return {
        result["shards"]: Timing(**result["timing"])
        for result in record["results"]
        if result["parameters"] == parameters
    }


def _held(problem: Any, shards: int) -> float:
    step = crossshard.make_train_step(problem.loss_fn, adamw(), num_shards=shards)
    return _megabytes(step.abstract_init(problem.params).opt_state)


def _megabytes(tree: Any) -> float:
    """The size of one device's shards, or of the full arrays without a sharding."""
    shape = lambda x: x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
    return sum(math.prod(shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 1e6


def draw(drawn: Figures, path: Path) -> None:
    """Draw to a PNG file without a background, with a description in its metadata."""
    figure = Figure(figsize=(8, 2.7), dpi=200)
    figure.set_layout_engine("constrained", wspace=0.08)
    left, right = figure.subplots(1, 2)
    _bars(left, drawn.milliseconds, "One training step, in milliseconds")
    _bars(right, drawn.megabytes, "Optimizer state on each shard, in MB")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        labelcolor=_INK,
    )
    figure.savefig(path, transparent=True, metadata={"Description": drawn.in_words()})


def _bars(axes: Axes, pair: tuple[list[float], list[float]], title: str) -> None:
    names = ("crossshard", "written by hand: pmean and Optax")
    for place, (values, name, color) in enumerate(zip(pair, names, (_OURS, _OTHERS), strict=True)):
        where = [x + 0.4 * (0.5 - place) for x in range(len(values))]
        bars = axes.bar(where, values, width=0.37, color=color, label=name)
        axes.bar_label(bars, fmt="%.0f", color=_INK, fontsize=9, padding=2)
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xticks(range(len(_SHARDS)), [f"{n} shard{'s' * (n > 1)}" for n in _SHARDS])
    axes.set_yticks([])
    axes.tick_params(colors=_INK, length=0)
    axes.margins(y=0.12)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)


def _listed(numbers: Sequence[float]) -> str:
    *most, last = (f"{number:.0f}" for number in numbers)
    if {*most} == {last}:
        return last
    return f"{', '.join(most)} and {last}"


def main() -> None:
    """Draw it, and print its description and the rows of the README."""
    crossshard.cpu_devices(max(_SHARDS))
    drawn = figures()
    draw(drawn, PICTURE)
    print(drawn.in_words(), *rows(), sep="\n")


if __name__ == "__main__":
    main()
