"""Runs the programs of PyTorch and TensorFlow, and records what they print.

``make bench-peers`` builds their environments; then ``python -m examples.ways_in.record`` writes
``docs/ways-in/recorded.json``, which tests compare with crossshard's programs.
"""

import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from examples._patch import patched

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
RECORDED = ROOT / "docs" / "ways-in" / "recorded.json"
FOUR_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
ENVIRONMENTS = {
    **dict.fromkeys(("torch_ddp", "torch_zero1", "torch_fsdp2", "torch_differences"), "torch"),
    **dict.fromkeys(("tf1_optimization", "tf1_optimizers"), "tensorflow"),
}


def interpreter(name: str) -> Path:
    """The Python that has the framework of this program."""
    return ROOT / ".venvs" / f"peer-{ENVIRONMENTS[name]}" / "bin" / "python"


def text(name: str) -> str:
    """The program, which may be that of DDP with a patch."""
    patch = HERE / f"{name}.patch"
    if not patch.exists():
        return (HERE / f"{name}.py").read_text()
    return patched(text("torch_ddp"), patch.read_text())


def run(name: str) -> dict[str, Any]:
    """What the program prints."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    arguments = FOUR_RANKS if ENVIRONMENTS[name] == "torch" else ()
    # Nothing listens to the outside, and programs find those that they import.
    own = {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, f"{name}.py")
        program.write_text(text(name))
        ran = subprocess.run(
            [interpreter(name), *arguments, program],
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            text=True,
            # A rank of gloo that has done its work sometimes aborts as it ends.
            check=False,
        )
    return json.loads(ran.stdout)


def main() -> None:
    """Record all of them."""
    found = {name: run(name) for name in ENVIRONMENTS}
    # A line for each list of numbers.
    lines = (
        f'  "{program}": {{\n'
        + ",\n".join(f'    "{key}": {json.dumps(value)}' for key, value in printed.items())
        + "\n  }"
        for program, printed in found.items()
    )
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
