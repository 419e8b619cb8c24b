"""Plants the faults of mutants.toml one by one, and tells which of them `make test` would catch.

The test that caught a fault the last time runs first. Where it no longer does, the tests that run
the fault's lines are tried, which one run of all tests under coverage finds out.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "crossshard"
# Which test caught a fault the last time; it runs first the next time.
CAUGHT_BY = ROOT / "tools" / "mutants.json"
# What a run of all tests leaves, until the package changes.
COVERAGE, TIMES = ROOT / "build" / "coverage", ROOT / "build" / "coverage.xml"
# A fault may make shards wait for each other for ever.
SECONDS = 1800
WANTED = 0.95


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      path: the file, below the package's folder.
      what: what is wrong.
      before: the text in the file that is replaced.
      after: what replaces it.
      reason: why the tests may miss it; empty if they must not.
    """

    path: str
    what: str
    before: str
    after: str
    reason: str = ""

    @property
    def name(self) -> str:
        """Where it is and what is wrong."""
        return f"{self.path}:{self.line}: {self.what}"

    @property
    def line(self) -> int:
        """The line at which its text begins."""
        text = (PACKAGE / self.path).read_text(encoding="utf-8")
        return text[: text.index(self.before)].count("\n") + 1

    def plant(self, package: Path) -> None:
        """Replace the text in a copy of the package."""
        file = package / self.path
        text = file.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.path} has {text.count(self.before)} times {self.before!r}.")
        file.write_text(text.replace(self.before, self.after), encoding="utf-8")


def read_faults() -> list[Fault]:
    """All faults, in the order of the file."""
    tables = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))
    return [
        Fault(path, what, *texts)
        for path, faults in tables.items()
        for what, texts in faults.items()
    ]


class Map:
    """Which tests run which line, and how long each takes, as one run of all tests has found.

    A test that starts other processes is not known to run what they run.
    """

    def __init__(self) -> None:
        # Here and not above: who reads the list of faults needs no coverage.
        import coverage

        newest = max(file.stat().st_mtime for file in PACKAGE.rglob("*.py"))
        if not COVERAGE.exists() or COVERAGE.stat().st_mtime < newest:
            print("Running all tests, to know which of them run which line …", flush=True)
            COVERAGE.parent.mkdir(exist_ok=True)
            options = ["--cov=crossshard", "--cov-context=test", "--cov-report="]
            command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
            environment = {**os.environ, "COVERAGE_FILE": str(COVERAGE)}
            subprocess.run(
                [*command, *options, f"--junitxml={TIMES}"], cwd=ROOT, env=environment, check=False
            )
        self._data = coverage.CoverageData(str(COVERAGE))
        self._data.read()
        self._files = {
            file.partition("/src/crossshard/")[2]: file for file in self._data.measured_files()
        }
        self._seconds = {}
        for case in ElementTree.parse(TIMES).iter("testcase"):
            if len(case):
                continue  # it failed, or was skipped
            file = case.attrib["classname"].replace(".", "/")
            self._seconds[f"{file}.py::{case.attrib['name']}"] = float(case.attrib["time"])

    def pieces(self, fault: Fault) -> list[list[str]]:
        """The tests that run a fault's lines: near ones, quick ones, all others, and processes."""
        lines = self._data.contexts_by_lineno(self._files[fault.path])
        within = range(fault.line, fault.line + fault.before.strip("\n").count("\n") + 2)
        tests_of = lambda some: (
            {each.partition("|")[0] for line in some for each in lines.get(line, ())}
            & {*self._seconds}
        )
        # A line of the file itself runs once, when it is imported.
        found = tests_of(within) or tests_of(lines)
        known = sorted(found, key=self._seconds.__getitem__)
        near = f"tests/{fault.path.split('/')[0]}/"
        close = self._first([x for x in known if "test_combinations" in x], 20)
        close += self._first([x for x in known if x.startswith(near) and x not in close], 60)
        quick = self._first([x for x in known if x not in close], 90)
        rest = [x for x in known if x not in close and x not in quick]
        return [close, quick, rest, ["-m", "multiprocess and not deep and not soak", "tests"]]

    def _first(self, tests: list[str], seconds: float) -> list[str]:
        ends = itertools.accumulate(map(self._seconds.__getitem__, tests))
        return [test for test, end in zip(tests, ends, strict=True) if end < seconds]


def run(fault: Fault, tests: Callable[[], Map], caught_by: str | None) -> str | None:
    """The test that catches a fault, or ``a time of … s``; ``None`` if none does."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "crossshard"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        fault.plant(package)
        if caught_by and _first_failure([caught_by], folder) and _passes(caught_by):
            return caught_by
        for piece in filter(None, tests().pieces(fault)):
            found = _first_failure(piece, folder)
            if found and ("::" not in found or _passes(found)):
                return found
    return None


@functools.cache
def _passes(test: str) -> bool:
    """Whether a test passes without a fault: one that fails in any case has caught nothing."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / "crossshard")
        return _first_failure([test], folder) is None


def _first_failure(tests: list[str], folder: str) -> str | None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    listed = Path(folder) / "tests.txt"
    listed.write_text("\n".join(tests))
    process = subprocess.Popen(
        [*command, f"@{listed}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"a time of {SECONDS} s"
    # A test that is gone since it was recorded: pytest's codes for usage and for no test.
    if process.returncode in (0, 4, 5):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else f"exit code {process.returncode}"


def main() -> int:
    """Reads the command line: a part of the faults' names, and how many run at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of the names of the faults to plant")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at once")
    arguments = parser.parse_args()
    faults = [
        fault
        for fault in read_faults()
        if not arguments.only or any(part in fault.name for part in arguments.only)
    ]
    lock, cached = threading.Lock(), functools.cache(Map)

    def tests() -> Map:
        with lock:
            return cached()

    recorded = json.loads(CAUGHT_BY.read_text()) if CAUGHT_BY.exists() else {}
    key = lambda fault: f"{fault.path}: {fault.what}"
    survivors = []
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        running = {
            pool.submit(run, fault, tests, recorded.get(key(fault))): fault for fault in faults
        }
        for done in concurrent.futures.as_completed(running):
            fault, by = running[done], done.result()
            if by is None:
                survivors.append(fault)
            else:
                recorded[key(fault)] = by
                CAUGHT_BY.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
            print(f"{'survives' if by is None else 'caught  '} {fault.name}", flush=True)
            print(f"         {fault.reason if by is None else by}", flush=True)
    caught = len(faults) - len(survivors)
    minutes = (time.monotonic() - started) / 60
    part = caught / len(faults)
    print(f"\n{caught} of {len(faults)} faults caught, {part:.1%}, in {minutes:.0f} minutes")
    unexplained = [fault for fault in survivors if not fault.reason]
    for fault in unexplained:
        print(f"survives without a reason: {fault.name}")
    return 1 if unexplained or part < WANTED else 0


if __name__ == "__main__":
    sys.exit(main())
