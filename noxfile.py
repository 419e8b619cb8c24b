"""Environments beside .venv: every Python with the oldest and the newest JAX, and peers to bench.

The Makefile names the commands; `.venv/bin/nox --list` does, too.
"""

import os
import re
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.envdir = ".venvs"
# A Python that is not here is left out.
nox.options.error_on_missing_interpreters = False

# pyenv's commands in PATH start one version only; these are all of them.
_PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
_FOUND = sorted(map(str, _PYENV.glob("versions/3.1[1-3].*[0-9]/bin")))
os.environ["PATH"] = os.pathsep.join([*_FOUND, os.environ["PATH"]])

PYTHONS = ["3.11", "3.12", "3.13"]
ENDS_OF_JAX = ["oldest", "newest"]


def _pins(session: nox.Session, jax: str) -> Path:
    return Path(f"constraints/py{str(session.python).replace('.', '')}-{jax}.txt")


@nox.session(python=PYTHONS)
@nox.parametrize("jax", ENDS_OF_JAX)
def tests(session: nox.Session, jax: str) -> None:
    """The tests, with what is passed on to pytest."""
    session.install("-c", str(_pins(session, jax)), "-e", ".[test]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python=PYTHONS)
@nox.parametrize("jax", ENDS_OF_JAX)
def constraints(session: nox.Session, jax: str) -> None:
    """Rewrite constraints/: what pip resolves; "oldest" has all lower bounds of users."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    bounds = project["dependencies"] + project["optional-dependencies"]["examples"]
    floors = [re.sub(r">=([\w.]+).*", r"==\1", bound) for bound in bounds]
    session.install("-e", ".[test,dev]", *(floors if jax == "oldest" else []))
    frozen = session.run("python", "-m", "pip", "freeze", "--exclude-editable", silent=True)
    head = f"# Python {session.python} with the {jax} JAX it takes; written by `make constraints`."
    lines = sorted(line.lower().replace("_", "-") for line in str(frozen).splitlines())
    _pins(session, jax).write_text("\n".join([head, *lines, ""]))


@nox.session
def release(session: nox.Session) -> None:
    """Build the wheel and the source distribution, and try them in empty environments."""
    session.install("build", "twine")
    session.run("python", "tools/release.py")


# They share no dependencies with crossshard, so the pins are enough.
@nox.session(reuse_venv=True)
@nox.parametrize("peer", [nox.param(name, id=name) for name in ("torch", "tensorflow")])
def peer(session: nox.Session, peer: str) -> None:
    """The packages of a framework to compare with."""
    session.install("-r", f"constraints/peer-{peer}.txt")


@nox.session(reuse_venv=True)
def gpus(session: nox.Session) -> None:
    """Compile steps for H100 clusters, those of what is passed on; 5 GB."""
    pins = f"constraints/py{sys.version_info.major}{sys.version_info.minor}-newest.txt"
    session.install("-c", pins, "-e", ".[examples,cuda12]")
    session.run("python", "-m", "benchmarks.gpus", *session.posargs)


@nox.session(reuse_venv=True)
def notebook(session: nox.Session) -> None:
    """Make a notebook of examples/notebook.py, in build/notebook, beside the wheel it installs."""
    session.install("-r", "constraints/notebook.txt")
    there = Path("build/notebook")
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(there), ".")
    options = ["--to", "notebook", "--output", str(there / "notebook.ipynb")]
    session.run("jupytext", *options, "examples/notebook.py")


# The reference is read from the source, so neither JAX nor the package is installed.
@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the site, or do with it what is passed on: `serve`, or `browse` with its options."""
    session.install("-r", "constraints/docs.txt")
    what, *rest = session.posargs or ["build"]
    if what == "browse":
        session.run("python", "tools/browse.py", *rest)
        return
    options = ["--strict"] if what == "build" else ["--dev-addr", "127.0.0.1:8000"]
    # Material says at each start that it has a successor.
    session.run("mkdocs", what, *options, *rest, env={"NO_MKDOCS_2_WARNING": "1"})
