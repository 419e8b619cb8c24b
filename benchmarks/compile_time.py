"""Compile time of a step with many arrays, or of many layers: ours against those by hand.

Run it as `python -m benchmarks.compile_time`. Each step is built in its own interpreter, since JAX
remembers what it has traced and compiled.
"""

import collections
import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

import crossshard
from benchmarks import by_hand, gpus, markdown
from benchmarks.jax_baselines import hand_written, ours
from benchmarks.problem import adamw, of_tree
from benchmarks.shapes import transformer

SHARDS = 8
# Arrays of parameters, half of them matrices, and their columns, as the page says.
_ARRAYS, _WIDTH = 500, 64
BY_HAND = "by hand, "
# What is built of each model, and the step by hand that it is measured against.
OF_ARRAYS = dict.fromkeys(("replicated", "sharded"), f"{BY_HAND}replicated")
OF_LAYERS = {name: BY_HAND + name for name in ("replicated", "sharded", "params sharded")}
# The same step, without the proof that its loss is a mean over rows.
UNPROVEN = ", nothing proven"
OF_LAYERS |= {name + UNPROVEN: BY_HAND + name for name in ("replicated", "sharded")}
Model = Literal["arrays", "unrolled", "scan"]
MODELS: dict[Model, dict[str, str]] = {
    "arrays": OF_ARRAYS,
    "unrolled": OF_LAYERS,
    "scan": OF_LAYERS,
}


def main(
    models: tuple[Model, ...] = get_args(Model), rounds: int = 3, out: Path | None = None
) -> None:
    """Compile time of a step with many arrays, or of many layers: ours against those by hand.

    Args:
      models: what to build; a page has all.
      rounds: how often each step is built.
      out: write a page, such as docs/benchmarks/x.md.
    """
    if out and len(models) < len(MODELS):
        raise SystemExit("A page has all models: leave --models out, or --out.")
    # Of the processes that build; with enough threads that collectives never deadlock.
    flags = f"--xla_force_host_platform_device_count={SHARDS}"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": str(4 * SHARDS)}
    tables = []
    for model in models:
        steps = [*dict.fromkeys(MODELS[model].values()), *MODELS[model]]
        rows = collections.defaultdict(list)
        for number in range(rounds):
            for name in steps:
                what = f"{model}, round {number + 1} of {rounds}: {name}"
                print(f"\r{what:<60}", end="", file=sys.stderr)
                rows[name].append(_in_a_process(model, name))
        print(file=sys.stderr)
        tables.append(_table(rows, MODELS[model]))
    last = markdown.repeat(f"python -m benchmarks.compile_time --rounds {rounds}")
    markdown.publish("compile_time", tables, last, out)


def _table(rows: dict[str, list[dict[str, tuple[float, float]]]], against: dict[str, str]) -> str:
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
            pairs = zip(found, rows[against.get(name, name)], strict=True)
            cells.append(f"{median(sums(ours) / sums(theirs) for ours, theirs in pairs):.2f}")
        lines.append(cells)
    return markdown.table(head, lines)


def _in_a_process(model: Model, name: str) -> Any:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_build, model, name).result()


def _build(model: Model, name: str) -> dict[str, tuple[float, float]]:
    """The seconds of each phase: processor time and wall time."""
    taken: dict[str, tuple[float, float]] = {}

    def timed(phase: str, function: Callable[[], Any]) -> Any:
        processor, clock = time.process_time(), time.perf_counter()
        result = function()
        taken[phase] = time.process_time() - processor, time.perf_counter() - clock
        return result

    jax.block_until_ready(jax.jit(jnp.negative)(np.ones(3)))  # starts the devices
    start, lower = (_of_arrays if model == "arrays" else _of_layers)(model, name)
    started = timed("init", start)
    lowered = timed("lower", lambda: lower(started))
    timed("compile", lowered.compile)
    return taken


# What starts a step, and what lowers what was started.
_Phases = tuple[Callable[[], Any], Callable[[Any], Any]]


def _of_arrays(model: str, name: Any) -> _Phases:
    del model
    params = [
        {"kernel": np.eye(_WIDTH, dtype=np.float32), "bias": np.zeros(_WIDTH, np.float32)}
        for _ in range(_ARRAYS // 2)
    ]
    batch = np.ones((2 * SHARDS, _WIDTH), np.float32)

    def loss_fn(params: Any, batch: Any) -> Any:
        for layer in params:
            batch = batch @ layer["kernel"] + layer["bias"]
        return jnp.mean(batch**2)

    problem = of_tree(params, loss_fn, batch)
    is_ours = not name.startswith(BY_HAND)
    make = lambda: ours(problem, SHARDS, name) if is_ours else hand_written(problem, SHARDS)
    return make, lambda candidate: candidate.lower()


def _of_layers(model: str, name: str) -> _Phases:
    shapes = transformer(scan=model == "scan", checkpoint=True)
    mesh = jax.make_mesh((SHARDS,), (by_hand.AXIS,), (jax.sharding.AxisType.Auto,))
    if name.startswith(BY_HAND):
        return lambda: None, lambda _: gpus.STEPS[name](mesh, shapes)
    where = name.removesuffix(UNPROVEN)
    params_sharded = where == "params sharded"
    options: dict[str, Any] = {"params": "sharded"} if params_sharded else {"weight_update": where}
    if name.endswith(UNPROVEN):
        options["loss_over"] = "shard"
    step = crossshard.make_train_step(shapes.loss_fn, adamw(), mesh=mesh, **options)
    batch = shapes.batch(SHARDS)
    return lambda: step.abstract_init(shapes.params), lambda state: step.lower(state, batch)


if __name__ == "__main__":
    markdown.command(main)
