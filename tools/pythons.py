"""Finds, for every minor version of Python that we support, an interpreter that really runs."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

SUPPORTED = ("3.11", "3.12", "3.13")

# `ensurepip` and `venv` because an interpreter that cannot make an environment is of no use here.
_PROBE = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"


def find() -> dict[str, Path]:
    """The first interpreter that runs, per supported minor version; the others are left out."""
    found: dict[str, Path] = {}
    for version in SUPPORTED:
        for candidate in _candidates(version):
            if _runs_as(candidate, version):
                found[version] = candidate
                break
    return found


def _candidates(version: str) -> Iterator[Path]:
    folders = [Path(entry or ".") for entry in os.environ.get("PATH", "").split(os.pathsep)]
    for name in (f"python{version}", "python3", "python"):
        yield from (folder / name for folder in folders)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    # The newest patch release first; a suffix such as 3.13.0rc1 or 3.13t is not the version asked.
    releases = [p for p in pyenv.glob(f"versions/{version}.*") if p.suffix[1:].isdigit()]
    for release in sorted(releases, key=lambda p: int(p.suffix[1:]), reverse=True):
        yield release / "bin" / "python"


def _runs_as(candidate: Path, version: str) -> bool:
    # Run it to be sure: pyenv has shims for versions that it then refuses to start.
    if not os.access(candidate, os.X_OK):
        return False
    try:
        answer = subprocess.run(
            [candidate, "-c", _PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout.strip() == version


if __name__ == "__main__":
    for _version, _path in find().items():
        print(_version, _path)
