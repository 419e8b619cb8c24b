"""Estimated times of plans against the clock, on this machine: `python -m benchmarks.plans`."""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import crossshard
from benchmarks.machine import this_machine
from benchmarks.models import transformer

_HEADS = ("model", "weight update", "estimated, ms", "by the clock, ms", "estimate ÷ clock")
_STEPS = 10


class _Model(NamedTuple):
    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    optimizer: optax.GradientTransformation


def _mlp(width: int, layers: int, rows: int) -> _Model:
    params = [{"w": jnp.ones((width, width)) / width, "b": jnp.zeros(width)} for _ in range(layers)]

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for each in params:
            x = jax.nn.gelu(x @ each["w"] + each["b"])
        return jnp.mean(x**2)

    return _Model(loss_fn, params, jnp.ones((rows, width)), optax.adamw(1e-3))


def _scanned() -> _Model:
    def loss_fn(params: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)

    return _Model(loss_fn, jnp.ones((8, 512, 512)) / 512, jnp.ones((512, 512)), optax.sgd(1e-3))


def _convolution() -> _Model:
    kernels = [jnp.ones((3, 3, 3, 32)) / 30, *[jnp.ones((3, 3, 32, 32)) / 300] * 2]

    def loss_fn(kernels: Any, x: jax.Array) -> jax.Array:
        for each in kernels:
            x = jax.lax.conv_general_dilated(
                x, each, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return jnp.mean(x**2)

    return _Model(loss_fn, kernels, jnp.ones((64, 32, 32, 3)), optax.adam(1e-3))


def _transformer(shards: int) -> _Model:
    problem = transformer(shards)
    return _Model(problem.loss_fn, problem.model, problem.batch, optax.adamw(1e-3))


def main() -> None:
    """Plan five models, take their steps, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=8, help="the number of shards")
    parser.add_argument("--out", type=Path, help="write a page, such as docs/benchmarks/plans.md")
    options = parser.parse_args()
    shards = options.shards
    crossshard.cpu_devices(shards)
    machine = this_machine()
    models = {
        "a deep MLP of 0.26 million parameters, 1,024 rows": _mlp(256, 4, 1024),
        "a wide MLP of 6.3 million, 256 rows": _mlp(1024, 6, 256),
        "eight layers in a `lax.scan`, 2.1 million": _scanned(),
        "three convolutions, 64 images": _convolution(),
        "the demo's transformer, 1.0 million": _transformer(shards),
    }
    table: list[tuple[str, ...]] = [_HEADS, ("---", "---", "---:", "---:", "---:")]
    print(" | ".join(_HEADS))
    for name, model in models.items():
        for row in _rows(name, model, shards):
            print(" | ".join(row), flush=True)
            table.append(row)
    if options.out is None:
        return
    paragraphs = (
        "# Plans against the clock",
        f"What `crossshard.plan(…, topology='cpu:{shards}')` estimates for a step, and the median "
        f"time of {_STEPS} steps. The estimate rests on tests of this machine that last some "
        f"seconds and know nothing of the models: products, memory, temporaries, collectives and "
        f"calls.",
        "\n".join(f"| {' | '.join(row)} |" for row in table),
        f"{machine.cpu}, {machine.cores} cores; load {machine.load:g} before it began; JAX "
        f"{version('jax')}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. To repeat: "
        f"`python -m benchmarks.plans --shards {shards}`.",
    )
    options.out.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


def _rows(name: str, model: _Model, shards: int) -> list[tuple[str, ...]]:
    plan = crossshard.plan(
        model.loss_fn, model.params, model.batch, model.optimizer, topology=f"cpu:{shards}"
    )
    rows = []
    for each in plan.candidates:
        assert each.seconds is not None
        estimated, clocked = each.seconds.step, _clocked(model, shards, each.weight_update)
        times = (f"{1e3 * seconds:.3g}" for seconds in (estimated, clocked))
        rows.append((name, each.weight_update, *times, f"{estimated / clocked:.2f}"))
    return rows


def _clocked(model: _Model, shards: int, weight_update: str) -> float:
    step = crossshard.make_train_step(
        model.loss_fn, model.optimizer, num_shards=shards, weight_update=weight_update
    )
    state, taken = step.init(model.params), []
    for _ in range(_STEPS + 2):
        began = time.perf_counter()
        state, metrics = step(state, model.batch)
        jax.block_until_ready((state.params, metrics))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


if __name__ == "__main__":
    main()
