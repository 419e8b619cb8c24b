"""What a bench leaves behind: a page with tables and a plot, and the raw times as JSON."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import Machine
from benchmarks.options import Bench
from benchmarks.plots import draw
from benchmarks.result import Result
from benchmarks.tables import Table, make_tables
from crossshard.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Report:
    """A bench that is over.

    Attributes:
      bench: which.
      machine: where it ran, and with which versions.
      rounds: how many each result has.
      quick: whether the sizes were those that only show that it runs.
      notes: what else is to be known, such as who was left out.
      results: in the order in which they were measured.
    """

    bench: Bench
    machine: Machine
    rounds: int
    quick: bool
    notes: Sequence[str]
    results: Sequence[Result]

    def tables(self) -> list[Table]:
        """The results, as they are printed and written."""
        return make_tables(self.bench, self.results)


_HEADS: dict[Bench, tuple[str, str]] = {
    "update": (
        "The update alone",
        "AdamW in float32, every shard's gradients given: reduce them, update, and have the new "
        "parameters on every shard.",
    ),
    "step": (
        "The whole step",
        "Forward, backward, reduction and AdamW in float32, the batch over all shards being the "
        "same for any number of them.",
    ),
    "overhead": (
        "The call",
        "What calling our step costs beyond calling the compiled program within it, both waited "
        "for, on problems that compute next to nothing.",
    ),
    "import": (
        "The import",
        "What importing crossshard costs beyond importing JAX, Optax and Flax, which it needs.",
    ),
}

_IN_TURN = """\
In every round each candidate takes one step that is not timed and then the same few that are, \
while all the others idle, one candidate after the other, waiting for each step. Ratios and \
differences are taken within a round, so that what else the machine does meets all candidates \
alike; given are their median over the rounds, their quartiles and the least of them, and, *of \
minimums*, what the best round of each gives."""

_METHODS: dict[Bench, str] = {
    "update": f"""\
{_IN_TURN}

Our candidates in JAX run in one process and donate parameters and state; those of PyTorch and \
TensorFlow run in processes of their own, which sleep when it is not their turn. PyTorch's \
gradients lie in buckets of 25 MiB that are reduced without a copy, its AdamW is the fused one. \
TensorFlow's MirroredStrategy reduces to one device, its fastest way on CPUs, and updates with the \
fused Adam of `tf.compat.v1`; once without weight decay, which is less work than all others do. \
*Differs by*: how far a parameter is at most from ours, sharded, after the same first steps, the \
last number of every matrix being compared.

The floor: with P parameters on N shards, every shard's gradients are read (N·P), parameters and \
two moments are read once (3·P), the moments are written once (2·P) and the new parameters into \
every shard's copy (N·P). That is (2·N + 5)·P·4 bytes, over the bandwidth of the best of some \
large copies on all cores before and after the rounds, bytes read and written both counted.""",
    "step": f"""\
{_IN_TURN}

The MLPs have four layers of one width; the transformer is that of `examples/byte_lm` with its \
default sizes. Both candidates run in one process and donate parameters and state.""",
    "overhead": _IN_TURN,
    "import": """\
In every round a fresh interpreter imports what is needed, and then crossshard: the difference is \
the time of that alone. All modules are compiled to bytecode and in the system's cache. Given are \
medians over the rounds, quartiles and the least, and, *of minimums*, the least until the end of \
both less the least without ours.""",
}


def write(report: Report, out: Path) -> list[Path]:
    """Write the page, the plot and the raw times; their paths.

    Raises:
      ArgumentError: one of them cannot be written.
    """
    page, times, plot = (out / f"{report.bench}{suffix}" for suffix in (".md", ".json", ".png"))
    try:
        times.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
        page.write_text(_page(report, plot.name, times.name), encoding="utf-8")
        draw(report.bench, report.results, plot)
    except OSError as error:
        raise _cannot_write(out, error) from None
    return [page, times, plot]


def make_folder(out: Path) -> None:
    """Make the folder to write to, before anything is measured.

    Raises:
      ArgumentError: it cannot be made, or not be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(0, "no permission")
    except OSError as error:
        raise _cannot_write(out, error) from None


def _cannot_write(out: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"Cannot write to {out}: {error.strerror}. Name another folder with --out."
    )


def _page(report: Report, plot: str, times: str) -> str:
    title, what = _HEADS[report.bench]
    machine = report.machine
    paragraphs = [f"# {title}", what]
    if report.quick:
        paragraphs.append("**Run with `--quick`: sizes that only show that it runs.**")
    paragraphs.append(f"![The same as a plot]({plot})")
    for table in report.tables():
        paragraphs += [f"## {table.title}", _markdown(table)]
    paragraphs += [f"- {note}" for note in report.notes]
    paragraphs += ["## How it was measured", _METHODS[report.bench]]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    paragraphs.append(
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}; load "
        f"{machine.load:g} before it began; {machine.date}. {versions}. {report.rounds} rounds; "
        f"each round's times are in [{times}]({times}). `python -m benchmarks {report.bench}` "
        f"measures it again."
    )
    return "\n\n".join(paragraphs) + "\n"


def _markdown(table: Table) -> str:
    rule = ["---" if left else "---:" for left in table.left()]
    rows = [table.columns, rule, *table.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
