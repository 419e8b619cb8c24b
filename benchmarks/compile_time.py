"""Compile time of a step with many small arrays: ours against the step written by hand.

Run it as `python -m benchmarks.compile_time --leaves 500`. Each step is built in its own
interpreter, since JAX remembers what it has traced and compiled.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import markdown

SHARDS = 8
STEPS = ("hand-written", "replicated", "sharded")


def main() -> None:
    """Builds every step in turn, and prints or writes a table of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=500, help="arrays of parameters")
    parser.add_argument("--width", type=int, default=64, help="columns of a matrix")
    parser.add_argument("--rounds", type=int, default=3, help="how often each step is built")
    parser.add_argument("--out", type=Path, help="write a page, such as docs/benchmarks/x.md")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(_build(options.step, options.leaves, options.width)))
        return
    rows = collections.defaultdict(list)
    for number in range(options.rounds):
        for name in STEPS:
            print(f"\rround {number + 1} of {options.rounds}: {name:<13}", end="", file=sys.stderr)
            rows[name].append(_in_a_process(name, options))
    print(file=sys.stderr)
    table = _table(rows)
    print(table)
    if options.out is not None:
        options.out.write_text(_page(table, options), encoding="utf-8")


def _table(rows: dict[str, list[dict[str, tuple[float, float]]]]) -> str:
    """The medians over the rounds, of seconds and of ratios within a round."""
    head = ("step", "init", "trace and lower", "compile", "step ÷ by hand", "with init ÷ by hand")
    lines = []
    for name, found in rows.items():
        cells = [name]
        for phase in ("init", "lower", "compile"):
            processor, clock = (median(row[phase][kind] for row in found) for kind in (0, 1))
            cells.append(f"{processor:.1f} ({clock:.1f})")
        for phases in (("lower", "compile"), ("init", "lower", "compile")):
            sums = lambda row, phases=phases: sum(row[phase][0] for phase in phases)
            pairs = zip(found, rows["hand-written"], strict=True)
            cells.append(f"{median(sums(ours) / sums(theirs) for ours, theirs in pairs):.2f}")
        lines.append(cells)
    return markdown.table(head, lines)


def _page(table: str, options: argparse.Namespace) -> str:
    paragraphs = (
        "# Compile time",
        f"A step with {options.leaves} arrays of parameters, half of them {options.width} × "
        f"{options.width} and half of {options.width} elements, and AdamW on {SHARDS} virtual CPU "
        f"devices. Seconds of processor time, and by the clock in brackets: medians of "
        f"{options.rounds} rounds, in which each step is built in turn in an interpreter of its "
        f"own. Ratios are of processor time, within a round.",
        table,
        "A step of ours sends small arrays in buckets, for which XLA compiles kernels that copy "
        "arrays in and read them out; by hand each array is an operand of one all-reduce. `init` "
        "traces the update to find out whether its state keeps its structure, and for a sharded "
        "step a second time, on the slices of one shard, to find out whether it is elementwise.",
        markdown.repeat("python -m benchmarks.compile_time"),
    )
    return "\n\n".join(paragraphs) + "\n"


def _in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--step", name, "--leaves", options.leaves, "--width", options.width]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={SHARDS}",
        # Enough threads that collectives of virtual devices never deadlock.
        "NPROC": str(4 * SHARDS),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_time", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def _build(name: Any, leaves: int, width: int) -> dict[str, tuple[float, float]]:
    """The seconds of each phase: processor time and wall time."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.jax_baselines import hand_written, ours
    from benchmarks.problem import of_tree

    taken: dict[str, tuple[float, float]] = {}

    def timed(phase: str, function: Callable[[], Any]) -> Any:
        processor, clock = time.process_time(), time.perf_counter()
        result = function()
        taken[phase] = time.process_time() - processor, time.perf_counter() - clock
        return result

    params = [
        {"kernel": np.eye(width, dtype=np.float32), "bias": np.zeros(width, np.float32)}
        for _ in range(leaves // 2)
    ]
    batch = np.ones((2 * SHARDS, width), np.float32)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        for layer in params:
            batch = batch @ layer["kernel"] + layer["bias"]
        return jnp.mean(batch**2)

    jax.block_until_ready(jax.jit(jnp.negative)(np.ones(3)))  # starts the devices
    problem = of_tree(params, loss_fn, batch)
    by_hand = name == "hand-written"
    make = lambda: hand_written(problem, SHARDS) if by_hand else ours(problem, SHARDS, name)
    candidate = timed("init", make)
    lowered = timed("lower", candidate.lower)
    timed("compile", lowered.compile)
    return taken


if __name__ == "__main__":
    main()
