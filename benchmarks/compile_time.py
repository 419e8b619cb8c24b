"""Compile time of a step with many small arrays: ours against the step written by hand.

Run it as `python -m benchmarks.compile_time --leaves 500`. Each step is built in its own
interpreter, since JAX remembers what it has traced and compiled.
"""

import argparse
import collections
import json
import os
import re
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
# Makes XLA log the time of each pass, and of code generation.
_LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "hlo_pass_pipeline=1,cpu_compiler=1"}
_PASS = re.compile(r"HLO pass: (\S+) time: ([\d.]+) (us|ms|s|min)\b")
_COMPILING = re.compile(r"Compiling \[\S+\] for CPU using JIT time: ([\d.]+) (us|ms|s|min)\b")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def main() -> None:
    """Builds every step in turn, and prints or writes a table of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=500, help="arrays of parameters")
    parser.add_argument("--width", type=int, default=64, help="columns of a matrix")
    parser.add_argument("--rounds", type=int, default=3, help="how often each step is built")
    parser.add_argument("--passes", action="store_true", help="list the slowest passes of XLA")
    parser.add_argument("--out", type=Path, help="write a page, such as docs/benchmarks/x.md")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(_build(options.step, options.leaves, options.width)))
        return
    rows, slow = collections.defaultdict(list), {}
    for number in range(options.rounds):
        for name in STEPS:
            print(f"\rround {number + 1} of {options.rounds}: {name:<13}", end="", file=sys.stderr)
            row, log = _in_a_process(name, options)
            rows[name].append(row)
            slow[name] = _slow_passes(log)
    print(file=sys.stderr)
    table = _table(rows)
    print(table)
    if options.passes:
        for name, passes in slow.items():
            print(f"\n{name}: " + ", ".join(f"{each} {taken:.1f}" for each, taken in passes))
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


def _in_a_process(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    arguments = ["--step", name, "--leaves", options.leaves, "--width", options.width]
    environment = {
        **os.environ,
        **(_LOG if options.passes else {}),
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
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr


def _slow_passes(log: str) -> list[tuple[str, float]]:
    """The slowest passes over all compilations, with code generation as one of them."""
    passes: dict[str, float] = collections.defaultdict(float)
    for name, number, unit in _PASS.findall(log):
        passes[name] += float(number) * _SECONDS[unit]
    passes["code generation"] = sum(
        float(number) * _SECONDS[unit] for number, unit in _COMPILING.findall(log)
    )
    return sorted(passes.items(), key=lambda each: -each[1])[:6]


def _build(name: str, leaves: int, width: int) -> dict[str, tuple[float, float]]:
    """The seconds of each phase: processor time and wall time."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

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
    if name == "hand-written":
        init, step = _hand_written(loss_fn, optax.adamw(1e-3))
        state = timed("init", lambda: jax.block_until_ready(init(params)))
        lowered = timed("lower", lambda: step.lower(*state, batch))
    else:
        import crossshard

        ours = crossshard.make_train_step(
            loss_fn, optax.adamw(1e-3), num_shards=SHARDS, weight_update=name
        )
        state = timed("init", lambda: jax.block_until_ready(ours.init(params)))
        lowered = timed("lower", lambda: ours.lower(state, batch))
    timed("compile", lowered.compile)
    return taken


def _hand_written(loss_fn: Callable[..., Any], optimizer: Any) -> tuple[Any, Any]:
    """A step without crossshard: ``shard_map``, ``pmean`` and Optax, with donated buffers."""
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((SHARDS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shared, split = PartitionSpec(), PartitionSpec("data")
    everywhere = NamedSharding(mesh, shared)

    def init(params: Any) -> Any:
        params = jax.device_put(params, everywhere)
        return params, jax.jit(optimizer.init, out_shardings=everywhere)(params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        loss, gradients = jax.lax.pmean((loss, gradients), "data")
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    over_shards = jax.shard_map(
        step, mesh=mesh, in_specs=(shared, shared, split), out_specs=shared, check_vma=False
    )
    return init, jax.jit(over_shards, donate_argnums=(0, 1))


if __name__ == "__main__":
    main()
