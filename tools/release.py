"""Builds the wheel and the source distribution, and tries them in empty environments.

For each Python that is here, with the oldest JAX that the wheel takes, one between, and what pip
chooses: a new environment, `pip install` of the wheel, the README's code, the command and
`crossshard doctor`, all in a folder outside of the clone. What was run and how long it took is
printed as a table at the end; the first thing that fails ends it with 1. dist/ then has what was
tried, to be uploaded as it is.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
# The JAX of an environment, as what pip is told besides the wheel, and the first Python it takes.
JAX = {
    "oldest": (["-c", "constraints/py{}-oldest.txt"], "3.11"),
    "between": (["jax==0.11.2"], "3.12"),
    "newest": ([], "3.11"),
}
# What people need of the repository to build, to test and to read.
_IN_SOURCE = ("CHANGELOG.md", "LICENSE", "Makefile", "README.md", "docs", "src", "tests", "tools")


def main() -> int:
    """Build, check and try; the exit code."""
    wheel, source = build()
    check_contents(wheel, source)
    every = [(python, jax) for python in PYTHONS for jax in JAX if python >= JAX[jax][1]]
    rows = [row for python, jax in every if (row := tried(python, jax, wheel))]
    if not rows:
        print(f"No Python of {', '.join(PYTHONS)} is on PATH.")
        return 1
    print(f"\n{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB, {source.name}: ", end="")
    print(f"{source.stat().st_size / 1e6:.1f} MB; both pass twine check --strict\n")
    print(table(rows))
    return 0


def build() -> tuple[Path, Path]:
    """The wheel, which is built from the source distribution, and that one."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", DIST, ROOT])
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run([sys.executable, "-m", "twine", "check", "--strict", wheel, source])
    return wheel, source


def check_contents(wheel: Path, source: Path) -> None:
    """Raise unless the wheel has the package alone, with its types, and its version is in order."""
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        (of_metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(held.read(of_metadata).decode())
    tops = {name.split("/")[0] for name in names}
    ours = {"crossshard", of_metadata.split("/")[0]}
    wrong = [name for name in names if {"test", "tests", "docs"} & set(name.split("/")[:-1])]
    if tops != ours or wrong:
        raise SystemExit(f"The wheel holds {sorted(tops - ours)} {wrong}, which it should not.")
    if "crossshard/py.typed" not in names:
        raise SystemExit("The wheel has no py.typed: type checkers would not read its types.")
    if re.search(r"\]\((?![a-z]+:|#)|src=\"(?![a-z]+:)", str(metadata.get_payload())):
        raise SystemExit("The long description has relative links.")
    with tarfile.open(source) as archive:
        parts = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    if set(_IN_SOURCE) - parts:
        raise SystemExit(f"The source distribution lacks {sorted(set(_IN_SOURCE) - parts)}.")
    latest = re.search(r"^## (\d\S*) - (\d{4}-\d\d-\d\d)$", _text("CHANGELOG.md"), re.MULTILINE)
    if latest is None or latest[1] != metadata["Version"]:
        raise SystemExit(f"CHANGELOG.md has no dated section of {metadata['Version']} on top.")


def tried(python: str, jax: str, wheel: Path) -> dict[str, str] | None:
    """What was run with a Python and a JAX, and the seconds; `None` if there is no such Python."""
    interpreter = shutil.which(f"python{python}")
    if interpreter is None:
        return None
    with tempfile.TemporaryDirectory(prefix="crossshard-release-") as folder:
        here = Path(folder)
        run([interpreter, "-m", "venv", here / "env"])
        bin_ = here / "env" / "bin"
        first, *others = readme_blocks()
        began = time.monotonic()
        told = [word.format(python.replace(".", "")) for word in JAX[jax][0]]
        pip: list[str | Path] = [bin_ / "python", "-m", "pip", "--disable-pip-version-check"]
        run([*pip, "-qq", "install", wheel, *told])
        installed = time.monotonic() - began
        script(here, bin_, first)
        to_output = time.monotonic() - began
        script(here, bin_, "\n".join([first, *others]))
        script(here, bin_, _IS_INSTALLED)
        run([bin_ / "crossshard", "--help"], here, quiet=True)
        run([bin_ / "crossshard", "doctor"], here)
        run([*pip, "check"], here)
        versions = subprocess.run(
            [bin_ / "python", "-c", _VERSIONS], capture_output=True, text=True, check=True
        )
    version, of_jax = versions.stdout.split()
    return {
        "Python": version,
        "JAX": of_jax,
        "pip install, s": f"{installed:.0f}",
        "to the first output, s": f"{to_output:.0f}",
        "README": f"{1 + len(others)} blocks",
        "--help, doctor, py.typed, pip check": "fine",
    }


# That what was tried is the wheel, not the clone, and has its types.
_IS_INSTALLED = """
import importlib.metadata, importlib.resources, sys
import crossshard
assert crossshard.__file__.startswith(sys.prefix), crossshard.__file__
assert (importlib.resources.files("crossshard") / "py.typed").is_file()
assert importlib.metadata.version("crossshard") == crossshard.__version__
"""
_VERSIONS = "import jax, platform; print(platform.python_version(), jax.__version__)"


def readme_blocks() -> list[str]:
    """The README's Python code; all but the first block go on from it."""
    return re.findall(r"^```python\n(.*?)^```", _text("README.md"), re.DOTALL | re.MULTILINE)


def script(folder: Path, bin_: Path, code: str) -> None:
    """Run code as a program of its own."""
    (folder / "program.py").write_text(code)
    run([bin_ / "python", "program.py"], folder)


def run(command: Sequence[str | Path], folder: Path = ROOT, *, quiet: bool = False) -> None:
    """Run a command as a newcomer would, with no variable of Python's or JAX's set."""
    print("$", *(os.path.basename(command[0]), *command[1:]), flush=True)
    of_others = ("JAX_", "PYTHON", "XLA_")
    clean = {name: each for name, each in os.environ.items() if not name.startswith(of_others)}
    done = subprocess.run(
        command, cwd=folder, env=clean, stdout=subprocess.DEVNULL if quiet else None
    )
    if done.returncode:
        raise SystemExit(f"It ended with {done.returncode}.")


def table(rows: Sequence[dict[str, str]]) -> str:
    """The rows, below their names."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (zip(line, widths, strict=True) for line in lines)
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in line).rstrip() for line in padded
    )


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
