"""Runs the suite on every Python that is here, with the oldest and the newest JAX it takes."""

import argparse
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

from environment import ROOT
from pythons import SUPPORTED, find


class Row(NamedTuple):
    """One line of the table: its text, and whether this combination passed."""

    python: str
    jax: str
    passed: str = "-"
    failed: str = "-"
    skipped: str = "-"
    seconds: str = "-"
    remark: str = ""
    good: bool = True


def run(version: str, python: Path, jax: str, pytest_arguments: list[str]) -> Row:
    """Builds (or finds) the environment of one combination and runs the suite in it."""
    folder = Path(".venvs") / f"py{version.replace('.', '')}-{jax}"
    print(f"\n== Python {version}, {jax} JAX", flush=True)
    options = ["--jax", jax, "--extras", "test"]
    build = [str(python), "tools/environment.py", str(folder), *options]
    if subprocess.run(build, cwd=ROOT).returncode:
        return Row(version, jax, remark="no environment", good=False)
    inner = folder / "bin" / "python"
    asked = "from importlib.metadata import version; print(version('jax'))"
    seen = subprocess.check_output([ROOT / inner, "-c", asked], text=True).strip()
    report = ROOT / folder / "report.xml"
    # An older report would be read as this run's if this run dies before it writes one.
    report.unlink(missing_ok=True)
    began = time.monotonic()
    suite = [str(ROOT / inner), "-m", "pytest", f"--junitxml={report}", *pytest_arguments]
    code = subprocess.run(suite, cwd=ROOT).returncode
    return _row(version, seen, code, report, time.monotonic() - began)


def _row(version: str, jax: str, code: int, report: Path, seconds: float) -> Row:
    # The exit code decides, not the counts: a run that dies can leave a clean report.
    good, took = code == 0, f"{seconds:.0f}"
    remark = "" if code in (0, 1) else f"pytest ended with {code}"
    if not report.exists():
        return Row(version, jax, seconds=took, remark=remark, good=good)
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    passed = total - failed - skipped
    return Row(version, jax, str(passed), str(failed), str(skipped), took, remark, good)


def main() -> int:
    """Prints the table last; fails if one combination failed or none could run."""
    # Unknown arguments are passed to pytest.
    parser = argparse.ArgumentParser(description=__doc__)
    _, pytest_arguments = parser.parse_known_args()
    pythons = find()
    rows = []
    for version in SUPPORTED:
        if version not in pythons:
            rows.append(Row(version, "-", remark="not on this machine"))
            continue
        rows += [
            run(version, pythons[version], jax, pytest_arguments) for jax in ("oldest", "newest")
        ]
    form = "{:<8}{:<10}{:>7}{:>8}{:>9}{:>9}  {}"
    print("\n" + form.format(*Row._fields[:6], "").rstrip())
    for row in rows:
        print(form.format(*row[:7]).rstrip())
    return 0 if pythons and all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
