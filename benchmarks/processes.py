"""Benchmark of whole steps in several processes: ours against PyTorch's DDP over gloo."""

import contextlib
import math
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.baselines import OURS_REPLICATED, OURS_SHARDED
from benchmarks.floor import cores
from benchmarks.interleave import interleave
from benchmarks.options import BenchOptions
from benchmarks.peer import Peer, PeerError
from benchmarks.problem import NUMBERS_OF_ADAMW
from benchmarks.progress import Screen
from benchmarks.result import Result

_LAYERS, _ROWS = 4, 128
_SIZES, _QUICK_SIZES = (1_000_000, 10_000_000), (1_000,)
_OURS = {
    "replicated": OURS_REPLICATED,
    "sharded": OURS_SHARDED,
    **{dtype: f"{OURS_REPLICATED}, {dtype}" for dtype in ("bfloat16", "int8", "int4")},
}
_PARTS = ("gradients", "sum", "update")
_THEIRS = {
    "ddp": "PyTorch gloo DDP",
    "zero": "PyTorch gloo DDP + ZeRO",
    "fp16": "PyTorch gloo DDP + fp16 hook",
}


def measure(options: BenchOptions, screen: Screen, versions: dict[str, str]) -> Iterator[Result]:
    """A result for every size and number of processes; adds PyTorch's version to ``versions``."""
    for size in _QUICK_SIZES if options.quick else _SIZES:
        for number in options.shards_for("processes"):
            width = 8 * max(1, round(math.sqrt(size / _LAYERS) / 8))
            parameters = _LAYERS * (width + 1) * width
            name = f"MLP of {parameters:,} parameters in {number} processes"
            screen.tell(f"{name}: starting all of them")
            problem = {
                "ranks": number,
                "coordinator": f"127.0.0.1:{free_port()}",
                "width": width,
                "layers": _LAYERS,
                "rows": _ROWS,
                **NUMBERS_OF_ADAMW,
                "cores": cores(),
            }
            with contextlib.ExitStack() as running:
                ours = Peer("crossshard", Path(sys.executable), "jax_ranks_peer.py", problem)
                running.enter_context(ours)
                candidates, parts = ours.candidates(_OURS), ours.candidates(_parts("ours"))
                try:
                    python = options.peers / "peer-torch" / "bin" / "python"
                    theirs = Peer("PyTorch", python, "torch_ddp_peer.py", problem)
                    running.enter_context(theirs)
                    versions |= theirs.versions()
                    candidates += theirs.candidates(_THEIRS)
                    parts += theirs.candidates(_parts("PyTorch"))
                except PeerError as why:
                    screen.note(f"Left out: {why}")
                screen.tell(name)
                timing, differences = interleave(candidates, options.rounds, screen.round)
                alone, _ = interleave(parts, options.rounds, screen.round)
            yield Result(name, parameters, None, timing, differences)
            yield Result(f"{name}, parts of a step alone", parameters, None, alone, {})


def _parts(of: str) -> dict[str, str]:
    """The parts of a replicated step, and their names."""
    return {part: f"{of}, {part}" for part in _PARTS}


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
