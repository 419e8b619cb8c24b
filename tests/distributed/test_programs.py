"""Processes that would run different steps: all are told before the first sum, and which is odd."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer
from tests.distributed.test_launch import PATIENCE, launch
from tests.quick import deep

PROCESSES = 3
W = {"b": np.ones(40, np.float32), "w": np.ones((64, 40), np.float32)}
X = np.ones((3, 64), np.float32)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return (jnp.tanh(batch["x"] @ params["w"] + params["b"]) ** 2).mean()


def other_constant(params: Any, batch: Any) -> jax.Array:
    return 1.001 * loss_fn(params, batch)


def other_order(params: Any, batch: Any) -> jax.Array:
    return (jnp.tanh(params["b"] + batch["x"] @ params["w"]) ** 2).mean()


def in_bfloat16(params: Any, batch: Any) -> jax.Array:
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return loss_fn(low, batch).astype(jnp.float32)


def of_a_part(params: Any, batch: Any) -> jax.Array:
    return loss_fn({**params, "b": jax.lax.stop_gradient(params["b"])}, batch)


def with_noise(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    return loss_fn(params, batch) * jax.random.uniform(rng)


def with_a_sum(params: Any, batch: Any) -> jax.Array:
    own = jax.lax.stop_gradient(params["b"].sum())
    return loss_fn(params, batch) + 0 * jax.lax.psum(own, "shards")


def with_a_maximum(params: Any, batch: Any) -> jax.Array:
    own = jax.lax.stop_gradient(params["b"].sum())
    return loss_fn(params, batch) + 0 * jax.lax.pmax(own, "shards")


def sum_then_maximum(params: Any, batch: Any) -> jax.Array:
    return with_a_sum(params, batch) + with_a_maximum(params, batch)


def maximum_then_sum(params: Any, batch: Any) -> jax.Array:
    return with_a_maximum(params, batch) + with_a_sum(params, batch)


def with_aux(params: Any, batch: Any) -> Any:
    return loss_fn(params, batch), {"mean": batch["x"].mean()}


def run(
    loss: Any = loss_fn,
    optimizer: Any = None,
    *,
    params: Any = None,
    x: Any = X,
    entries: Any = None,
    rng: Any = 0,
    devices: Any = None,
    axis: str = "shards",
    **options: Any,
) -> None:
    """Build a step, and take one."""
    mesh = jax.sharding.Mesh(
        np.array(devices or jax.devices()), (axis,), axis_types=(jax.sharding.AxisType.Auto,)
    )
    step = crossshard.make_train_step(
        loss, optimizer or optax.sgd(0.1, momentum=0.9), mesh=mesh, **options
    )
    step(step.init(params or W, rng), {"x": x[:1], **(entries or {})})


def of(optimizer: Any) -> dict[str, Any]:
    return {"optimizer": optimizer}


# What the odd process passes, and what the others do if it is not what `run` does by itself.
KINDS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    # Optimizers.
    "learning rate": lambda: (of(optax.sgd(0.1001, momentum=0.9)), {}),
    "another optimizer": lambda: (of(optax.adam(0.1)), {}),
    "schedule": lambda: (
        of(optax.sgd(optax.linear_schedule(0.1, 0.0, 10))),
        of(optax.sgd(optax.linear_schedule(0.1, 0.0, 20))),
    ),
    "order of a chain": lambda: (
        of(optax.chain(optax.scale(0.1), optax.add_decayed_weights(0.1))),
        of(optax.chain(optax.add_decayed_weights(0.1), optax.scale(0.1))),
    ),
    # Options.
    "reduction": lambda: (of(CrossShardOptimizer(optax.sgd(0.1, momentum=0.9), "sum")), {}),
    "preprocess": lambda: (
        of(CrossShardOptimizer(optax.sgd(0.1), preprocess=optax.clip(0.1))),
        of(CrossShardOptimizer(optax.sgd(0.1))),
    ),
    "groups": lambda: (
        of(CrossShardOptimizer(optax.sgd(0.1), group_assignment=[[0], [1], [2]])),
        of(CrossShardOptimizer(optax.sgd(0.1))),
    ),
    "weight update": lambda: ({"weight_update": "sharded"}, {"weight_update": "replicated"}),
    "metrics": lambda: ({"metrics": "grad_norm"}, {}),
    "wire": lambda: ({"reduce_dtype": "bfloat16"}, {}),
    "loss scale": lambda: ({"loss_scale": "dynamic"}, {}),
    "moving average": lambda: ({"ema": 0.9}, {}),
    "nonfinite": lambda: ({"nonfinite": "skip"}, {}),
    "what is trained": lambda: ({"wrt": lambda path, _: "w" in str(path)}, {}),
    "name": lambda: (
        of(CrossShardOptimizer(optax.sgd(0.1), group_assignment=[[0, 1, 2]], reduction="sum")),
        of(CrossShardOptimizer(optax.sgd(0.1))),
    ),
    # Losses.
    "constant": lambda: ({"loss": other_constant}, {}),
    "order of a sum": lambda: ({"loss": other_order}, {}),
    "dtype of the loss": lambda: ({"loss": in_bfloat16}, {}),
    "stopped gradient": lambda: ({"loss": of_a_part}, {}),
    "noise": lambda: ({"loss": with_noise}, {}),
    "a maximum for a sum": lambda: ({"loss": with_a_maximum}, {"loss": with_a_sum}),
    "order of collectives": lambda: ({"loss": sum_then_maximum}, {"loss": maximum_then_sum}),
    "aux": lambda: ({"loss": with_aux, "has_aux": True}, {}),
    # What they are given.
    "parameters": lambda: ({"params": {**W, "b": 2 * W["b"]}}, {}),
    "shape of a parameter": lambda: ({"params": {**W, "b": np.ones(1, np.float32)}}, {}),
    "dtype of a parameter": lambda: ({"params": {**W, "b": np.float16(W["b"])}}, {}),
    "another parameter": lambda: ({"params": {**W, "c": W["b"]}}, {}),
    "key": lambda: ({"rng": 1}, {}),
    "rows": lambda: ({"entries": {"x": np.ones((2, 64), np.float32)}}, {}),
    "columns": lambda: (
        {"entries": {"y": np.ones((1, 4), np.float32)}},
        {"entries": {"y": np.ones((1, 5), np.float32)}},
    ),
    "dtype of a batch": lambda: ({"x": np.ones((3, 64), np.float16)}, {}),
    "a further entry": lambda: ({"entries": {"y": np.ones(1, np.float32)}}, {}),
    "order of devices": lambda: ({"devices": jax.devices()[::-1]}, {}),
    "name of an axis": lambda: ({"axis": "data"}, {}),
}


# One of each sort.
FEW = ["constant", "order of collectives", "rows", "key"]


def main(out: str, *names: str) -> None:
    """One process: what it is told of these kinds."""
    job = crossshard.distributed.initialize()
    found = {}
    for number, name in enumerate(names):
        odd, others = KINDS[name]()
        try:
            run(**(odd if job.process_id == number % PROCESSES else others))
            found[name] = "taken"
        except crossshard.CrossshardError as error:
            found[name] = f"{type(error).__name__}: {error}"
    # What is equal is taken, and lowered once.
    run()
    Path(out, f"{job.process_id}.json").write_text(json.dumps(found))


@pytest.mark.multiprocess
@pytest.mark.parametrize("names", [FEW, deep([*KINDS])], ids=["few", "all"])
def test_the_odd_process_is_named(names: list[str], tmp_path: Path):
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from tests.distributed import test_programs"
    words = [sys.executable, "-c", f"{code} as t; t.main(*sys.argv[1:])", tmp_path, *names]
    process = launch("-n", PROCESSES, "--", *words)
    output = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    told = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(PROCESSES)]
    wrong = {}
    for number, name in enumerate(names):
        first, *others = (each[name] for each in told)
        named = re.search(f"process {number % PROCESSES} (differs|passed)", first)
        if first == "taken" or not named or others != [first] * len(others):
            wrong[name] = [each[name] for each in told]
    assert not wrong
