"""The wheel holds what users import, the source distribution what its own pages link to."""

import doctest
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

import crossshard

ROOT = Path(__file__).parents[1]
TARGETS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def linked() -> list[Path]:
    """What the pages link to and the Makefile names, within the repository."""
    found = []
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#\s]+)|src=\"([^\"]+)", page.read_text())
        found += [page.parent / "".join(target) for target in targets if "://" not in str(target)]
    words = re.findall(r"[\w.-]+(?:/[\w.-]+)+/?", (ROOT / "Makefile").read_text())
    found += [ROOT / word for word in words if (ROOT / word.split("/")[0]).exists()]
    modules = re.findall(r"python -m (benchmarks|examples)", (ROOT / "Makefile").read_text())
    return [*found, *(ROOT / module for module in modules)]


def test_what_is_linked_to_is_here_and_in_the_source_distribution():
    held = {*TARGETS["sdist"]["include"], "/LICENSE"}
    is_held = lambda path: f"/{path.resolve().relative_to(ROOT).parts[0]}" in held
    # What the commands of the Makefile build is not kept.
    kept = [path for path in linked() if path.relative_to(ROOT).parts[0] not in {".venv", ".venvs"}]
    assert not [str(path) for path in kept if not (path.exists() and is_held(path))]


def test_the_wheel_is_made_of_the_package_alone():
    assert TARGETS["wheel"] == {"packages": ["src/crossshard"]}
    assert not {"bench", "benchmarks", "examples", "training"} & {
        folder.name for folder in (ROOT / "src" / "crossshard").iterdir()
    }


def test_the_changelog_has_a_dated_section_of_this_version_or_the_one_before_it():
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    latest, _ = re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", headings[1]).groups()
    this = Version(crossshard.__version__)
    assert Version(latest) < this if this.is_devrelease else Version(latest) == this


def test_the_long_description_has_no_relative_link():
    pytest.importorskip("hatchling")
    from tools import long_description

    assert doctest.testmod(long_description) == (0, 2)
    relative = re.compile(r"\]\((?![a-z]+:|#)|src=\"(?![a-z]+:)")
    readme = (ROOT / "README.md").read_text()
    assert relative.search(readme)
    for repository in (None, "https://host/us/it/"):
        text = long_description.long_description(readme, repository, "1.0.0")
        assert not relative.search(text)
        assert ("](https://host/us/it/raw/v1.0.0/docs/" in text) == (repository is not None)
        assert re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) == re.findall(
            r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE
        )


@pytest.mark.deep
def test_what_is_built_has_the_package_alone_and_what_is_linked_to(tmp_path: Path):
    # Where the build backend is installed.
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,), (archive,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"crossshard"}
    with tarfile.open(archive) as names:
        held = {Path(*Path(name).parts[1:]) for name in names.getnames()}
    held |= {parent for path in held for parent in path.parents}
    wanted = {path.resolve().relative_to(ROOT) for path in linked() if path.exists()}
    assert {path for path in wanted if path.parts[0] not in {".venv", ".venvs"}} <= held
