"""Updates leaf by leaf: each leaf is updated by one shard, or cut, as one device does."""

import collections
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import crossshard
from crossshard import make_train_step
from crossshard.step.train_step import layout_of
from tests.quick import deep, deep_but
from tests.step.common import assert_close, assert_same, on_one_device, train

N = 8
_rng = np.random.default_rng(8)


def normal(*shape: int, scale: float = 0.125) -> np.ndarray:
    return np.float32(scale * _rng.normal(size=shape))


# Matrices of several shapes, layers that 8 shards divide and others, long and short vectors, of
# which one is padded where it is cut, and one that is larger than all others.
PARAMS = {
    "bias": normal(64),
    "in": normal(32, 64),
    "large": normal(64, 192),
    "layers": normal(8, 64, 64, scale=0.05),
    "more": normal(6, 64, 64, scale=0.05),
    "odd": 1 + normal(2051),
    "out": normal(64, 32),
}
BATCHES = [normal(16, 32, scale=1.0) for _ in range(4)]


def loss_fn(params: Any, x: Any) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w), None

    h = jnp.tanh(x @ params["in"] + params["bias"])
    h, _ = jax.lax.scan(layer, h, params["layers"])
    h, _ = jax.lax.scan(layer, h, params["more"])
    wide = ((h @ params["large"]) ** 2).mean()
    odd = (params["odd"] ** 2).mean() * (x**2).mean()
    return ((h @ params["out"] - x) ** 2).mean() + 0.1 * wide + odd


def matrices(params: Any) -> Any:
    of = lambda x: contrib.MuonDimensionNumbers((x.ndim - 2,), (x.ndim - 1,))
    return jax.tree.map(lambda x: of(x) if x.ndim > 1 else None, params)


SGD = optax.sgd(0.1, momentum=0.9)
CLIP = optax.clip_by_global_norm(0.5)


def muon(**options: Any) -> Any:
    return contrib.muon(
        0.01, eps=1e-3, muon_weight_dimension_numbers=matrices, adam_eps_root=1e-4, **options
    )


CLIP_MUON = optax.chain(CLIP, muon())
# Cut everywhere, with sums of slices; partly cut; layer by layer; and dealt out. The others are
# those of tests/harness.py and test_every_optimizer.py.
OPTIMIZERS: dict[str, Any] = {
    "clip, sgd": optax.chain(CLIP, SGD),
    "if finite": optax.apply_if_finite(SGD, 3),
    "muon that decays": muon(weight_decay=0.1),
    # A norm of what owners have computed, too.
    "clip, muon, clip": optax.chain(CLIP_MUON, optax.clip_by_global_norm(0.01)),
    "sm3": optax.sm3(0.01),
}
PLACES: dict[str, dict[str, Any]] = {
    "sharded": {"weight_update": "sharded"},
    "parts": {"params": "sharded"},
}


@functools.cache
def made(optimizer: Any, place: str = "sharded", number: int = N, **options: Any) -> Any:
    options = PLACES[place] | {"num_shards": number} | options
    return make_train_step(options.pop("loss", loss_fn), optimizer, **options)


