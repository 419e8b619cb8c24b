"""Rewrites constraints/: what pip resolves for each Python, with the oldest and the newest JAX."""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from environment import ROOT, constraint_file
from pythons import SUPPORTED, find

# The package itself is installed from the working tree, never pinned.
_OURSELVES = "crossshard"


def floors() -> list[str]:
    """The pins for "oldest": the lower bound of every dependency of users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["cli"], *extras["examples"]]
    wanted = [line for line in listed if not line.startswith(_OURSELVES)]
    return [re.sub(r">=([\w.]+).*", r"==\1", line) for line in wanted]


def resolve(python: Path, pins: list[str]) -> list[str]:
    """What pip would install for the tests under `python` with `pins`, as sorted pins."""
    with tempfile.TemporaryDirectory() as scratch:
        # In its own environment: packages of the interpreter must not count as resolved.
        subprocess.run([python, "-m", "venv", scratch], check=True)
        report = Path(scratch) / "report.json"
        pip = [str(Path(scratch) / "bin" / "python"), "-m", "pip", "-qq"]
        options = ["--dry-run", "--ignore-installed", "--disable-pip-version-check"]
        wanted = ["--report", str(report), "-e", f"{ROOT}[test,dev]", *pins]
        subprocess.run([*pip, "install", *options, *wanted], check=True)
        installed = [step["metadata"] for step in json.loads(report.read_text())["install"]]
    lines = (f"{_normalized(package['name'])}=={package['version']}" for package in installed)
    return sorted(line for line in lines if not line.startswith(f"{_OURSELVES}=="))


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Every Python that is here; a file whose Python is not here stays as it was."""
    pythons = find()
    for version in SUPPORTED:
        if version not in pythons:
            print(f"Python {version} is not here: its files stay as they are.")
            continue
        for jax, pins in (("oldest", floors()), ("newest", [])):
            file = constraint_file(version, jax)
            print(f"resolving {file.relative_to(ROOT)} (about a minute) …", flush=True)
            head = f"# Python {version} with the {jax} JAX it takes; written by `make constraints`."
            file.parent.mkdir(exist_ok=True)
            file.write_text("\n".join([head, *resolve(pythons[version], pins), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
