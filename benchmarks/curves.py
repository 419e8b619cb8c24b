"""Held-out loss against bytes sent, for each way to send less: five runs of the demo's transformer.

`python -m benchmarks.curves` trains and records them, or those that are named; with `--draw` it
only draws the picture and writes the page of what is recorded.
"""

import dataclasses
import json
import os
import statistics
from typing import Annotated, Any

# Draws to a file only, whatever backend the user has set.
os.environ["MPLBACKEND"] = "agg"

import tyro
from matplotlib import colormaps
from matplotlib.figure import Figure

import crossshard
from benchmarks import age, markdown
from benchmarks.machine import this_machine
from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.job import prepare
from examples.byte_lm.loop import train
from examples.byte_lm.options import TrainOptions

RECORD, PICTURE, PAGE = (markdown.PAGES / f"curves.{kind}" for kind in ("json", "png", "md"))
SEEDS, STEPS, SHARDS = range(5), 300, 8
PLAIN, PLAIN_MUON = "float32", "float32, Muon"
WORKERS = {"workers": 4, "sync_every": 20}
# Each with the rate that is best for it, of 0.01, 0.014, 0.02 and 0.03.
MUON = {"optimizer": "muon", "learning_rate": 0.01}
MUON_OF_WORKERS = WORKERS | {"optimizer": "muon", "learning_rate": 0.02}
DILOCO = WORKERS | {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
# How gradients are sent, by what the page calls it.
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "bfloat16": {"reduce_dtype": "bfloat16"},
    "int8": {"reduce_dtype": "int8"},
    "float8_e4m3fn": {"reduce_dtype": "float8_e4m3fn"},
    "int4": {"reduce_dtype": "int4"},
    "int4, no error feedback": {"reduce_dtype": "int4", "error_feedback": False},
    "mean of 4 workers, H = 20": WORKERS,
    "mean of 4 workers, H = 20, int4": WORKERS | {"outer_reduce_dtype": "int4"},
    "mean of 4 workers, H = 20, streaming": WORKERS | {"sync_streaming": True},
    "DiLoCo, 4 workers, H = 20": DILOCO,
    "DiLoCo, 4 workers, H = 20, streaming": DILOCO | {"sync_streaming": True},
    "mean of 4 workers, H = 20, 16 rows each": WORKERS | {"batch": 64},
    PLAIN_MUON: MUON,
    "mean of 4 workers, H = 20, Muon": MUON_OF_WORKERS,
}


def one_run(way: str, seed: int) -> dict[str, Any]:
    """The curve of a run, its end, and the bytes that a device sends in a step."""
    options = TrainOptions(
        shards=SHARDS, steps=STEPS, seed=seed, weight_update="replicated", **WAYS[way]
    )
    job = prepare(options)
    training, held_out = job.new_training(), HeldOut(job.text.held_out, options.context)
    curve = [
        [step["step"], step["held_out_bits_per_byte"]]
        for step in train(job, training, held_out)
        if "held_out_bits_per_byte" in step
    ]
    return {
        "curve": curve,
        "held_out": held_out.bits_per_byte(training),
        "bytes": bytes_of(crossshard.inspect(job.lowered), options),
        "parameters": job.parameters,
    }


def bytes_of(report: Any, options: TrainOptions) -> float:
    """What a device sends in a step on average; of workers, what they send to each other."""
    if options.workers is None:
        return float(report.bytes_between_shards)
    between = markdown.between(report, SHARDS // options.workers)
    seldom = sum(each.bytes_sent for each in between if each.in_branch)
    always = sum(each.bytes_sent for each in between) - seldom
    return float(always + seldom / (options.sync_every or 1))


def record(ways: list[str]) -> None:
    """Run what is named, and write it beside what is recorded already."""
    found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"runs": {}}
    found["machine"] = dataclasses.asdict(this_machine())
    for way in ways:
        runs = []
        for seed in SEEDS:
            runs.append(one_run(way, seed))
            print(f"{way}, seed {seed}: {runs[-1]['held_out']:.4f} bits per byte", flush=True)
        found["runs"][way] = runs
        RECORD.write_text(_in_lines(found), encoding="utf-8")


