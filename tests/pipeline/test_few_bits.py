"""Few bits: what is sent and what is held back are the exact sum; bytes, tiers, other shards.

The numbers of each way in, in groups and in skipped steps hold the combinations, by their factor
`wire`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from crossshard.collectives.few_bits import DTYPES, LANES, Codec
from crossshard.errors import ArgumentError, ArgumentTypeError, AxisError
from crossshard.pipeline import Quantized
from tests.quick import deep, deep_but
from tests.reference.pipeline_model import FEW_BITS, each_row, to_few_bits
from tests.step.common import sgd_step, train

N, STEPS = 8, 3
RNG = np.random.default_rng(0)
# Split along the first axis, along another, not at all since it is small, and padded.
SHAPES = {"w": (64, 40), "layers": (3, 256, 256), "b": (40,), "odd": (37, 111), "long": (1500,)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
# The gradient of each shard, times a power of two that differs between shards.
SIZE = np.float32(2.0) ** RNG.integers(-3, 3, size=N)
G = {
    name: (RNG.normal(size=(STEPS, N, *shape)) * SIZE.reshape(N, *[1] * len(shape))).astype("f4")
    for name, shape in SHAPES.items()
}
LARGE = ("w", "layers", "odd", "long")


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return sum((params[name] * batch[name].mean(0)).sum() for name in params)


def batch_of(step: int, number: int = N) -> dict[str, np.ndarray]:
    """A row for each of 8 shards, or the means of as many as a shard gets."""
    rows = {name: g[step] for name, g in G.items()}
    return {n: x.reshape(number, N // number, *x.shape[1:]).mean(1) for n, x in rows.items()}


def residual_of(step: Any, state: Any) -> dict[str, np.ndarray]:
    """float64: what all shards hold back together."""
    held = jax.device_get(step.unshard(state)).opt_state.aggregate.residual
    return {name: np.float64(x).sum(0) for name, x in held.items()}


def one_unit(x: np.ndarray, terms: int) -> np.ndarray:
    """A unit in the last place of float32 for each addition of numbers as large as this."""
    return terms * np.float64(np.spacing(np.float32(np.abs(x).max())))


# The codec, by itself.


@pytest.mark.parametrize("dtype", deep_but(["int4"], DTYPES))
def test_numbers_are_those_of_numpy_and_what_is_lost_is_exact(dtype: str):
    x = np.float32(RNG.normal(size=(4, 256, LANES)) * 10.0 ** RNG.integers(-6, 6, size=(4, 1, 1)))
    x[0, 1] = 0
    codec = Codec(dtype)
    coded = codec.encode(x, codec.scales(x))
    assert coded.dtype == jnp.uint8
    bits, block = FEW_BITS[dtype]
    assert coded.nbytes == x.size * bits / 8 + 2 * x.size / block
    got = np.asarray(codec.decode(coded, 256))
    np.testing.assert_array_equal(got, np.stack([to_few_bits(np.float64(row), dtype) for row in x]))
    assert np.all(np.float64(x) - np.float64(got) == np.float64(x - got))


def test_stochastic_rounding_keeps_the_mean():
    x = jnp.float32(RNG.normal(size=(2, LANES)))
    codec = Codec("int4", stochastic=True)
    read = jax.vmap(
        lambda key: codec.decode(codec.encode(x, codec.scales(x), codec.noise(x, key)), 2)
    )
    many = np.float64(read(jax.random.split(jax.random.key(0), 4000)))
    unit = np.abs(x).max() / 7
    assert np.all(np.abs(many - x).max(0) <= 1.01 * unit)
    # Of 4,000 draws the mean of a number between two neighbours.
    assert np.abs(many.mean(0) - x).max() < 5 * 0.5 * unit / np.sqrt(4000)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_become_so(bad: float):
    # Of as many rows, in one program, XLA for CPUs ignores NaN in a maximum.
    x = np.ones((256, LANES), np.float32)
    x[::2, 3] = bad
    for dtype in DTYPES:
        codec = Codec(dtype)
        coded = jax.jit(codec.encode)(x, jax.jit(codec.scales)(x))
        got = np.asarray(jax.jit(codec.decode, static_argnums=1)(coded, 256))
        assert not np.isfinite(got[::2, 3]).any()
        np.testing.assert_allclose(got[1::2], 1, rtol=0.01)


# The sum.


MESH = jax.make_mesh((2, 4), ("host", "chip"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
OF_MODEL = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
HOW = {
    "replicated": {"weight_update": "replicated"},
    "sharded": {"weight_update": "sharded"},
    "params sharded": {"params": "sharded"},
}
# A dict has tiers: another wire along each axis.
SUMS: list[Any] = [
    ("int4", "replicated", "mean"),
    ({"host": "int4", "chip": "int8"}, "replicated", "mean"),
    deep(({"host": "int4", "chip": "int8"}, "sharded", "mean")),
    deep(("int8", "sharded", "sum")),
    deep(("float8_e4m3fn", "params sharded", "mean")),
    deep((Quantized("int4", "stochastic"), "replicated", "sum")),
]


def check_sum(step: Any, state: Any, steps: int, divisor: int) -> None:
    """What was sent in so many steps, and what is held back, are the exact sum."""
    held, params = residual_of(step, state), jax.device_get(step.model(state))
    for name, sent in params.items():
        exact = np.float64(G[name][:steps]).sum((0, 1)) / divisor
        allowed = one_unit(exact, STEPS * 8)
        np.testing.assert_allclose(held[name] - sent, exact, rtol=0, atol=allowed)
        if name in LARGE:
            # Not because nothing was rounded.
            assert np.abs(-sent - exact).max() > 100 * allowed
        else:
            assert not held[name].any()


@pytest.mark.parametrize(("wire", "how", "reduction"), SUMS, ids=str)
def test_what_is_sent_and_what_is_held_back_are_the_sum(wire: Any, how: str, reduction: str):
    where: Any = {"mesh": MESH} if isinstance(wire, dict) else {"num_shards": N}
    opt = CrossShardOptimizer(optax.sgd(1.0), reduction)
    step = make_train_step(loss_fn, opt, reduce_dtype=wire, **where, **HOW[how])
    state = train(step, step.init(PARAMS), map(batch_of, range(STEPS)))
    check_sum(step, state, STEPS, N if reduction == "mean" else 1)


@pytest.mark.deep
@pytest.mark.parametrize("how", ["sharded", "params sharded"])
def test_arrays_that_are_split_over_a_model_axis(how: str):
    place = lambda x: NamedSharding(OF_MODEL, P(*[None] * (x.ndim - 1), "model"))
    params = {name: jax.device_put(x, place(x)) for name, x in PARAMS.items() if name != "odd"}
    options: Any = {"mesh": OF_MODEL, "axis_name": "data", "reduce_dtype": "int4", **HOW[how]}
    step = make_train_step(loss_fn, optax.sgd(1.0), **options)
    state = train(step, step.init(params), (batch_of(t, 4) for t in range(STEPS)))
    check_sum(step, state, STEPS, N)


@pytest.mark.deep
def test_chance_does_not_part_the_copies():
    """What several shards send alike, on the way back from outer tiers, they must round alike."""
    wires = {name: Quantized(of, "stochastic") for name, of in (("host", "int8"), ("chip", "int4"))}
    step = make_train_step(
        loss_fn, optax.sgd(1.0), mesh=MESH, reduce_dtype=wires, **HOW["replicated"]
    )
    state = train(step, step.init(PARAMS), map(batch_of, range(2)))
    copies = [np.array(shard.data) for shard in state.params["w"].addressable_shards]
    for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])
    check_sum(step, state, 2, N)


@pytest.mark.parametrize("how", ["params sharded", deep("sharded"), deep("replicated")])
def test_what_is_held_back_may_be_kept_in_16_bits(how: str):
    wire = Quantized("int4", error_feedback="bfloat16")
    step = sgd_step(loss_fn, 1.0, N, reduce_dtype=wire, **HOW[how])
    assert "int4 with error feedback in bfloat16" in str(step)
    state = train(step, step.init(PARAMS), map(batch_of, range(STEPS)))
    held = jax.tree.leaves(state.opt_state.aggregate)
    assert {x.dtype for x in held} == {jnp.dtype(jnp.bfloat16)}
    few = sgd_step(loss_fn, 1.0, 2, reduce_dtype=wire, **HOW[how])
    few.init(PARAMS)
    fewer = few.reshard(step.unshard(state))
    assert {x.dtype for x in jax.tree.leaves(fewer.opt_state.aggregate)} == {held[0].dtype}
    for name in LARGE:
        own = np.float64(jax.device_get(step.unshard(state).opt_state.aggregate.residual[name]))
        sent = np.float64(jax.device_get(step.model(state))[name])
        exact = np.float64(G[name][:STEPS]).sum((0, 1)) / N
        # Each shard rounds what it holds back to 8 bits behind the point, in each step.
        unit = STEPS * np.abs(own).max() * 2.0**-8
        assert 0 < np.abs(own.sum(0) - sent - exact).max() < unit
        # The shards' sum stays on other numbers of them, but for one more rounding.
        moved = np.float64(jax.device_get(few.unshard(fewer).opt_state.aggregate.residual[name]))
        assert np.abs(moved.sum(0) - own.sum(0)).max() < 2 * np.abs(moved).max() * 2.0**-8


def test_without_error_feedback_nothing_is_kept_and_the_error_stays():
    off = {}
    for feeds_back in (True, False):
        wire = Quantized("int4", error_feedback=feeds_back)
        step = sgd_step(loss_fn, 1.0, N, reduce_dtype=wire)
        state = train(step, step.init(PARAMS), [batch_of(0)] * 10)
        assert bool(jax.tree.leaves(state.opt_state.aggregate)) is feeds_back
        error = -np.float64(jax.device_get(state.params["w"])) - 10 * np.float64(G["w"][0]).mean(0)
        off[feeds_back] = np.abs(error).max()
    # The same error in each of ten steps, or in the last one.
    assert off[False] > 5 * off[True]


def test_one_shard_sends_nothing_and_rounds_nothing():
    step = sgd_step(loss_fn, 1.0, 1, reduce_dtype="int4")
    state, _ = step(step.init(PARAMS), batch_of(0, 1))
    for name, x in jax.device_get(state.params).items():
        np.testing.assert_array_equal(x, -batch_of(0, 1)[name][0])


@pytest.mark.parametrize(
    ("how", "dtype", "most"), [("params sharded", "int4", 0.14), deep(("sharded", "int8", 0.27))]
)
def test_the_bytes_with_the_scales(how: str, dtype: str, most: float):
    params = {"w": np.zeros((256, 512), np.float32), "b": np.zeros(512, np.float32)}
    loss = lambda p, x: ((jnp.tanh(x @ p["w"] + p["b"])) ** 2).mean()
    rows = np.zeros((N, 256), np.float32)

    def sent(**options: Any) -> float:
        step = make_train_step(loss, optax.adam(1e-3), num_shards=N, **HOW[how], **options)
        return crossshard.inspect(step.lower(step.init(params), rows), params).bytes_sent

    options = {"reduce_dtype": dtype} | ({"gather_dtype": dtype} if how == "params sharded" else {})
    share = sent(**options) / sent()
    # With a sharded update parameters that are whole are gathered as they are.
    assert share <= (0.5 + most / 2 if how == "sharded" else most)
    assert share > {"int8": 0.25, "int4": 0.125}[dtype]


def test_each_tier_sends_in_its_own_way():
    params = {"w": np.zeros((256, 512), np.float32)}
    loss = lambda p, x: (jnp.tanh(x @ p["w"]) ** 2).mean()

    def along(wires: Any) -> dict[tuple[str, ...], float]:
        step = make_train_step(
            loss, optax.sgd(1.0), mesh=MESH, reduce_dtype=wires, weight_update="replicated"
        )
        lowered = step.lower(step.init(params), np.zeros((N, 256), np.float32))
        found: dict[tuple[str, ...], float] = {}
        for each in crossshard.inspect(lowered, params).collectives:
            found[each.axes] = found.get(each.axes, 0) + each.bytes_sent
        return found

    size = params["w"].nbytes
    # Inside 3/4 of it, twice; across 1/2 of the quarter that a chip is left with.
    found = along({"host": "int8"})
    assert found["chip",] == pytest.approx(2 * 3 / 4 * size, rel=0.01)
    assert found["host",] == pytest.approx(2 * 1 / 2 * size / 4 * 0.254, rel=0.01)
    found = along({"host": "bfloat16", "chip": "int8"})
    assert found["chip",] == pytest.approx(2 * 3 / 4 * size * 0.254, rel=0.01)
    assert found["host",] == pytest.approx(2 * 1 / 2 * size / 4 / 2, rel=0.01)


# The rows of a batch weigh more or less than those of others, and may weigh nothing.
WEIGHTS = np.float32([[*range(1, 9)], [0, 0, 100, 0, 0, 50, 0, 0], [1, 2, 0, 0, 0, 3, 0, 1]])


@pytest.mark.parametrize("how", deep_but(["replicated", "params sharded"], HOW))
def test_what_is_held_back_is_of_the_mean_whatever_a_batch_weighs(how: str):
    def weighted(params: Any, batch: Any) -> jax.Array:
        one = lambda name: (params[name] * jnp.tensordot(batch["k"], batch[name], 1)).sum()
        return sum(one(name) for name in params) / batch["k"].sum()

    step = sgd_step(weighted, 1.0, N, reduce_dtype="int4", weight="k", **HOW[how])
    state = step.init(PARAMS)
    for t, weights in enumerate(WEIGHTS):
        state, _ = step(state, batch_of(t) | {"k": weights})
    held, params = residual_of(step, state), jax.device_get(step.model(state))
    for name, sent in params.items():
        means = [np.average(np.float64(g), 0, k) for g, k in zip(G[name], WEIGHTS, strict=True)]
        allowed = one_unit(np.array(means), STEPS * 8)
        np.testing.assert_allclose(held[name] - sent, sum(means), rtol=0, atol=allowed)
        assert name not in LARGE or np.abs(sent + sum(means)).max() > 100 * allowed


# On other shards.


@pytest.mark.parametrize(
    ("way", "how", "guard"),
    [
        ("reshard", "sharded", "quarantine"),
        deep(("reshard", "replicated", None)),
        deep(("checkpoints", "params sharded", None)),
        deep(("checkpoints", "params sharded", "quarantine")),
    ],
)
def test_what_is_held_back_stays_on_other_shards(
    tmp_path: Path, way: str, how: str, guard: str | None
):
    before: Any = None
    state: Any = None
    for t, number in enumerate((8, 2)):
        options = HOW[how] | {"nonfinite": guard}
        step = sgd_step(loss_fn, 1.0, number, reduce_dtype="int4", **options)
        if before is None:
            state = step.init(PARAMS)
        elif way == "reshard":
            state = step.reshard(before.unshard(state))
        else:
            with Checkpoints(tmp_path / str(number), before) as saved:
                saved.save(state)
            with Checkpoints(tmp_path / str(number), step) as saved:
                state, _ = saved.restore_latest(step.init(PARAMS))
        if before is not None:
            check_sum(step, state, t, N)
        state, _ = step(state, batch_of(t, number))
        before = step
    check_sum(before, state, 2, N)


# What goes with it.


def test_what_is_held_back_counts_as_nothing_where_it_is_not_finite():
    step = sgd_step(loss_fn, 1.0, N, nonfinite="skip", reduce_dtype="int8", **HOW["sharded"])
    state, _ = step(step.init(PARAMS), batch_of(0))

    def gone_on(planted: float) -> Any:
        # On shard 2 alone, of an array that is sent in few bits and of one that is not.
        plant = lambda x: x.at[2, -1].set(planted) if x.ndim > 1 else x
        here = jax.tree.map(jnp.copy, state)
        held = here.opt_state.aggregate
        held = held._replace(
            residual={n: jax.device_put(plant(x), x.sharding) for n, x in held.residual.items()}
        )
        here = dataclasses.replace(here, opt_state=here.opt_state._replace(aggregate=held))
        for t in (1, 2):
            here, metrics = step(here, batch_of(t))
            assert not metrics["skipped"]
        return jax.device_get((here.params, here.opt_state.aggregate))

    jax.tree.map(np.testing.assert_array_equal, gone_on(np.nan), gone_on(0.0))


def test_a_loss_sees_parameters_as_they_are_gathered():
    dtype = "int4"
    weights = {"w": np.float32(RNG.normal(size=(64, 40)))}
    loss = lambda p, x: (p["w"] ** 2).sum() / 2 + 0 * x.sum()
    step = make_train_step(
        loss, optax.sgd(1.0), num_shards=N, params="sharded", gather_dtype=dtype, loss_over="shard"
    )
    state, _ = step(step.init(weights), np.zeros((N, 1), np.float32))
    # The gradient is what the loss sees, and the parameters themselves are not rounded.
    want = np.float64(weights["w"]) - each_row(np.float64(weights["w"]), N, dtype, split=True)
    got = np.float64(jax.device_get(state.params["w"]))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"reduce_dtype": {"hots": "int8"}},
        AxisError,
        "'hots', and the shard axes are 'host'",
    ),
    ({"reduce_dtype": {"host": "bfloat17"}}, ArgumentError, "reduce_dtype must be bfloat16"),
    ({"reduce_dtype": {}}, ArgumentError, "names of shard axes"),
]


@pytest.mark.parametrize(("options", "kind", "text"), REFUSED)
def test_refusals(options: Any, kind: Any, text: str):
    with pytest.raises(kind, match=text):
        make_train_step(loss_fn, optax.sgd(1.0), mesh=MESH, **options)


def test_a_quantized_of_nothing_known():
    for given in ({"dtype": "bfloat16"}, {"dtype": "int8", "rounding": "up"}):
        with pytest.raises(ArgumentError):
            Quantized(**given)
    with pytest.raises(ArgumentTypeError):
        Quantized("int8", error_feedback="yes")
    with pytest.raises(ArgumentTypeError, match="True, which keeps float32, 'bfloat16' or False"):
        Quantized("int8", error_feedback=np.ones(2))
