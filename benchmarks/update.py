"""Benchmark of reduction and AdamW update alone, against all candidates and the lower bound."""

import contextlib
from collections.abc import Iterator

from benchmarks.baselines import Candidate
from benchmarks.floor import cores, least_bytes, measure_bandwidth
from benchmarks.given_gradients import given_gradients, scales
from benchmarks.interleave import interleave
from benchmarks.jax_baselines import hand_written, ours
from benchmarks.options import BenchOptions
from benchmarks.peer import Peer, PeerError
from benchmarks.problem import NUMBERS_OF_ADAMW
from benchmarks.progress import Screen
from benchmarks.result import Result

_MATRICES, _WIDTH = 32, 512
_QUICK_WIDTH = 64


# By framework: the folder of its environment, its script, and its variants' names in tables.
_FRAMEWORKS = {
    "PyTorch": (
        "peer-torch",
        "torch_peer.py",
        {"all_reduce": "PyTorch gloo all-reduce + AdamW", "zero": "PyTorch gloo ZeRO + AdamW"},
    ),
    "TensorFlow": (
        "peer-tensorflow",
        "tensorflow_peer.py",
        {
            "adamw": "MirroredStrategy, v1 Adam + decay",
            "adam": "MirroredStrategy, v1 Adam (no decay: less work)",
        },
    ),
}


def measure(options: BenchOptions, screen: Screen, versions: dict[str, str]) -> Iterator[Result]:
    """A result for every number of shards; adds the versions of peers to ``versions``."""
    width = _QUICK_WIDTH if options.quick else _WIDTH
    for shards in options.shards_for("update"):
        problem = given_gradients(_MATRICES, width, shards)
        told = f"update of {problem.parameters:,} parameters, {shards} shards"
        screen.tell(f"{told}: starting all candidates")
        candidates: list[Candidate] = [
            ours(problem, shards, "sharded"),
            ours(problem, shards, "replicated"),
            hand_written(problem, shards),
        ]
        asked = {
            "shapes": [(width, width)] * _MATRICES,
            "scales": scales(_MATRICES, shards),
            **NUMBERS_OF_ADAMW,
            "cores": cores(),
        }
        with contextlib.ExitStack() as running:
            for framework, (folder, script, variants) in _FRAMEWORKS.items():
                python = options.peers / folder / "bin" / "python"
                try:
                    peer = running.enter_context(Peer(framework, python, script, asked))
                    versions |= peer.versions()
                    candidates += peer.candidates(variants)
                except PeerError as why:
                    screen.note(f"Left out: {why}")
            bandwidth = measure_bandwidth()
            screen.tell(told)
            timing, differences = interleave(candidates, options.rounds, screen.round)
        yield Result(
            problem=f"update of {_MATRICES} matrices of {width} × {width}",
            parameters=problem.parameters,
            shards=shards,
            timing=timing,
            differences=differences,
            floor_bytes=least_bytes(problem.parameters, shards),
            bandwidth=max(bandwidth, measure_bandwidth()),
        )
