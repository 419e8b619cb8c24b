"""The bytes of programs of every kind, against a count by hand from shapes and dtypes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from tests.tools.steps import GRID, SPLIT, WHOLE, moved, over, placed, summed

N, SGD = 8, optax.sgd(0.1)
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
PAIR = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
EIGHTHS = P(("data", "model"))


def a(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# w and v are split by a sharded update; b, of fewer than 1,024 numbers, is not.
PARAMS = {"w": a(64, 512), "b": a(512), "v": a(512, 64)}
W, B, V = 64 * 512, 512, 512 * 64
BATCH = a(64, 64)


# Over the model axis.
LIES = {"w": P(None, "model"), "b": P("model"), "v": P("model")}


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]) ** 2)


def step_of(rule: Any, params: Any = PARAMS, batch: Any = BATCH, **options: Any) -> Any:
    options = {"num_shards": N} | options
    step = make_train_step(options.pop("loss", loss_fn), rule, **options)
    return step.lower(step.abstract_init(params), batch)


# Each returns a program, the bytes of its arrays, and those of its scalars.
Counted = tuple[Any, float, float]
PROGRAMS: dict[str, Callable[[], Counted]] = {}


def program(function: Callable[[], Counted]) -> Callable[[], Counted]:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def ours(update: Any, rule: Any, options: Any, arrays: float, scalars: float) -> Counted:
    return step_of(rule, weight_update=update, **options), arrays, scalars


# Gradients of w and v are scattered, and parameters gathered; those of b and the loss summed.
IN_PARTS = 2 * moved(N, 4 * (W + V)) + summed(N, 4 * (B + 1))
ADAM, ADAMW = optax.adam(0.1), optax.adamw(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), SGD)
GROUPED = CrossShardOptimizer(SGD, group_assignment=HALVES)
WIRE = {"reduce_dtype": "bfloat16"}
LITTLE = {"params": {"w": a(64, 32), "b": a(32), "v": a(32, 64)}}
MUCH = {"params": {"w": a(64, 2048), "b": a(2048), "v": a(2048, 64)}}
HALF = {
    "params": jax.tree.map(lambda x: a(*x.shape, dtype=jnp.bfloat16), PARAMS),
    "batch": a(64, 64, dtype=jnp.bfloat16),
    "master_dtype": "float32",
}
MODEL = {
    "params": placed(PARAMS, LIES, PAIR),
    "num_shards": None,
    "mesh": PAIR,
    "axis_name": "data",
}
STEPS = {
    # The loss is in one bucket with b.
    "a replicated step": ("replicated", SGD, {}, summed(N, 4 * (W + V + B + 1)), 0),
    "a sharded step": ("sharded", ADAMW, {}, IN_PARTS, 0),
    "auto with little is replicated": (
        *("auto", ADAMW, LITTLE, summed(N, 4 * (2 * 64 * 32 + 32 + 1)), 0),
    ),
    "auto with much is sharded": (
        *("auto", ADAMW, MUCH, 2 * moved(N, 4 * (2 * 64 * 2048 + 2048)), summed(N, 4)),
    ),
    # Squares of the slices of w and of v, summed over the shards with the loss and b.
    "a clip by the global norm": ("sharded", CLIPPED, {}, IN_PARTS + summed(N, 8), 0),
    # CPUs exchange 16 bits and add by themselves, and gather what they rounded; b alike, in a
    # bucket of its own, and the loss in 32.
    "16 bits, replicated": ("replicated", SGD, WIRE, 2 * moved(N, 2 * (W + V + B)), 7),
    "16 bits, sharded": (
        *("sharded", ADAM, WIRE),
        *(moved(N, 2 * (W + V)) + moved(N, 4 * (W + V)) + 2 * moved(N, 2 * B), 7),
    ),
    # Summed in 32 bits, gathered in 16.
    "masters of parameters in 16 bits": (
        *("sharded", ADAM, HALF),
        *(moved(N, 4 * (W + V)) + moved(N, 2 * (W + V)) + summed(N, 4 * (B + 1)), 0),
    ),
    "four microbatches": ("sharded", SGD, {"accumulate_steps": 4}, IN_PARTS, 0),
    # The bucket of b and the loss is padded to a multiple of four.
    "groups of four": ("replicated", GROUPED, {}, summed(4, 4 * (W + V + B + 1 + 3)), 0),
    "a moving average in parts": ("sharded", SGD, {"ema": 0.9}, IN_PARTS, 0),
    # 32 rows of the product with v are summed over the model axis.
    "a model over two by two devices": (
        *("sharded", ADAMW, MODEL),
        2 * moved(2, 4 * (W + V) / 2) + summed(2, 4 * (B / 2 + 1)) + summed(2, 4 * 32 * 64),
        0,
    ),
    # With b the loss and the number of shards that count; then whether all is finite. What is sent
    # where it is not does not count.
    "quarantine": (
        *("replicated", SGD, {"nonfinite": "quarantine"}),
        *(summed(N, 4 * (W + V + B + 2)), summed(N, 4)),
    ),
    "a step that is skipped": (
        *("replicated", SGD, {"nonfinite": "skip"}),
        *(summed(N, 4 * (W + V + B + 1)), summed(N, 4)),
    ),
}
PROGRAMS |= {name: functools.partial(ours, *row) for name, row in STEPS.items()}


@program
def weighted_rows() -> Counted:
    def loss(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
        errors = jnp.mean((hidden @ params["v"]) ** 2, -1)
        return (errors * batch["rows"]).sum() / batch["rows"].sum()

    options = {"loss": loss, "weight": "rows", "weight_update": "replicated"}
    lowered = step_of(SGD, PARAMS, {"x": BATCH, "rows": a(64)}, **options)
    # With b the loss and the sum of the weights.
    return lowered, summed(N, 4 * (W + V + B + 2)), 0


@program
def the_optax_idiom_with_types() -> Counted:
    opt = CrossShardOptimizer(SGD)

    def step(params: Any, x: Any) -> Any:
        gradients = crossshard.grad(loss_fn)(params, x)
        updates, _ = opt.update(gradients, opt.init(params), params)
        return optax.apply_updates(params, updates)

    return (
        over(step, (WHOLE, SPLIT), WHOLE, vma=True).lower(PARAMS, BATCH),
        summed(N, 4 * (W + V + B)),
        0,
    )


@program
def sums_and_scatters() -> Counted:
    def step(x: Any, y: Any) -> Any:
        return lax.psum(x, "s"), lax.psum_scatter(y, "s", tiled=True), lax.pmax(x[0, 0], "s")

    lowered = over(step, (WHOLE, WHOLE), (WHOLE, SPLIT, WHOLE)).lower(a(24, 5), a(16, 3))
    return lowered, summed(8, 4 * 24 * 5) + moved(8, 4 * 16 * 3), summed(8, 4)


@program
def a_gather_over_one_axis_of_two() -> Counted:
    step = lambda x: lax.all_gather(x, "model", tiled=True)
    # A device holds an eighth of x, and afterwards a quarter.
    lowered = over(step, EIGHTHS, P("data"), GRID).lower(a(48, 10, dtype=jnp.int16))
    return lowered, moved(2, 2 * 48 * 10 / 4), 0


@program
def an_exchange() -> Counted:
    step = lambda x: lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True)
    # Between four, of a device's own eighth.
    lowered = over(step, EIGHTHS, EIGHTHS, GRID).lower(a(32, 12))
    return lowered, moved(4, 4 * 32 * 12 / 8), 0


@program
def a_ring() -> Counted:
    def step(x: Any) -> Any:
        return lax.ppermute(x, "s", [(i, (i + 1) % 8) for i in range(8)])

    return over(step, SPLIT, SPLIT).lower(a(8 * 6, 5, dtype=jnp.int8)), 6 * 5, 0


@program
def pmap() -> Counted:
    step = jax.pmap(lambda x: lax.pmean(x, "i") + lax.psum(1.0, "i"), axis_name="i")
    return step.lower(a(8, 20, 3)), summed(8, 4 * 20 * 3), 0


@program
def the_branch_that_sends_most() -> Counted:
    def step(x: Any, which: Any) -> Any:
        small, large = (lambda x: lax.psum(x[:2], "s")), (lambda x: 2 * lax.psum(x, "s")[:2])
        again = lambda x: lax.cond(x[0, 0] > 0, large, lambda x: x[:2] + large(x), x) + small(x)
        return lax.switch(which, [small, again, lambda x: x[:2]], x)

    # Of three branches the second one, of whose two branches each sends as much.
    lowered = over(step, (WHOLE, WHOLE), WHOLE).lower(a(6, 4), a(dtype=jnp.int32))
    return lowered, summed(8, 4 * 6 * 4) + summed(8, 4 * 2 * 4), 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bytes_are_those_counted_by_hand(name: str):
    lowered, arrays, scalars = PROGRAMS[name]()
    report = crossshard.inspect(lowered)
    assert report.bytes_sent == pytest.approx(arrays, rel=1e-12), str(report)
    assert report.scalar_bytes_sent == pytest.approx(scalars, rel=1e-12), str(report)
