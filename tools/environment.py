"""Builds one environment with the package in it, unless it stands and nothing it came from changed.

Run it with the interpreter that the environment is for.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def constraint_file(version: str, jax: str) -> Path:
    """Where the pins for one Python (`"3.12"`) and one end of the range of JAX stand."""
    return ROOT / "constraints" / f"py{version.replace('.', '')}-{jax}.txt"


def build(folder: Path, *, jax: str, extras: str) -> None:
    """Makes `folder` an environment with crossshard (editable), its extras and the pinned rest."""
    constraints = constraint_file(VERSION, jax)
    stamp, fingerprint = folder / "crossshard-stamp", _fingerprint(constraints, extras)
    if stamp.exists() and stamp.read_text() == fingerprint:
        return
    pins = constraints.relative_to(ROOT) if constraints.exists() else "the newest packages it takes"
    print(f"Python {VERSION} with {pins}: installing into {folder} (about a minute) …", flush=True)
    # Cleared, not topped up: what an older pin brought along must not keep a test green.
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "-qq", "--disable-pip-version-check"]
    pinned = ["-c", str(constraints)] if constraints.exists() else []
    subprocess.run([*pip, "install", *pinned, "-e", f"{ROOT}[{extras}]"], check=True)
    stamp.write_text(fingerprint)


def _fingerprint(constraints: Path, extras: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = [
        # Only what pip reads: a new ruff rule is no reason to install JAX again.
        json.dumps([project["build-system"], project["project"]], sort_keys=True),
        constraints.read_text() if constraints.exists() else "",
        extras,
        sys.version,
        # An environment holds absolute paths, so a copied one is not the one it was.
        str(ROOT),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() + "\n"


def main() -> int:
    """Reads the command line: the folder, the end of JAX, and the extras."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jax", choices=("oldest", "newest"), default="newest")
    parser.add_argument("--extras", default="test,dev")
    arguments = parser.parse_args()
    try:
        build(arguments.folder, jax=arguments.jax, extras=arguments.extras)
    except subprocess.CalledProcessError as failure:
        # The failed program has printed why.
        print(f"The environment in {arguments.folder} was not built.", file=sys.stderr)
        return failure.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
