"""The meter beside a stopwatch, and the FLOPs of steps beside a hand count."""

import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import crossshard
from crossshard import make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools import Flops, Meter, count_flops, peak_flops
from tests.processes import DEVICES, PROCESSES, join, run_processes
from tests.quick import deep_but

ROWS, TIME, WIDTH, LAYERS, WORDS = 16, 8, 16, 3, 40


def tokens(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def of(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Case(NamedTuple):
    """A loss, its model and batch, and a hand count: of the model, and of what is recomputed."""

    loss: Callable[..., Any]
    model: Any
    batch: Any
    flops: int
    again: int = 0


# The input of the first layer has no gradient.
MLP = Case(
    lambda w, x: ((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2).mean(),
    {"up": of(WIDTH, 64), "down": of(64, 4)},
    of(ROWS, WIDTH),
    2 * ROWS * (2 * WIDTH * 64 + 3 * 64 * 4),
)


def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    query, key, value = jnp.split(x @ w["qkv"], 3, -1)
    x += jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", query, key)) @ value @ w["out"]
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def transformer(*, checkpoint: bool) -> Case:
    def loss(w: Any, words: jax.Array) -> jax.Array:
        layer = jax.checkpoint(block) if checkpoint else block
        x, _ = lax.scan(layer, w["words"][words[:, :-1]], w["layers"])
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w["words"].T, words[:, 1:])
        return losses.mean()

    shapes = {"qkv": (3,), "out": (1,), "up": (4,)}
    layers = {name: of(LAYERS, WIDTH, wide * WIDTH) for name, (wide,) in shapes.items()}
    layers["down"] = of(LAYERS, 4 * WIDTH, WIDTH)
    # Of each token: 12 width² parameters of a layer, twice width products with all keys, and words.
    of_layer = 2 * ROWS * TIME * (12 * WIDTH**2 + 2 * TIME * WIDTH)
    # Nothing of the backward pass reads what the last product of a block has added.
    again = LAYERS * (of_layer - 2 * ROWS * TIME * 4 * WIDTH**2)
    flops = 3 * (LAYERS * of_layer + 2 * ROWS * TIME * WIDTH * WORDS)
    model = {"words": of(WORDS, WIDTH), "layers": layers}
    return Case(loss, model, tokens(ROWS, TIME + 1), flops, again * checkpoint)


class Convolutions(nnx.Module):
    """Two convolutions, with running statistics between them, and a sum over all pixels."""

    def __init__(self) -> None:
        self.first = nnx.Conv(3, 8, (3, 3), padding="VALID", rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, axis_name="shards", rngs=nnx.Rngs(0))
        self.last = nnx.Conv(8, 4, (3, 3), padding="VALID", strides=2, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.nn.relu(self.norm(self.first(x)))).mean((1, 2))


CASES = {
    "an MLP": MLP,
    "a transformer": transformer(checkpoint=False),
    "a transformer with checkpoints": transformer(checkpoint=True),
    "convolutions": Case(
        lambda model, x: (model(x) ** 2).mean(),
        Convolutions,
        of(ROWS, 12, 12, 3),
        # 10 x 10 pixels, then 4 x 4; the gradient of the image is not asked for.
        2 * ROWS * 9 * (2 * 100 * 3 * 8 + 3 * 16 * 8 * 4),
    ),
    "Equinox": Case(
        lambda model, x: (jax.vmap(model)(x) ** 2).mean(),
        lambda: eqx.nn.MLP(WIDTH, 4, 64, 1, key=jax.random.key(0)),
        of(ROWS, WIDTH),
        MLP.flops,
    ),
    "a stopped gradient": Case(
        lambda w, x: ((x @ w - lax.stop_gradient(jnp.sin(x) @ w)) ** 2).mean(),
        of(WIDTH, WIDTH),
        of(ROWS, WIDTH),
        2 * ROWS * WIDTH**2 * (2 + 1),
    ),
    "a Mean": Case(
        lambda w, x: crossshard.Mean(((x @ w) ** 2).sum(), (x[:, 0] > 0).sum()),
        of(WIDTH, 4),
        of(ROWS, WIDTH),
        2 * ROWS * WIDTH * 4 * 2,
    ),
}
WAYS: dict[str, Any] = {
    "1 shard": {"num_shards": 1},
    "8 shards": {"num_shards": 8},
    "sharded parameters": {"params": "sharded"},
    "microbatches": {"num_shards": 4, "accumulate_steps": 2},
    "virtual shards": {"num_shards": 4, "virtual_shards": 16},
    "virtual shards that do not divide": {"num_shards": 3, "virtual_shards": 8},
    "over the batch": {"num_shards": 4, "loss_over": "batch", "accumulate_steps": 2},
    "guards, few bits": {
        "nonfinite": "quarantine",
        "reduce_dtype": "int8",
        "check_divergence": 2,
    },
}
# ``loss_over="batch"`` binds no axis, and statistics of NNX are no statistics of one piece.
OWN_AXIS = {"convolutions": {"loss_over": "shard"}}


# A batch norm names the axis of the shards, which these two do not have, or forbid.
EACH = [
    (name, way)
    for name, way in itertools.product(CASES, WAYS)
    if name not in OWN_AXIS or not {"loss_over", "virtual_shards"} & {*WAYS[way]}
]
QUICK = itertools.product(
    ["an MLP", "a transformer with checkpoints"], ["1 shard", "sharded parameters", "microbatches"]
)


@pytest.mark.parametrize(("name", "way"), deep_but([*QUICK], EACH))
def test_a_step_has_the_operations_of_a_hand_count(name: str, way: str):
    case, options = CASES[name], WAYS[way]
    options = options | OWN_AXIS.get(name, {})
    step = make_train_step(case.loss, optax.adam(0.1), **options)
    step.abstract_init(case.model() if callable(case.model) else case.model)
    assert count_flops(step, case.batch) == Flops(case.flops, case.flops + case.again)


def test_what_is_frozen_has_no_gradient():
    options: Any = {"num_shards": 4, "wrt": lambda path, leaf: "down" in jax.tree_util.keystr(path)}
    step = make_train_step(MLP.loss, optax.sgd(0.1), **options)
    step.abstract_init(MLP.model)
    assert count_flops(step, MLP.batch).model == 2 * ROWS * (WIDTH * 64 + 2 * 64 * 4)


def test_rows_of_padding_are_no_operations_of_the_model():
    loss = lambda w, batch: (
        (((batch["x"] @ w) ** 2).sum(1) * batch["mask"]).sum() / batch["mask"].sum()
    )
    step = make_train_step(loss, optax.sgd(0.1), num_shards=8, weight="mask")
    state, batch = step.init(np.ones((4, 1))), {"x": np.ones((10, 4)), "mask": np.ones(10)}
    assert count_flops(step, batch) == Flops(2 * 2 * 10 * 4, 2 * 2 * 16 * 4)
    meter = Meter(step, peak=1)
    for _ in range(2):
        state, metrics = step(state, batch)
        meter.update(batch, metrics)
        jax.block_until_ready(metrics)
    found = meter.report()
    assert found["rows_per_second"] == pytest.approx(10 * found["steps_per_second"])


def test_a_part_that_a_shard_skips_has_no_operations():
    turns = []

    def loss(w: Any, x: Any) -> Any:
        jax.debug.callback(lambda: turns.append(1))
        return ((x @ w) ** 2).mean()

    step = make_train_step(loss, optax.sgd(0.1), num_shards=3, virtual_shards=8, loss_over="shard")
    x = np.ones((16, 4), np.float32)
    jax.block_until_ready(step(step.init(np.ones((4, 1), np.float32)), x))
    jax.effects_barrier()
    # The third shard has two of eight parts, and room for three.
    assert len(turns) == 8
    assert count_flops(step, x) == Flops(2 * 2 * 16 * 4, 2 * 2 * 16 * 4)


def test_a_loss_of_all_rows_counts_what_it_compares():
    loss = lambda w, x: jax.nn.logsumexp((x @ w) @ (x @ w).T, 1).mean()
    once, rows = 2 * ROWS * WIDTH * 4, ROWS * ROWS * 4 * 2
    for over, number in ("batch", 1), ("shard", 4):
        step = make_train_step(loss, optax.sgd(0.1), num_shards=4, loss_over=over)
        step.abstract_init(of(WIDTH, 4))
        # Each shard compares its own rows, of which there are a fourth.
        assert count_flops(step, of(ROWS, WIDTH)).model == 4 * once + 3 * rows // number


# The meter.


def slow(turns: int = 15) -> tuple[Any, Any, Any]:
    """A step that takes the devices some milliseconds, its state and a batch."""
    loss = lambda w, x: (lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ w), x) ** 2).mean()
    step = make_train_step(loss, optax.sgd(0.1), num_shards=2)
    x = jax.device_put(
        jnp.ones((64, 256)), jax.NamedSharding(step.mesh, jax.P(*step.mesh.axis_names))
    )
    return step, step.init(np.eye(256, dtype=np.float32)), x