@pytest.mark.parametrize(
    "name", deep_but(["clip, sgd", "if finite", "muon that decays"], OPTIMIZERS)
)
def test_it_follows_one_device(name: str):
    # Where parameters are replicated, owners take theirs, which decay reads.
    step = made(OPTIMIZERS[name], "sharded" if name == "muon that decays" else "parts")
    state = train(step, step.init(PARAMS), BATCHES)
    assert "leaf by leaf" in step.describe()
    whole = step.unshard(state)
    expected, inner = on_one_device(loss_fn, OPTIMIZERS[name], PARAMS, BATCHES)
    assert_close(whole.params, expected, atol=1e-6, rtol=1e-6)
    # What is divided by its own size shows the order in which gradients were added.
    atol = 5e-6 if name == "sm3" else 1e-6
    assert_close(whole.opt_state.inner_state, inner, atol=atol, rtol=2e-5)


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compile as users do where XLA promises no bits without: at level 0, since JAX 0.11."""
    name = "jax_disable_most_optimizations"
    old = jax.config.read(name)
    jax.config.update(name, old and jax.__version_info__ < (0, 11))
    yield
    jax.config.update(name, old)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", ["clip, muon, clip", deep("sm3")])
def test_with_virtual_shards_it_follows_one_device_with_the_same_bits(name: str):
    found = []
    for place, number in (("parts", 8), ("sharded", 4), ("sharded", 1)):
        step = made(OPTIMIZERS[name], place, number, virtual_shards=8)
        state = step.unshard(train(step, step.init(PARAMS), BATCHES))
        assert ("leaf by leaf" in step.describe()) == (number > 1)
        found.append(jax.device_get(state.params))
    for each in found[1:]:
        assert_same(found[0], each)
    expected, _ = on_one_device(loss_fn, OPTIMIZERS[name], PARAMS, BATCHES)
    # Gradients of sm3 and sums of slices are added in another order.
    assert_close(found[0], expected, atol=5e-6, rtol=5e-6)


def test_large_layers_are_split_within_each_and_updated_layer_by_layer():
    params = {"layers": normal(N, 192, 192, scale=0.05)}
    turn = lambda h, w: (jnp.tanh(h @ w), None)
    loss = lambda params, x: (jax.lax.scan(turn, x, params["layers"])[0] ** 2).mean()
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(2 * N, 192)).astype(np.float32) for _ in range(2)]
    step = made(CLIP_MUON, "parts", loss=loss)
    state = train(step, step.init(params), batches)
    (cut,) = layout_of(step, state).arrays.params
    assert cut.axis == 1
    expected, _ = on_one_device(loss, CLIP_MUON, params, batches)
    assert_close(step.unshard(state).params, expected, atol=1e-6, rtol=1e-6)


def in_eight_bits() -> optax.GradientTransformation:
    def init(params: Any) -> Any:
        of = lambda x: (jnp.zeros(x.shape, jnp.int8), jnp.float32(0))
        return jax.tree.map(of, params)

    def update(g: Any, state: Any, params: Any = None) -> Any:
        is_pair = lambda x: isinstance(x, tuple)
        kept = jax.tree.map(lambda own, x: 0.9 * own[0] * own[1] + x, state, g, is_leaf=is_pair)
        # So coarse that rounding does not show.
        scales = jax.tree.map(lambda m: jnp.max(jnp.abs(m)) / 2 + 1e-12, kept)
        few = jax.tree.map(lambda m, s: (jnp.round(m / s).astype(jnp.int8), s), kept, scales)
        return jax.tree.map(lambda m: -0.1 * m, kept), few

    return optax.GradientTransformation(init, update)


def test_a_rule_of_ones_own_follows_one_device():
    rule = in_eight_bits()
    step = made(rule)
    state = train(step, step.init(PARAMS), BATCHES)
    assert "leaf by leaf" in step.describe()
    expected, _ = on_one_device(loss_fn, rule, PARAMS, BATCHES)
    assert_close(step.unshard(state).params, expected, atol=1e-6, rtol=1e-6)


def test_any_number_of_shards_is_right():
    optimizer = CLIP_MUON
    step = made(optimizer, number=3)
    batches = [x[:15] for x in BATCHES]
    state = train(step, step.init(PARAMS), batches)
    expected, _ = on_one_device(loss_fn, optimizer, PARAMS, batches)
    assert_close(step.unshard(state).params, expected)


def test_layers_that_fill_the_rows_of_their_owners_travel_whole():
    """Two layers on seven shards and one on the last, with a decay that reads them."""
    params = {"many": normal(2 * N - 1, 32, 32)}
    loss = lambda params, x: (jax.numpy.tanh(x @ params["many"]).sum(0) ** 2).mean()
    rule = muon(weight_decay=0.1)
    step = made(rule, loss=loss)
    state = train(step, step.init(params), BATCHES)
    assert [len(each.places) for each in layout_of(step, state).arrays.blocks] == [1]
    expected, _ = on_one_device(loss, rule, params, BATCHES)
    assert_close(step.unshard(state).params, expected, atol=1e-6, rtol=1e-6)


def test_every_leaf_is_updated_once():
    step = made(muon())
    dealt = layout_of(step, step.init(PARAMS)).arrays
    names, stacked = sorted(PARAMS), dealt.leafwise.stacked
    assert {names[i] for i in stacked} == {"layers", "more"}
    # Layers that shards do not divide have an owner each.
    units = [(names[i], row) for i, row in dealt.owners]
    whole = [("in", None), ("large", None), ("out", None)]
    assert sorted(units, key=str) == sorted([*whole, *(("more", i) for i in range(6))], key=str)
    owned = [unit for own in dealt.of_shard for unit in own]
    assert collections.Counter(owned) == collections.Counter(list(dealt.owners))
    assert all(unit in dealt.of_shard[owner] for unit, owner in dealt.owners.items())
    assert set(dealt.owners.values()) == set(range(N))


def test_what_stands_beside_it_is_that_of_one_device():
    options: dict[str, Any] = {
        "ema": 0.5,
        "master_dtype": "float32",
        "accumulate_steps": 2,
        "nonfinite": "skip",
        "metrics": ("grad_norm", "param_norm"),
        "check_divergence": 1,
    }
    step = made(CLIP_MUON, "parts", loss_scale=crossshard.DynamicLossScale(8.0), **options)
    state, average = step.init(PARAMS), PARAMS
    mixed = jax.jit(lambda old, new: jax.tree.map(lambda a, b: 0.5 * (a + b), old, new))
    gradient_norm = jax.jit(lambda params, x: optax.tree.norm(jax.grad(loss_fn)(params, x)))
    norm_of = jax.jit(optax.tree.norm)
    for count, x in enumerate(BATCHES):
        before, _ = on_one_device(loss_fn, CLIP_MUON, PARAMS, BATCHES[:count])
        after, _ = on_one_device(loss_fn, CLIP_MUON, PARAMS, BATCHES[: count + 1])
        average = mixed(average, after)
        state, metrics = step(state, x)
        assert not metrics["divergence"].diverged
        norms = gradient_norm(before, x), norm_of(after)
        found = metrics["grad_norm"], metrics["param_norm"]
        np.testing.assert_allclose(found, norms, rtol=1e-5)
    assert_close(step.unshard(state).params, after)
    assert_close(step.model(state, ema=True), average)
    metric = lambda params, x: x.sum(1) * params["in"].sum() + params["more"].sum()
    want = np.mean([metric(jax.device_get(average), x).mean() for x in BATCHES])
    np.testing.assert_allclose(step.evaluate(state, BATCHES, metric, ema=True), want, rtol=1e-5)
    assert step.replay(state, BATCHES[2]) == {}
    # A step that is skipped changes no bit.
    kept = lambda state: jax.tree.map(np.array, (state.params, state.opt_state.inner_state))
    held = kept(state)
    state, metrics = step(state, np.full_like(BATCHES[0], np.nan))
    assert metrics["skipped"]
    assert_same(kept(state), held)


def test_describe_names_each_leaf_with_its_owner_and_the_line_that_decides():
    step = made(muon())
    step.abstract_init(PARAMS)
    lines = [line for line in step.describe().splitlines() if line.startswith("  updated")]
    assert [line for line in lines if "`odd`" in line] == [
        "  updated element by element, a slice on each shard: `odd`"
    ]
    assert "  updated layer by layer, each on one shard: `layers`, `more`" in lines
    assert "  updated on every shard: `bias`" in lines
    (whole,) = [line for line in lines if "`large` (shard " in line]
    assert "(scale_by_muon, optax/contrib/_muon.py:" in whole
    assert len(lines) == 4


def test_what_needs_all_leaves_at_once_says_both_reasons():
    from tests.optimizers.table import across_leaves

    step = made(across_leaves(0.1))
    step.abstract_init(PARAMS)
    text = step.describe()
    assert "on sharded global arrays: the update is not elementwise: " in text
    assert "; nor leaf by leaf: a leaf is computed from the arrays of another one" in text


@pytest.mark.deep
def test_it_sends_what_has_to_be_sent_in_two_large_collectives():
    params = {f"w{i:02}": np.zeros((96, 96), np.float32) for i in range(2 * N)}
    loss = lambda params, x: sum(jnp.mean((x @ p) ** 2) for p in params.values())
    step = made(CLIP_MUON, loss=loss)
    lowered = step.lower(step.abstract_init(params), np.ones((N, 96), np.float32))
    report = crossshard.inspect(lowered)
    assert report.ratio <= 1.001
    large = [each.kind for each in report.collectives if each.bytes_sent > 20_000]
    assert sorted(large) == ["all-gather", "reduce-scatter"]
