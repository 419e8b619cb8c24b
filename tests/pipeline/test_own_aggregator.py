"""Aggregators of one's own, from outside: top-k, in each way in, and what is refused."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, Nonfinite, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, IncomingError, NonfiniteError
from crossshard.pipeline import Aggregator
from examples.top_k import TopK
from tests.pipeline.ways import trained
from tests.quick import deep
from tests.reference.pipeline_model import to_bfloat16
from tests.step.common import sgd_step, train

N, STEPS, PART = 4, 4, 0.05
RNG = np.random.default_rng(0)
PARAMS = {"w": np.zeros((40, 32), np.float32), "b": np.zeros(32, np.float32)}
G = {
    name: RNG.normal(size=(STEPS, N, 1, *x.shape)).astype(np.float32) for name, x in PARAMS.items()
}
GROUPS = [[0, 2], [1, 3]]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return sum((params[name] * batch[name].mean(0)).sum() for name in params)


def batch_of(t: int) -> dict[str, np.ndarray]:
    return {name: g[t, :, 0] for name, g in G.items()}


class BySlices(Aggregator):
    """Each of the peers adds a slice, of what the others send it in 16 bits."""

    def sum(self, values: Any, state: Any, peers: Any) -> Any:
        def one(x: jax.Array) -> jax.Array:
            flat = jnp.pad(x.ravel(), (0, -x.size % peers.number))
            sent = flat.reshape(peers.number, -1).astype(jnp.bfloat16)
            part = peers.exchange(sent).astype(jnp.float32).sum(0)
            return peers.gather(part).ravel()[: x.size].reshape(x.shape)

        return jax.tree.map(one, values), state


def expected(own: Aggregator, members: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of some shards after plain SGD, and what each still holds: in numpy."""
    params = {name: np.zeros(x.shape) for name, x in PARAMS.items()}
    held = {name: np.zeros((N, *x.shape)) for name, x in PARAMS.items()}
    for t in range(STEPS):
        for name, total in params.items():
            for shard in members:
                x = (held[name][shard] + np.float64(G[name][t, shard, 0]) / len(members)).ravel()
                sent = to_bfloat16(x)
                if isinstance(own, TopK):
                    few = int(np.ceil(PART * x.size))
                    sent[np.argsort(-np.abs(x), kind="stable")[few:]] = 0
                    held[name][shard] = (x - sent).reshape(total.shape)
                total -= sent.reshape(total.shape)
    return params, held


OWN = {"top-k": TopK(PART), "by slices": BySlices()}
# Each idiom, each aggregator, with groups and without.
QUICK = [
    *(("update, types", "top-k", True), ("step, sharded", "by slices", True)),
    *(("variables, minimize", "by slices", True), ("step, sharded", "top-k", False)),
]


@pytest.mark.parametrize(
    ("way", "name", "grouped"),
    [
        *QUICK,
        deep(("step, replicated", "top-k", True)),
    ],
)
def test_it_follows_numpy_in_each_way_in(way: str, name: str, grouped: bool):
    own = OWN[name]
    opt = CrossShardOptimizer(
        optax.sgd(1.0), aggregator=own, group_assignment=GROUPS if grouped else None
    )
    batches = [{name: g[t] for name, g in G.items()} for t in range(STEPS)]
    *_, (params, _) = trained(way, opt, loss_fn, PARAMS, batches, number=N)
    for members in GROUPS if grouped else [[*range(N)]]:
        want, _ = expected(own, members)
        for leaf, shard in itertools.product(want, members):
            np.testing.assert_allclose(params[leaf][shard], want[leaf], rtol=0, atol=1e-6)


def test_what_is_kept_is_each_shards_own_and_goes_to_other_shards():
    step, other = (sgd_step(loss_fn, 1.0, number, aggregator=TopK(PART)) for number in (N, 2))
    state = train(step, step.init(PARAMS), map(batch_of, range(STEPS)))
    _, held = expected(TopK(PART), [*range(N)])
    moved = other.reshard(step.unshard(state)).opt_state.aggregate
    for name, x in state.opt_state.aggregate.items():
        np.testing.assert_allclose(x, held[name], rtol=0, atol=1e-6)
        assert moved[name].shape[0] == 2
        total = np.float64(moved[name]).sum(0)
        np.testing.assert_allclose(total, held[name].sum(0), rtol=0, atol=1e-6)


def test_what_is_sent_and_what_is_kept_are_the_mean_whatever_a_batch_weighs():
    def weighted(params: Any, batch: Any) -> jax.Array:
        one = lambda name: (params[name] * jnp.tensordot(batch["k"], batch[name], 1)).sum()
        return sum(one(name) for name in params) / batch["k"].sum()

    weights = np.float32([[1, 2, 3, 4], [0, 0, 50, 0], [3, 0, 0, 1], [1, 1, 1, 1]])
    step = sgd_step(weighted, 1.0, N, weight="k", aggregator=TopK(PART))
    state = train(step, step.init(PARAMS), [batch_of(t) | {"k": k} for t, k in enumerate(weights)])
    for name, x in step.model(state).items():
        means = [
            np.average(np.float64(g[:, 0]), 0, k) for g, k in zip(G[name], weights, strict=True)
        ]
        kept = np.float64(state.opt_state.aggregate[name]).sum(0)
        np.testing.assert_allclose(kept - x, sum(means), rtol=0, atol=1e-5)


