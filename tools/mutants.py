"""Plants the faults of mutants.toml one by one, and tells which of them `make test` would catch.

The test that caught a fault the last time runs first. Where it no longer does, the tests of the
fault's room are tried, then files that meet most of the package, then all.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "crossshard"
# Which test caught a fault the last time; it runs first the next time.
CAUGHT_BY = ROOT / "tools" / "mutants.json"
# A fault may make shards wait for each other for ever; all tests take a third of this.
SECONDS = 3600
WANTED = 0.95
# Files that meet most of the package.
_WIDE = (
    "tests/test_bad_calls.py",
    "tests/step/test_bad_calls.py",
    "tests/test_modes.py",
    "tests/pipeline/test_combinations.py",
)
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


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
    def key(self) -> str:
        """Its name in mutants.json."""
        return f"{self.path}: {self.what}"

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


def run(fault: Fault, caught_by: str | None, passing: set[str]) -> str | None:
    """The test that catches a fault, or ``a time of … s``; ``None`` if none does.

    ``passing`` are tests that pass without a fault.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "crossshard"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        fault.plant(package)
        room = f"tests/{fault.path.split('/')[0]}"
        near = [room] if (ROOT / room).is_dir() else []
        for tests in (caught_by, *near, *_WIDE, "tests"):
            found = _first_failure(tests, folder) if tests else None
            if found and ("::" not in found or found in passing or _passes(found)):
                return found
    return None


@functools.cache
def _passes(test: str) -> bool:
    """Whether a test passes without a fault: one that fails in any case has caught nothing."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / "crossshard")
        return _first_failure(test, folder) is None


def that_pass(tests: set[str], jobs: int) -> set[str]:
    """Those that pass without a fault, of tests that are run together; none if one is gone."""
    command = [*_PYTEST, "-n", str(jobs), *sorted(tests)]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    return tests - set(failed) if tests and ran.returncode in (0, 1) else set()


def _first_failure(tests: str, folder: str) -> str | None:
    command = [*_PYTEST, "-n", "0", "-x", tests]
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
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
        if not arguments.only or any(part in fault.key for part in arguments.only)
    ]
    if not faults:
        parser.error(f"no fault has one of {arguments.only} in its name, 'path: what'")
    recorded = json.loads(CAUGHT_BY.read_text()) if CAUGHT_BY.exists() else {}
    key = operator.attrgetter("key")
    survivors = []
    started = time.monotonic()
    passing = that_pass(set(filter(None, map(recorded.get, map(key, faults)))), arguments.jobs)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        running = {
            pool.submit(run, fault, recorded.get(key(fault)), passing): fault for fault in faults
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