def number_ended(losses: list[Any]) -> int:
    """How many steps have ended: one that has, has ended after those before it."""
    return max((n for n, loss in enumerate(losses, 1) if loss.is_ready()), default=0)


class Late:
    """A loss that is there, and of which JAX does not know it yet."""

    def is_ready(self) -> bool:
        return False


def test_a_step_has_ended_before_the_next_one():
    step, state, x = slow(1)
    meter, (_, metrics) = Meter(step), step(state, x)
    meter.update(x, metrics)
    (work,) = meter._kinds.values()
    meter._running.extend([(Late(), work), (metrics["loss"], work), (Late(), work)])
    assert meter.report()
    assert len(meter._running) == 1


def test_it_counts_what_is_done_and_between_two_readings_of_a_stopwatch():
    step, state, x = slow()
    meter, number, losses = Meter(step, tokens_per_row=10, window=1000), 20, list[Any]()
    state, metrics = step(state, x)
    jax.block_until_ready(metrics)
    before = time.perf_counter()
    meter.update(x, metrics)  # the first step, which has compiled; the clock starts
    began, most_running = time.perf_counter(), 0
    for _ in range(number):
        state, metrics = step(state, x)
        losses.append(metrics["loss"])
        done = number_ended(losses)
        meter.update(x, metrics)
        # What was done before it looked, and no more than what is done now.
        seen = len(losses) - len(meter._running)
        assert done <= seen <= number_ended(losses)
        most_running = max(most_running, len(losses) - done)
    jax.block_until_ready(losses)
    ended = time.perf_counter()
    found = meter.report()
    after = time.perf_counter()
    # Without a wait in between, calls return long before the devices have computed them.
    assert most_running >= 1
    slowest, fastest = number / (after - before), number / (ended - began)
    print(f"{found['steps_per_second']:.4f} steps/s; stopwatch {slowest:.4f} to {fastest:.4f}")
    assert slowest <= found["steps_per_second"] <= fastest
    assert found["rows_per_second"] == pytest.approx(64 * found["steps_per_second"])
    assert found["tokens_per_second"] == pytest.approx(640 * found["steps_per_second"])
    assert all(type(value) is float for value in found.values())


