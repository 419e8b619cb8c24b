"""Cells, tables and last lines of pages, and the pages again with other ones."""

import collections
import datetime
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

from benchmarks import age
from benchmarks.age import PAGES as PAGES
from benchmarks.machine import Machine


def table(head: Sequence[str], rows: Sequence[Sequence[str]], names: Collection[int] = (0,)) -> str:
    """A table, whose columns of names stand left and those of numbers right."""
    rule = ["---" if place in names else "---:" for place in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def collectives(report: Any) -> str:
    """How many of each kind of collective a compiled step runs, by its report."""
    kinds: collections.Counter[str] = collections.Counter()
    for each in report.collectives:
        if each.bytes_sent:
            kinds[each.kind] += each.times or 1
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


def between(report: Any, size: int) -> list[Any]:
    """The collectives of a compiled step between workers, groups of ``size`` devices in order."""
    return [
        each
        for each in report.counted
        if any(len({device // size for device in group}) > 1 for group in each.groups)
    ]


def repeat(command: str, *packages: str) -> str:
    """With which packages and when a page was made, and how to repeat it."""
    versions = ", ".join(f"{name} {version(name.lower())}" for name in ("JAX", *packages))
    today = datetime.datetime.now(datetime.UTC)
    return f"{versions}, {today:%Y-%m-%d}. To repeat: `{command}`."


def measured_on(machine: Machine, command: str) -> str:
    """The same, and on which machine."""
    cpu = f"{machine.cpu}, {machine.cores} cores; load {machine.load:g} before it began"
    return f"{cpu}; {repeat(command)}"


def again(name: str, tables: Sequence[str], repeat: str | None = None) -> str:
    """The page that there is, with what was measured now.

    Args:
      name: that of its file.
      tables: its first tables, in order.
      repeat: where it says how to repeat it; as it was if ``None``.
    """
    parts = (PAGES / f"{name}.md").read_text(encoding="utf-8").split("\n\n")
    places = [place for place, part in enumerate(parts) if part.startswith("| ")]
    for place, table in zip(places[: len(tables)], tables, strict=True):
        parts[place] = table
    if repeat is not None:
        [last] = (place for place, part in enumerate(parts) if "To repeat: `" in part)
        parts[last] = repeat if last + 1 < len(parts) else f"{repeat}\n"
    return "\n\n".join(parts)


def publish(name: str, tables: Sequence[str], repeat: str, out: Path | None) -> None:
    """Print tables, and write the page with them to a file, if one is named."""
    print(*tables, sep="\n\n")
    if out is not None:
        age.write(out, again(name, tables, repeat))


def command(main: Callable[..., None]) -> None:
    """Call a function with the options of the command line, which are its arguments."""
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
