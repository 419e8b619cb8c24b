"""The report of a benchmark: a page with tables, and the raw times as JSON.

What a page says besides is written in docs/benchmarks, and stays.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import age, markdown
from benchmarks.machine import Machine
from benchmarks.options import Bench
from benchmarks.result import Result
from benchmarks.tables import make_tables
from crossshard.errors import ArgumentError

# Above what a page says of the measuring, to its last paragraph.
_HOW = "\n\n## How it was measured\n\n"


@dataclasses.dataclass(frozen=True)
class Report:
    """A finished benchmark.

    Attributes:
      bench: the name of the benchmark.
      machine: the machine and the versions.
      rounds: the rounds of each result.
      quick: whether the sizes only show that it runs.
      notes: other notes, such as candidates that were left out.
      results: the results in the order of measurement.
    """

    bench: Bench
    machine: Machine
    rounds: int
    quick: bool
    notes: Sequence[str]
    results: Sequence[Result]

    def tables(self) -> str:
        """The results, as they are printed and written."""
        return "\n\n".join(
            f"## {each.title}\n\n{markdown.table(each.columns, each.rows)}"
            for each in make_tables(self.bench, self.results)
        )


def write(report: Report, out: Path) -> None:
    """Write the page and the raw times.

    Raises:
      ArgumentError: a file cannot be written.
    """
    page, times = (out / f"{report.bench}{suffix}" for suffix in (".md", ".json"))
    try:
        times.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
        age.write(page, _page(report, times.name))
    except OSError as error:
        raise _cannot_write(out, error) from None


def make_folder(out: Path) -> None:
    """Create the output folder before anything is measured.

    Raises:
      ArgumentError: the folder cannot be created or written to.
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


def _page(report: Report, times: str) -> str:
    """The page that there is, with these tables, notes and last paragraph."""
    written = (markdown.PAGES / f"{report.bench}.md").read_text(encoding="utf-8")
    head, how = written.split("\n\n## ", 1)[0], written.split(_HOW)[1].rpartition("\n\n")[0]
    paragraphs, machine = [head], report.machine
    if report.quick:
        paragraphs.append("**Run with `--quick`: sizes that only show that it runs.**")
    paragraphs += [report.tables(), *(f"- {note}" for note in report.notes)]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    last = (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}; load "
        f"{machine.load:g} before it began; {machine.date}. {versions}. {report.rounds} rounds; "
        f"each round's times are in [{times}]({times}). To repeat: "
        f"`python -m benchmarks {report.bench}`."
    )
    return "\n\n".join(paragraphs) + f"{_HOW}{how}\n\n{last}\n"
