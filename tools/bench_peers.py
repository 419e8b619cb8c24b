"""Builds the environments of the PyTorch and TensorFlow baselines, each on its own."""

import hashlib
import subprocess
import sys

from environment import ROOT

# They share no dependencies with crossshard, so the pins are enough.
PEERS = ("peer-torch", "peer-tensorflow")


def build(name: str) -> None:
    """Makes .venvs/<name> an environment with the pins of constraints/<name>.txt."""
    folder, pins = ROOT / ".venvs" / name, ROOT / "constraints" / f"{name}.txt"
    stamp = folder / "crossshard-stamp"
    wanted = hashlib.sha256((pins.read_text() + sys.version).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing constraints/{name}.txt into .venvs/{name} (minutes) …", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-r", str(pins)], check=True)
    stamp.write_text(wanted)


def main() -> int:
    """Builds both environments; fails if one cannot be built."""
    failed = 0
    for name in PEERS:
        try:
            build(name)
        except subprocess.CalledProcessError:
            # The failed program has printed why; the benchmarks run without this peer.
            print(f".venvs/{name} was not built.", file=sys.stderr)
            failed += 1
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