def _in_lines(found: dict[str, Any]) -> str:
    """What is recorded as JSON, with each run in a line."""
    ways = [
        f"{json.dumps(way)}: [\n" + ",\n".join(map(json.dumps, runs)) + "\n]"
        for way, runs in found["runs"].items()
    ]
    return f'{{"machine": {json.dumps(found["machine"])},\n"runs": {{\n' + ",\n".join(ways) + "}}\n"


@dataclasses.dataclass(frozen=True)
class Line:
    """What the runs of one way have in common.

    Attributes:
      way: its name.
      megabytes: what each device has sent at each point, on average over the steps.
      bits: the held-out bits per byte there, the mean over the seeds.
      bytes_of_step: what a device sends in a step.
      end: the held-out bits per byte of each seed at the end, on all held-out bytes.
    """

    way: str
    megabytes: list[float]
    bits: list[float]
    bytes_of_step: float
    end: list[float]


def lines() -> list[Line]:
    """What is recorded."""
    runs = json.loads(RECORD.read_text(encoding="utf-8"))["runs"]
    found = []
    for way in [way for way in WAYS if way in runs]:
        curves = [run["curve"] for run in runs[way]]
        sent = runs[way][0]["bytes"]
        bits = [
            statistics.fmean(bits for _, bits in points) for points in zip(*curves, strict=True)
        ]
        steps = [step for step, _ in curves[0]]
        ends = [run["held_out"] for run in runs[way]]
        found.append(Line(way, [step * sent / 1e6 for step in steps], bits, sent, ends))
    return found


def draw(found: list[Line]) -> None:
    """Draw the curves to a PNG file."""
    figure = Figure(figsize=(8, 4.2), dpi=160)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    # Ten are too few.
    axes.set_prop_cycle(color=[*colormaps["tab10"](range(10)), *colormaps["Dark2"](range(8))])
    for line in found:
        styles = {"no error": "--", "streaming": "-.", "Muon": ":"}
        style = next((style for word, style in styles.items() if word in line.way), "-")
        (drawn,) = axes.plot(line.megabytes, line.bits, style, label=line.way, linewidth=1.6)
        axes.plot(line.megabytes[-1], line.bits[-1], "o", color=drawn.get_color(), markersize=4)
    axes.set_xscale("log")
    axes.set_xlabel("MB sent by each device", color=_INK)
    axes.set_ylabel("held-out bits per byte", color=_INK)
    axes.tick_params(colors=_INK, which="both")
    axes.grid(color=_RULE, linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_color(_RULE)
    axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
    figure.savefig(PICTURE, transparent=True)


_INK, _RULE = "#7a818a", "#9a9fa655"


def page(found: list[Line]) -> str:
    """The page with the figures."""
    of_way = {line.way: line for line in found}
    rows = []
    for line in found:
        plain = of_way[PLAIN_MUON if "Muon" in line.way else PLAIN]
        apart = [100 * (a / b - 1) for a, b in zip(line.end, plain.end, strict=True)]
        cells = [
            line.way,
            f"{line.bytes_of_step:,.0f}",
            f"{line.bytes_of_step / plain.bytes_of_step:.4f}",
            f"{statistics.fmean(line.end):.4f}",
            f"{statistics.fmean(apart):+.2f}%",
            f"{min(apart):+.2f} to {max(apart):+.2f}%",
        ]
        rows.append(cells)
    machine = json.loads(RECORD.read_text(encoding="utf-8"))["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    head = (
        "how",
        "bytes by a device in a step",
        "of float32's",
        "held-out bits per byte",
        "beside float32",
        "of the seeds",
    )
    last = (
        f"{machine['system']}, {machine['cores']} cores; {machine['date']}; {versions}. "
        "Each run is in [curves.json](curves.json). To repeat: `python -m benchmarks.curves`."
    )
    return markdown.again("curves", [markdown.table(head, rows)], last)


def main(
    ways: tyro.conf.Positional[tuple[str, ...]] = (),
    only_draws: Annotated[bool, tyro.conf.arg(name="draw")] = False,
) -> None:
    """Train in ways to send less, draw the picture, and write the page.

    Args:
      ways: those of `WAYS` to train in; by default all.
      only_draws: only draw what is recorded.
    """
    if not only_draws:
        crossshard.cpu_devices(SHARDS)
        record(list(ways or WAYS))
    found = lines()
    draw(found)
    age.write(PAGE, page(found), rows_stay=bool(only_draws or ways))


if __name__ == "__main__":
    markdown.command(main)
