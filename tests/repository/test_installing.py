"""What a newcomer types first works: the README's first lines, on the Pythons that are promised."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = re.search(r"^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[1]
NEWEST = "py{}{}-newest.txt".format(*sys.version_info)


def fresh(**variables: str) -> dict[str, str]:
    """The variables of a new terminal, in which pip finds packages where it does here."""
    kept = {name: x for name, x in os.environ.items() if name.startswith("PIP_") or name == "HOME"}
    # A version of pyenv that is not chosen only says so.
    path = f"{sys.base_prefix}/bin:/usr/bin:/bin"
    return kept | {"PATH": path, "LANG": "C.UTF-8", "JAX_PLATFORMS": "cpu"} | variables


def test_the_extras_for_accelerators_are_those_of_jax_with_its_bounds():
    (jax_itself,) = (each for each in PROJECT["dependencies"] if each.startswith("jax>"))
    said = re.findall(r'"\.\[(\w+)\]"', COMMANDS)
    assert said == ["cuda12", "cuda13", "tpu"]
    for extra in said:
        (needed,) = PROJECT["optional-dependencies"][extra]
        assert needed == jax_itself.replace("jax", f"jax[{extra}]", 1)


def test_make_environment_says_which_jax_it_has(tmp_path: Path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    # As if it were up to date.
    folder = subprocess.run("pwd | cksum", shell=True, cwd=ROOT, capture_output=True, text=True)
    (tmp_path / f"ready-{folder.stdout.split()[0]}").touch()
    make = ["make", "--no-print-directory", "environment", f"VENV={tmp_path}"]
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    version = ".".join(map(str, sys.version_info[:3]))
    assert said == f"{tmp_path} has Python {version} and JAX {jax.__version__}\n"


# Asks pip's index, as the installation does.
@pytest.mark.deep
@pytest.mark.parametrize(
    "name", ["docs.txt", "ray.txt", "notebook.txt", "py311-oldest.txt", "py311-newest.txt"]
)
def test_what_is_pinned_takes_the_first_python_that_is_promised(name: str, tmp_path: Path):
    first = PROJECT["requires-python"].removeprefix(">=")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps"),
            *("--python-version", f"{first}.0", "--only-binary", ":all:", "--target", tmp_path),
            *("-r", ROOT / "constraints" / name),
        ],
        check=True,
    )


# About a minute and a half on two cores.
@pytest.mark.deep
def test_the_first_lines_of_the_readme_work_as_they_stand(tmp_path: Path):
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "src", "tools"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    first = re.search(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[1]
    (clone / "first.py").write_text(first)
    pins = {"PIP_CONSTRAINT": str(ROOT / "constraints" / NEWEST)}
    script = f"set -e\n{COMMANDS}python first.py\ncrossshard --version\n"
    ran = subprocess.run(
        ["sh", "-c", script], cwd=clone, env=fresh(**pins), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    *_, loss, way, _, _, _, _, _ = ran.stdout.splitlines()
    assert 0 < float(loss) < 0.1
    assert way == "local gradient → mean over all shards → update on every shard"
    assert "Warning" not in ran.stderr