def test_mfu_is_the_share_of_all_devices_peak():
    step, state, x = slow(3)
    meter, of_own = Meter(step, peak=1e9), Meter(step, peak=1e9, flops_per_row=1000)
    assert meter.report() == {}
    for _ in range(3):
        state, metrics = step(state, x)
        jax.block_until_ready(metrics)
        meter.update(x, metrics)
        of_own.update(x, metrics)
    found, own = meter.report(), of_own.report()
    flops = 3 * 3 * 2 * 64 * 256 * 256
    assert meter.flops == Flops(flops, flops)
    assert found["mfu"] == found["hfu"] == pytest.approx(flops * found["steps_per_second"] / 2e9)
    assert own["mfu"] == pytest.approx(1000 * own["rows_per_second"] / 2e9)
    assert "hfu" not in own


def test_a_pause_is_no_time_of_training():
    step, state, x = slow(10)
    meter, seconds, start = Meter(step, window=1000), 0.0, 0.0
    for turn in range(13):
        state, metrics = step(state, x)
        meter.update(x, metrics)
        if turn % 4 == 0:
            # Steps that run then are waited for, and count.
            with meter.paused():
                assert not meter._running
                seconds += time.perf_counter() - start if turn else 0
                time.sleep(0.3)
                # Its clock goes on after this.
                start = time.perf_counter()
    began, last = meter._seen[0], meter._seen[-1]
    assert last[1] - began[1] == 12
    assert 0 < last[0] <= seconds
    assert meter.report()["steps_per_second"] == pytest.approx(12 / last[0])


def test_a_fault_in_a_pause_ends_it():
    step, state, x = slow(1)
    meter = Meter(step)
    for _ in range(3):
        state, metrics = step(state, x)
        meter.update(x, metrics)
        with pytest.raises(KeyError), meter.paused():
            raise KeyError
    assert meter.report()["rows_per_second"] > 0


def test_a_batch_of_other_shapes_compiles_which_is_no_time_of_training():
    step, state, x = slow(3)
    meter, seconds = Meter(step, window=1000), {True: 0.0, False: 0.0}
    for rows, is_new in (64, True), (64, False), (32, True), (32, False), (64, False):
        start = time.perf_counter()
        batch = x if rows == 64 else np.ones((32, 256), np.float32)
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        meter.update(batch, metrics)
        seconds[is_new] += time.perf_counter() - start
    began, last = meter._seen[0], meter._seen[-1]
    assert (last - began)[1:3].tolist() == [3, 64 + 32 + 64]
    # On a busy machine the end of a step is seen late.
    assert 0 < last[0] < seconds[False] + seconds[True] / 4


def test_the_means_are_over_the_last_steps():
    step, state, x = slow(1)
    meter = Meter(step, window=3)
    for _ in range(9):
        state, metrics = step(state, x)
        jax.block_until_ready(metrics)
        meter.update(x, metrics)
    assert [int(point[1]) for point in meter._seen] == [5, 6, 7, 8]
    # Of a loop that waits once in a while, all steps between two looks are seen at once.
    (work,) = meter._kinds.values()
    for _ in range(10):
        state, metrics = step(state, x)
        meter._running.append((metrics["loss"], work))
    jax.block_until_ready(metrics)
    before = meter._seen[-1]
    found, after = meter.report(), meter._seen[-1]
    assert after[1] - before[1] == 10
    assert found["steps_per_second"] == pytest.approx(10 / (after[0] - before[0]))


