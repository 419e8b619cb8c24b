"""Runs the programs of PyTorch and TensorFlow, and records what they print.

``make bench-peers`` builds their environments; then ``python examples/ways_in/record.py`` writes
``docs/ways-in/recorded.json``, which tests compare with crossshard's programs.
"""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs" / "ways-in" / "recorded.json"
FOUR_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
ENVIRONMENTS = {
    **dict.fromkeys(("torch_ddp", "torch_zero1", "torch_fsdp2", "torch_differences"), "torch"),
    **dict.fromkeys(("tf1_optimization", "tf1_optimizers"), "tensorflow"),
}


def interpreter(name: str) -> Path:
    """The Python that has the framework of this program."""
    return ROOT / ".venvs" / f"peer-{ENVIRONMENTS[name]}" / "bin" / "python"


def run(name: str) -> dict[str, Any]:
    """What the program prints."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    arguments = FOUR_RANKS if ENVIRONMENTS[name] == "torch" else ()
    ran = subprocess.run(
        [interpreter(name), *arguments, Path(__file__).parent / f"{name}.py"],
        # Nothing listens to the outside.
        env={**os.environ, "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"},
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
