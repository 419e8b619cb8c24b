"""Compile time of a step with many arrays, or of many layers: ours against those by hand.

Run it as `python -m benchmarks.compile_time`. Each step is built in its own interpreter, since JAX
remembers what it has traced and compiled.
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

from benchmarks import age, markdown

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
MODELS = {"arrays": OF_ARRAYS, "unrolled": OF_LAYERS, "scan": OF_LAYERS}


def main() -> None:
    """Builds every step in turn, and prints or writes tables of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="how often each step is built")
    parser.add_argument("--out", type=Path, help="write a page, such as docs/benchmarks/x.md")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        (model,) = options.models
        print(json.dumps(_build(model, options.step)))
        return
    if options.out and len(options.models) < len(MODELS):
        parser.error("a page has all models: leave --models out, or --out")
    tables = {}
    for model in options.models:
        steps = [*dict.fromkeys(MODELS[model].values()), *MODELS[model]]
        rows = collections.defaultdict(list)
        for number in range(options.rounds):
            for name in steps:
                what = f"{model}, round {number + 1} of {options.rounds}: {name}"
                print(f"\r{what:<60}", end="", file=sys.stderr)
                rows[name].append(_in_a_process(model, name))
        print(file=sys.stderr)
        tables[model] = _table(rows, MODELS[model])
        print(tables[model])
    if options.out is not None:
        last = markdown.repeat(f"python -m benchmarks.compile_time --rounds {options.rounds}")
        age.write(options.out, markdown.again("compile_time", [*tables.values()], last))


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


def _in_a_process(model: str, name: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={SHARDS}",
        # Enough threads that collectives of virtual devices never deadlock.
        "NPROC": str(4 * SHARDS),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_time", "--models", model, "--step", name],
        env=environment,
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def _build(model: str, name: str) -> dict[str, tuple[float, float]]:
    """The seconds of each phase: processor time and wall time."""
    import jax
    import jax.numpy as jnp
    import numpy as np

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
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.jax_baselines import hand_written, ours
    from benchmarks.problem import of_tree

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
    by_hand = name.startswith(BY_HAND)
    make = lambda: hand_written(problem, SHARDS) if by_hand else ours(problem, SHARDS, name)
    return make, lambda candidate: candidate.lower()


def _of_layers(model: str, name: str) -> _Phases:
    import jax

    import crossshard
    from benchmarks import by_hand
    from benchmarks.problem import adamw
    from benchmarks.shapes import transformer

    shapes = transformer(scan=model == "scan", checkpoint=True)
    mesh = jax.make_mesh((SHARDS,), (by_hand.AXIS,), (jax.sharding.AxisType.Auto,))
    batch = shapes.batch(SHARDS)
    if name.startswith(BY_HAND):
        of_name = {
            "replicated": by_hand.replicated,
            "sharded": by_hand.sharded,
            "params sharded": by_hand.params_sharded,
        }
        lowered = of_name[name.removeprefix(BY_HAND)]
        return lambda: None, lambda _: lowered(mesh, shapes.params, shapes.loss_fn, batch)
    where = name.removesuffix(UNPROVEN)
    params_sharded = where == "params sharded"
    options: dict[str, Any] = {"params": "sharded"} if params_sharded else {"weight_update": where}
    if name.endswith(UNPROVEN):
        options["loss_over"] = "shard"
    step = crossshard.make_train_step(shapes.loss_fn, adamw(), mesh=mesh, **options)
    return lambda: step.abstract_init(shapes.params), lambda state: step.lower(state, batch)


if __name__ == "__main__":
    main()