def test_what_is_not_counted_is_named_and_gives_no_mfu():
    called = lambda x: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.stop_gradient(x)
    )
    step = make_train_step(lambda w, x: (called(x) @ w).mean(), optax.sgd(0.1), num_shards=1)
    state, x = step.init(np.ones((4, 1), np.float32)), np.ones((8, 4), np.float32)
    meter, own = Meter(step, peak=1e9), Meter(step, peak=1e9, flops_per_row=16)
    for _ in range(2):
        state, metrics = step(state, x)
        jax.block_until_ready(metrics)
        meter.update(x, metrics)
        own.update(x, metrics)
    assert set(meter.report()) == {"steps_per_second", "rows_per_second"}
    assert "mfu" in own.report()
    assert [each.partition(" ")[0] for each in meter.flops.uncounted] == ["pure_callback"]
    assert "test_meter.py" in meter.flops.uncounted[0]


class Device(NamedTuple):
    """What is asked of a device."""

    device_kind: str


# As JAX names them; the peaks are the makers', for bfloat16 without sparsity, in TFLOP/s.
KINDS = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA B200": 2250,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5": 459,
    "TPU v5p": 459,
    "TPU v6 lite": 918,
    "TPU v6e": 918,
    # Others may have another peak.
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA H200 NVL": None,
    "NVIDIA GB200": None,
    "TPU v4 lite": None,
    "TPU v3": None,
    "cpu": None,
}


def test_the_peak_of_a_device_is_that_of_its_kind():
    found = {kind: peak_flops(Device(kind)) for kind in KINDS}
    assert found == {kind: peak and peak * 1e12 for kind, peak in KINDS.items()}


def test_what_is_no_step_and_no_number_is_refused():
    step, state, x = slow(1)
    for call in (Meter, lambda other: count_flops(other, x)):
        with pytest.raises(ArgumentTypeError, match="step must be what make_train_step returns"):
            call(lambda state, batch: (state, {}))
    with pytest.raises(ArgumentTypeError, match=r"device must be one of jax\.devices\(\)"):
        peak_flops("H100")
    for options in ({"peak": 0}, {"tokens_per_row": -1.5}, {"flops_per_row": math.inf}):
        (name,) = options
        with pytest.raises(ArgumentError, match=f"{name} must be positive and finite"):
            Meter(step, **options)
    with pytest.raises(ArgumentTypeError, match="window must be an int of at least 1"):
        Meter(step, window=1.5)
    state, metrics = step(state, x)
    for wrong in (state, metrics["loss"], {}, {"loss": 1.0}):
        with pytest.raises(ArgumentTypeError, match="metrics must be what step"):
            Meter(step).update(x, wrong)
    for wrong in ({}, 3.0, np.ones((0, 4))):
        with pytest.raises(ArgumentError, match=r"The batch is empty|a scalar|has 0 rows"):
            Meter(step).update(wrong, metrics)
    other = make_train_step(lambda w, x: (x @ w).mean(), optax.sgd(0.1), num_shards=1)
    with pytest.raises(ArgumentError, match="call init"):
        count_flops(other, x)


# Several processes.


def main(process: int, port: int, out: str) -> None:
    """One process: pass its own rows, and write down what the meter says of those of all."""
    join(process, port)
    loss = lambda w, x: ((x @ w) ** 2).mean()
    step = make_train_step(loss, optax.sgd(0.1), num_shards=PROCESSES * DEVICES)
    state, x = step.init(np.ones((4, 1), np.float32)), np.ones((8, 4), np.float32)
    meter = Meter(step, peak=1e9)
    for _ in range(3):
        state, metrics = step(state, x)
        meter.update(x, metrics)
        jax.block_until_ready(metrics)
    found = meter.report()
    rows = found["rows_per_second"] / found["steps_per_second"]
    peak = found["steps_per_second"] * meter.flops.model / found["mfu"]
    Path(out).write_text(json.dumps([rows, peak, meter.flops.model, meter.flops.hardware]))
    jax.distributed.shutdown()


@pytest.mark.deep
@pytest.mark.multiprocess
def test_rows_and_devices_are_those_of_all_processes(tmp_path: Path):
    for found in run_processes("tools.test_meter", tmp_path):
        rows, peak, model, hardware = found
        assert rows == pytest.approx(16)
        assert peak == pytest.approx(PROCESSES * DEVICES * 1e9)
        assert model == hardware == 2 * 2 * 16 * 4