def test_the_bytes_are_its_own():
    params = {"w": np.zeros((256, 512), np.float32)}
    loss = lambda p, x: (jnp.tanh(x @ p["w"]) ** 2).mean()
    step = make_train_step(
        loss, optax.adam(1e-3), num_shards=8, aggregator=TopK(0.01), weight_update="sharded"
    )
    report = crossshard.inspect(step.lower(step.init(params), np.zeros((8, 256), np.float32)))
    # Of all eight, a hundredth of the elements, 6 bytes each; and parameters that are gathered.
    few = 7 * 0.01 * params["w"].size * 6
    gathered = 7 / 8 * params["w"].nbytes
    assert report.bytes_sent == pytest.approx(few + gathered, rel=0.02)


class Twice(Aggregator):
    """Not what a mean is."""

    def sum(self, values: Any, state: Any, peers: Any) -> Any:
        return jax.tree.map(lambda x: 2 * peers.sum(x), values), state


def test_verify_sees_what_an_aggregator_does():
    found = crossshard.verify(sgd_step(loss_fn, 1.0, N, aggregator=Twice()), PARAMS, batch_of(0))
    assert not found.ok
    assert "2.000" in str(found)


LEAVE = r"Leave one of them out|Pass it to one of them"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"aggregator": Twice}, ArgumentTypeError, r"Aggregator, whose sum.*got .*Twice"),
    ({}, {"aggregator": lambda x: x}, ArgumentTypeError, r"whose sum\(values, state, peers\)"),
    ({}, {"aggregator": optax.sgd(1.0)}, ArgumentTypeError, "Aggregator"),
    ({"reduce_dtype": "int8", "aggregator": Twice()}, {}, ArgumentError, LEAVE),
    ({"reduce_dtype": "int8"}, {"aggregator": Twice()}, ArgumentError, LEAVE),
    ({"aggregator": Twice()}, {"reduce_dtype": "bfloat16"}, ArgumentError, LEAVE),
    ({"reduce_dtype": "int8"}, {"reduce_dtype": "int8"}, ArgumentError, LEAVE),
]


@pytest.mark.parametrize(("of_optimizer", "of_step", "kind", "words"), REFUSED)
def test_what_is_refused(of_optimizer: Any, of_step: Any, kind: Any, words: str):
    make = lambda: CrossShardOptimizer(optax.sgd(1.0), **of_optimizer)
    with pytest.raises(kind, match=words):
        make_train_step(loss_fn, make(), num_shards=N, **of_step)


def test_gradients_that_are_summed_already_are_refused():
    opt = CrossShardOptimizer(optax.sgd(1.0), aggregator=Twice(), incoming="summed")
    step = lambda g: opt.update(g, opt.init(g))[0]
    with pytest.raises(IncomingError, match="aggregator sums each shard's local gradient"):
        jax.vmap(step, axis_name="shards")(jnp.ones(N))


class Signs(Aggregator):
    """A sum that hides what is not finite: the sign of NaN is 0 among integers."""

    def sum(self, values: Any, state: Any, peers: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda x: peers.sum(jnp.sign(x).astype(jnp.int32)) * 1.0, values), state


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"nonfinite": "skip"}, 1.0),
        ({"nonfinite": "quarantine"}, 0.3),
        ({"loss_scale": "dynamic"}, 1.0),
    ],
    ids=str,
)
def test_what_it_hides_is_found(options: dict[str, Any], expected: float):
    # The gradient of the square root is infinite at 0, and the loss is not.
    loss = lambda w, x: jnp.sqrt(jnp.abs(w * x)).mean()
    step = crossshard.make_train_step(
        loss, optax.sgd(0.1), num_shards=8, aggregator=Signs(), **options
    )
    state, metrics = step(step.init(jnp.float32(1)), np.float32([1, 1, 1, 0, 1, 1, 1, 1]))
    assert bool(metrics["skipped"]) == (expected == 1)
    np.testing.assert_allclose(state.params, expected, atol=0.02)
    if "nonfinite" in options:
        assert (int(metrics["nonfinite"].shard), int(metrics["nonfinite"].shards)) == (3, 1)


def test_a_state_that_is_not_finite_is_named_and_not_praised():
    options: Any = {"metrics": "grad_norm", "aggregator": TopK(PART)}
    batch = batch_of(0)
    step = sgd_step(loss_fn, 1.0, N, nonfinite=Nonfinite("skip", max_consecutive=2), **options)
    state = step.init(PARAMS)
    held = state.opt_state.aggregate
    bad = jax.device_put(held["w"].at[1, 3].set(np.nan), held["w"].sharding)
    opt_state = state.opt_state._replace(aggregate={**held, "w": bad})
    state = train(step, dataclasses.replace(state, opt_state=opt_state), [batch] * 2)
    with pytest.raises(NonfiniteError, match=r"`opt_state/aggregate/w` of the state is NaN, what"):
        step.finish(state)
    # A batch that is not finite leaves nothing in the state but its metrics.
    step = sgd_step(loss_fn, 1.0, N, nonfinite="raise", **options)
    state, _ = step(step.init(PARAMS), {**batch, "w": np.full_like(batch["w"], np.nan)})
    assert np.isnan(state.opt_state.metrics["grad_norm"])
    with pytest.raises(NonfiniteError, match="Parameters and state hold nothing of it"):
        step.finish(state)
