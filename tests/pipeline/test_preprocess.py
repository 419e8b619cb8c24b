"""preprocess: applied to each shard's own gradient before it is reduced, in all three ways in."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from tests.quick import deep, deep_but

N, STEPS, CLIP = 8, 5, 0.5
GROUPS = [[0, 2, 4, 6], [1, 3, 5, 7]]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, N, 4, 40)).astype(np.float32) * RNG.uniform(0.1, 3, size=(1, N, 1, 1))
X = X.astype(np.float32)
Y = RNG.normal(size=(STEPS, N, 4, 32)).astype(np.float32)
INIT = {
    "kernel": RNG.normal(size=(40, 32)).astype(np.float32) * 0.1,
    "bias": np.zeros(32, np.float32),
}
LEARNING_RATE = 0.1


def loss_of(params, batch):
    x, y = batch
    return ((x @ params["kernel"] + params["bias"] - y) ** 2).mean()


def gradient(params, x, y):
    """The gradient of ``loss_of``, in numpy."""
    error = 2 * (x @ params["kernel"] + params["bias"] - y) / y.size
    return {"kernel": x.T @ error, "bias": error.sum(0)}


def clipped(gradients):
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    return {name: g * min(1.0, CLIP / norm) for name, g in gradients.items()}


class Clip:
    """optax.clip_by_global_norm, in numpy."""

    transformation = staticmethod(lambda: optax.clip_by_global_norm(CLIP))

    def __call__(self, shard, gradients):
        return clipped(gradients)


class Momentum:
    """optax.trace, in numpy; each shard has its own."""

    transformation = staticmethod(lambda: optax.trace(0.9))

    def __init__(self):
        self.trace = {}

    def __call__(self, shard, gradients):
        before = self.trace.get(shard, dict.fromkeys(gradients, 0.0))
        self.trace[shard] = {name: g + 0.9 * before[name] for name, g in gradients.items()}
        return self.trace[shard]


class ClippedMomentum:
    """A chain with a state of its own: neither is linear, so that the order shows."""

    transformation = staticmethod(
        lambda: optax.chain(optax.trace(0.9), optax.clip_by_global_norm(CLIP))
    )

    def __init__(self):
        self.momentum = Momentum()

    def __call__(self, shard, gradients):
        return clipped(self.momentum(shard, gradients))


class Sgd:
    make = staticmethod(lambda: optax.sgd(LEARNING_RATE))

    def __call__(self, params, gradients):
        return {name: params[name] - LEARNING_RATE * g for name, g in gradients.items()}


class Adam:
    # An eps that does not magnify rounding where a gradient is nearly zero.
    make = staticmethod(lambda: optax.adam(0.01, eps=1e-3))

    def __init__(self):
        self.count, self.mu, self.nu = 0, None, None

    def __call__(self, params, gradients):
        self.count += 1
        zero = dict.fromkeys(gradients, 0.0)
        self.mu = {k: 0.9 * (self.mu or zero)[k] + 0.1 * g for k, g in gradients.items()}
        self.nu = {k: 0.999 * (self.nu or zero)[k] + 0.001 * g**2 for k, g in gradients.items()}
        return {
            k: params[k]
            - 0.01
            * (self.mu[k] / (1 - 0.9**self.count))
            / (np.sqrt(self.nu[k] / (1 - 0.999**self.count)) + 1e-3)
            for k in gradients
        }


@functools.cache
def expected(preprocess, optimizer, reduction, grouped):
    """Per shard the parameters after the last step, in numpy float64."""
    groups = GROUPS if grouped else [list(range(N))]
    own = preprocess()
    after = [None] * N
    for members in groups:
        params = {name: value.astype(np.float64) for name, value in INIT.items()}
        step = optimizer()
        for t in range(STEPS):
            each = [own(s, gradient(params, *map(np.float64, (X[t, s], Y[t, s])))) for s in members]
            divisor = len(members) if reduction == "mean" else 1
            total = {name: sum(g[name] for g in each) / divisor for name in INIT}
            params = step(params, total)
        for shard in members:
            after[shard] = params
    return {name: np.stack([each[name] for each in after]) for name in INIT}


def optimizer_for(preprocess, optimizer, reduction, grouped, **how):
    return CrossShardOptimizer(
        optimizer.make(),
        reduction,
        group_assignment=GROUPS if grouped else None,
        preprocess=preprocess.transformation(),
        **how,
    )


def by_shard_map(opt, check_vma):
    """The Optax idiom, with the state made and carried inside and outside of shard_map."""
    mesh = jax.make_mesh((N,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = opt.state_specs(INIT, N)
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    # Under groups parameters and state differ between shards.
    grouped = opt.group_assignment is not None
    one = lambda tree: jax.tree.map(lambda x: x[0], tree) if grouped else tree
    each = lambda tree: jax.tree.map(lambda x: x[None], tree) if grouped else tree
    carried = (P("shards"), P("shards")) if grouped else (P(), specs)

    @jax.jit
    @functools.partial(over, in_specs=P(), out_specs=carried)
    def init(params):
        return each((params, opt.init(params)))

    @jax.jit
    @functools.partial(over, in_specs=(carried, P("shards")), out_specs=carried)
    def step(carry, batch):
        params, state = one(carry)
        gradients = crossshard.grad(loss_of)(params, jax.tree.map(lambda x: x[0], batch))
        updates, state = opt.update(gradients, state, params)
        return each((optax.apply_updates(params, updates), state))

    carry = init(INIT)
    for batch in zip(X, Y, strict=True):
        carry = step(carry, batch)
    spread = lambda x: x if grouped else jnp.broadcast_to(x, (N, *x.shape))
    return jax.tree.map(spread, carry[0])


def by_vmap(opt):
    def run(x, y):
        params = jax.tree.map(jnp.asarray, INIT)
        state = opt.init(params)
        for batch in zip(x, y, strict=True):
            updates, state = opt.update(jax.grad(loss_of)(params, batch), state, params)
            params = optax.apply_updates(params, updates)
        return params

    return jax.vmap(run, in_axes=1, axis_name="shards")(X, Y)


def by_train_step(opt, weight_update):
    step = make_train_step(loss_of, opt, num_shards=N, weight_update=weight_update)
    state = step.init(INIT)
    for x, y in zip(X, Y, strict=True):
        state, _ = step(state, (x.reshape(-1, 40), y.reshape(-1, 32)))
    params = state.params
    if opt.group_assignment is None:
        params = jax.tree.map(lambda x: jnp.broadcast_to(x, (N, *x.shape)), params)
    return params


def by_variables(opt):
    model = nnx.Linear(40, 32, rngs=nnx.Rngs(0))
    model.kernel[...], model.bias[...] = map(jnp.asarray, (INIT["kernel"], INIT["bias"]))

    @crossshard.shard(num_shards=N)
    def step(model, opt, x, y):
        loss = lambda: ((model(x) - y) ** 2).mean()
        opt.apply_gradients(opt.compute_gradients(loss, var_list=model))

    for x, y in zip(X, Y, strict=True):
        step(model, opt, x.reshape(-1, 40), y.reshape(-1, 32))
    each = lambda v: v[...].array if crossshard.nnx.is_per_shard(v) else np.stack([v[...]] * N)
    return {"kernel": each(model.kernel), "bias": each(model.bias)}


WAYS = {
    "shard_map, with types": lambda opt: by_shard_map(opt, True),
    "shard_map, without types": lambda opt: by_shard_map(opt, False),
    "vmap": by_vmap,
    "train step, replicated": lambda opt: by_train_step(opt, "replicated"),
    "train step, in parts": lambda opt: by_train_step(opt, "sharded"),
    "variables": by_variables,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("preprocess", "optimizer"),
    deep_but(
        [(Clip, Sgd), (ClippedMomentum, Adam)],
        itertools.product([Clip, Momentum, ClippedMomentum], [Sgd, Adam]),
    ),
)
def test_it_follows_numpy(way, preprocess, optimizer):
    got = WAYS[way](optimizer_for(preprocess, optimizer, "mean", False))
    want = expected(preprocess, optimizer, "mean", False)
    for name in INIT:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=5e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("reduction", "grouped"), [("sum", False), ("mean", True), deep(("sum", True))]
)
def test_it_composes_with_sums_and_groups(way, reduction, grouped):
    got = WAYS[way](optimizer_for(ClippedMomentum, Sgd, reduction, grouped))
    want = expected(ClippedMomentum, Sgd, reduction, grouped)
    for name in INIT:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=5e-6)


def test_a_sharded_weight_update_in_ones_own_shard_map():
    opt = optimizer_for(ClippedMomentum, Adam, "mean", False, weight_update="sharded")
    assert opt.state_specs(INIT, N).inner_state[0].mu["kernel"] == P("shards")
    got = by_shard_map(opt, False)
    want = expected(ClippedMomentum, Adam, "mean", False)
    for name in INIT:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=5e-6)


def test_on_global_arrays():
    inner = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(LEARNING_RATE))
    ways = {}
    for weight_update in ("replicated", "sharded"):
        opt = CrossShardOptimizer(inner, preprocess=optax.trace(0.9))
        ways[weight_update] = by_train_step(opt, weight_update)
    for name in INIT:
        np.testing.assert_allclose(
            ways["sharded"][name], ways["replicated"][name], rtol=0, atol=1e-6
        )


def test_clipping_before_the_mean_is_not_clipping_after_it():
    after = optax.chain(optax.clip_by_global_norm(CLIP), optax.sgd(LEARNING_RATE))
    one = by_train_step(CrossShardOptimizer(after), "replicated")
    other = expected(Clip, Sgd, "mean", False)
    assert np.abs(np.asarray(one["kernel"]) - other["kernel"]).max() > 1e-3


def test_its_state_is_one_per_shard():
    step = make_train_step(loss_of, optimizer_for(Momentum, Sgd, "mean", False), num_shards=N)
    state = step.init(INIT)
    state, _ = step(state, (X[0].reshape(-1, 40), Y[0].reshape(-1, 32)))
    trace = state.opt_state.preprocess.trace["bias"]
    assert trace.shape == (N, 32)
    assert trace.sharding.spec == P(("shards",))
    want = [gradient(INIT, X[0, s], Y[0, s])["bias"] for s in range(N)]
    np.testing.assert_allclose(trace, want, atol=1e-6)


def test_its_state_goes_to_another_number_of_shards():
    batch = X[0].reshape(-1, 40), Y[0].reshape(-1, 32)
    opt = optimizer_for(Momentum, Sgd, "mean", False)
    eight = make_train_step(loss_of, opt, num_shards=8)
    state, _ = eight(eight.init(INIT), batch)
    saved = eight.unshard(state)
    two = make_train_step(loss_of, opt, num_shards=2)
    there = two.reshard(saved)
    assert there.opt_state.preprocess.trace["bias"].shape == (2, 32)
    # A mean of momenta of equal parts is the momentum of the whole, so that the mean goes on.
    np.testing.assert_allclose(
        np.asarray(there.opt_state.preprocess.trace["bias"]).mean(0),
        np.asarray(saved.opt_state.preprocess.trace["bias"]).mean(0),
        atol=1e-6,
    )
    one, other = eight.reshard(saved), there
    one, _ = eight(one, batch)
    other, _ = two(other, batch)
    np.testing.assert_allclose(one.params["kernel"], other.params["kernel"], atol=1e-6)


def test_a_preprocessor_that_draws_draws_its_own_on_every_shard():
    noise = optax.add_noise(1.0, 0.0, jax.random.key(0))
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=noise)
    constant = {"w": np.zeros(2000, np.float32)}
    spread = {}
    for n in (1, 8):
        step = make_train_step(lambda p, x: 0.0 * (p["w"].sum() + x.sum()), opt, num_shards=n)
        state, _ = step(step.init(constant), np.zeros(8, np.float32))
        spread[n] = float(np.std(state.params["w"]))
    # A mean of eight draws has an eighth of the variance of one.
    assert spread[1] == pytest.approx(1.0, rel=0.1)
    assert spread[8] == pytest.approx(8**-0.5, rel=0.1)


def test_summed_gradients_are_refused():
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.clip_by_global_norm(1.0))
    with pytest.raises(crossshard.errors.IncomingError, match="each shard's local gradient"):
        jax.vmap(lambda g: opt.update(g, opt.init(g), incoming="summed")[0], axis_name="shards")(
            jnp.ones(4)
        )


def test_an_unknown_number_of_shards_is_refused_where_the_state_needs_it():
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.trace(0.9))
    with pytest.raises(crossshard.errors.ShardContextError, match="shard_context"):
        opt.init(jnp.ones(3))
    with crossshard.shard_context(4):
        assert opt.init(jnp.ones(3)).preprocess.trace.shape == (4, 3)


def test_a_state_of_all_shards_is_refused_where_one_is_wanted():
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.trace(0.9))
    with crossshard.shard_context(4):
        state = opt.init(jnp.ones(3))
    with pytest.raises(crossshard.errors.ArgumentError, match="state_specs"):
        jax.vmap(lambda g: opt.update(g, state)[0], axis_name="shards")(jnp.ones((4, 3)))


@pytest.mark.parametrize("bad", [3, "clip", optax.sgd, object()])
def test_what_is_not_a_transformation_is_refused(bad):
    with pytest.raises(crossshard.errors.ArgumentTypeError, match="preprocess"):
        CrossShardOptimizer(optax.sgd(1.0), preprocess=bad)


def test_a_preprocessor_that_reduces_is_refused():
    with pytest.raises(crossshard.errors.NestedReductionError):
        CrossShardOptimizer(optax.sgd(1.0), preprocess=CrossShardOptimizer(optax.identity()))
    hidden = optax.chain(CrossShardOptimizer(optax.identity()))
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=hidden)
    with pytest.raises(crossshard.errors.NestedReductionError):
        jax.vmap(lambda g: opt.update(g, opt.init(g))[0], axis_name="shards")(jnp.ones(4))


def test_describe_names_it():
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.clip_by_global_norm(1.0))
    assert opt.describe() == (
        "local gradient → preprocess (clip_by_global_norm) → mean over all shards → update"
    )


def test_a_shard_without_weight_leaves_no_trace_in_its_state():
    opt = CrossShardOptimizer(optax.sgd(0.1), preprocess=optax.trace(0.9))
    loss = lambda w, batch: (w * batch["x"]).mean()
    step = make_train_step(loss, opt, num_shards=2, weight=lambda b: b["mask"].sum())
    state = step.init(np.float32(1.0))
    padded = {"x": np.float32([1, 3, np.nan, np.nan]), "mask": np.float32([1, 1, 0, 0])}
    state, _ = step(state, padded)
    np.testing.assert_allclose(state.opt_state.preprocess.trace, [2.0, 0.0])
    whole = {"x": np.float32([1, 3, 5, 7]), "mask": np.ones(4, np.float32)}
    state, _ = step(state, whole)
    # Momenta 0.9 · 2 + 2 and 6; their mean by weight is 4.9, after a step of 2 by the first alone.
    np.testing.assert_allclose(state.params, 1 - 0.1 * 2 - 0.1 * 4.9, rtol=1e-6)
