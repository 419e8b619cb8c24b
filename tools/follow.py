"""Follows pages word by word: writes each file, runs each block, compares what it prints.

As a reader's terminal, the shell goes on from block to block and from page to page. It starts in a
folder that has nothing but the clone, with the Python that runs this program; pages make an
environment of their own::

    python tools/follow.py --clone . docs/tutorial/*.md

Three kinds of fenced block are known, and any other is a fault:

- ``python`` with ``title="NAME"``: a file, written as a whole;
- ``bash``: commands, run as they stand, until one fails;
- ``text`` after these: all that they print, where … stands for the rest of a line, or on a line of
  its own for any lines.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
FILE = re.compile(r'python title="([\w.-]+)"')
# Variables with which a reader's programs would run otherwise than on a fresh machine.
OURS = ("COVERAGE", "JAX", "KERAS", "MPL", "NPROC", "PYTEST", "PYTHON", "VIRTUAL_ENV", "XLA")


class PageError(Exception):
    """What a page says is not so."""


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Of each fenced block: its place, "bash", "text" or the name of a file, and its lines."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        place = f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}"
        title = FILE.fullmatch(match[1])
        if not title and match[1] not in ("bash", "text"):
            raise PageError(f"{place} is no block that is known: {match[1] or 'no language'}")
        found.append((place, title[1] if title else match[1], match[2]))
    if text.count("```") != 2 * len(found):
        raise PageError(f"{page.name} has a fence that stands elsewhere, or has no end")
    return found


def matches(shown: str, printed: str) -> bool:
    """Whether a program has printed what a page shows, up to white space within lines."""
    tidy = lambda text: [" ".join(line.split()) for line in text.strip().splitlines()]
    line_of = lambda line: ".*".join(map(re.escape, line.split("…"))) + "\n"
    pattern = (r"(?:.*\n)*?" if line == "…" else line_of(line) for line in tidy(shown))
    return bool(re.fullmatch("".join(pattern), "".join(f"{line}\n" for line in tidy(printed))))


def run(commands: str, folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """The exit status of a block and all that it prints; the shell goes on where the last ended."""
    keep = '{ export -p; printf "cd %q\\n" "$PWD"; } > "$TERMINAL"'
    script = f'[ ! -e "$TERMINAL" ] || source "$TERMINAL"; set -e; trap \'{keep}\' EXIT\n{commands}'
    bash = ["bash", "-c", f"exec 2>&1 < /dev/null\n{script}"]
    ended = subprocess.run(bash, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
    return ended.returncode, ended.stdout


def follow(page: Path, folder: Path, variables: Mapping[str, str]) -> Counter[str]:
    """Do what a page says; how many files it wrote, blocks it ran, and outputs it compared."""
    counts, printed = Counter[str](), None
    for place, kind, lines in blocks(page):
        if kind == "bash":
            status, printed = run(lines, folder, variables)
            if status:
                raise PageError(f"{place} ends with {status}, after it printed\n{printed}")
        elif kind == "text":
            if printed is None or not matches(lines, printed):
                raise PageError(f"{place} shows\n{lines}What is printed is\n{printed}")
            printed = None
        else:
            here = run("pwd", folder, variables)[1].strip()
            Path(here, kind).write_text(lines, encoding="utf-8")
            printed = None
        counts[kind if kind in ("bash", "text") else "file"] += 1
    return counts


def new_terminal(beside: Path) -> dict[str, str]:
    """The variables of a new terminal."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return variables | {"PATH": path, "TERMINAL": str(beside / "state")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow the pages, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path, help="in the order in which one reads them")
    parser.add_argument("--clone", type=Path, help="the folder that pages know as `crossshard`")
    parser.add_argument("--folder", type=Path, help="work here and leave it, not in a new folder")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="follow-") as beside:
        variables = new_terminal(Path(beside))
        folder = (options.folder or Path(tempfile.mkdtemp(dir=beside))).resolve()
        if options.clone:
            (folder / "crossshard").symlink_to(options.clone.resolve())
        print(f"{'page':28}   files  blocks run  compared  seconds", flush=True)
        for page in options.pages:
            start = time.monotonic()
            try:
                counts = follow(page, folder, variables)
            except PageError as error:
                print(error, file=sys.stderr)
                return 1
            row = *(counts[kind] for kind in ("file", "bash", "text")), time.monotonic() - start
            print("{:28}{:8}{:12}{:10}{:9.0f}".format(page.name, *row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
