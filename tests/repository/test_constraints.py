"""constraints/: both ends of JAX for each Python; the oldest is what pyproject.toml promises."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [
    each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: \d\.\d+$", each)
]


def pins(python: str, jax: str) -> dict[str, Version]:
    file = ROOT / "constraints" / f"py{python.replace('.', '')}-{jax}.txt"
    found = dict(line.split("==") for line in file.read_text().splitlines()[1:])
    return {name: Version(version) for name, version in found.items()}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_oldest_are_the_lower_bounds(python: str):
    found = pins(python, "oldest")
    for bound in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["examples"]:
        name, version = re.fullmatch(r"([\w-]+)>=([\w.]+).*", bound).groups()
        assert found[name] == Version(version), bound


@pytest.mark.parametrize("python", PYTHONS)
def test_both_ends_pin_the_same_packages(python: str):
    assert pins(python, "oldest").keys() == pins(python, "newest").keys()


def test_each_python_is_one_that_the_environments_are_made_for():
    said = re.search(r"^PYTHONS = (\[.*\])$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert said
    assert re.findall(r"[\d.]+", said[1]) == PYTHONS
