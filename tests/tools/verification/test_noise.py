"""Wrong steps that count or draw random numbers: what is wrong is named, whatever the noise."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import crossshard
from tests.tools.steps import SPLIT, WHOLE, first_params, mean, mesh_of, over, updated
from tests.tools.verification.right import X, Y, dropped, mse


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A wrong step, as a factory, and what ``verify`` must say."""

    kinds: str | tuple[str, ...]
    make_step: Callable[..., Any]
    words: str = ""
    leaves: int = 2
    key: Any = None
    factor: str = ""


several = lambda n: n > 1


def counting(how: Any, loss: Any, per_shard: bool = False, advance: Any = None) -> Any:
    """A counter in the state; ``how`` makes an update of gradients of ``loss(p, count, x, y)``."""
    advance = advance or (lambda count: count + 1)

    def make_step(optimizer: Any, n: int) -> Any:
        def step(params: Any, state: Any, count: Any, x: Any, y: Any) -> Any:
            own = count[0] if per_shard else count
            value, gradients = jax.value_and_grad(loss)(params, own, x, y)
            gradients = how(gradients, n)
            return *updated(optimizer, params, state, gradients), advance(count), mean(value)

        lie = SPLIT if per_shard else WHOLE
        specs = (WHOLE, WHOLE, lie, SPLIT, SPLIT)
        run = over(step, specs, (WHOLE, WHOLE, lie, WHOLE), mesh_of(s=n))
        params = first_params()
        count = jnp.arange(n, dtype=jnp.int32) if per_shard else jnp.int32(0)
        return run, params, optimizer.init(params), count

    return make_step


scaled = lambda p, count, x, y: mse(p, x, y) / (1.0 + count)
right = lambda g, n: mean(g)


def from_count(count: Any, *, by_shard: bool) -> Any:
    key = jax.random.fold_in(jax.random.key(3), count)
    return jax.random.fold_in(key, lax.axis_index("s")) if by_shard else key


noisy = lambda p, count, x, y: dropped(p, x, y, from_count(count, by_shard=True))
equal = lambda p, count, x, y: dropped(p, x, y, from_count(count, by_shard=False))


def masked(params: Any, count: Any, x: Any, y: Any) -> Any:
    mask = (x[:, 3] > -0.5).astype(jnp.float32)
    each = (jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2
    return (each * mask).sum() / mask.sum() / (1.0 + count)


def of_weights(weights: Any) -> Any:
    """A sum of the shards' gradients, with these weights if there are several."""

    def how(g: Any, n: int) -> Any:
        weight = jnp.asarray(weights)[lax.axis_index("s")] if several(n) else 1.0
        return jax.tree.map(lambda x: lax.psum(weight * x, "s") / n, g)

    return how


def of_shard_5(g: Any, n: int) -> Any:
    own = of_weights([0, 0, 0, 0, 0, 8.0, 0, 0])
    return {"a": own(g["a"], n), "b": mean(g["b"])}


def clipped(g: Any, n: int) -> Any:
    return mean(jax.tree.map(lambda x: jnp.clip(x, -0.05, 0.05), g))


def stacked_keys(optimizer: Any, n: int) -> Any:
    """In pmap, each shard with the same legacy key."""

    def one(params: Any, state: Any, key: Any, x: Any, y: Any) -> Any:
        key, now = jax.random.split(key)
        gradients = mean(jax.grad(dropped)(params, x, y, now))
        return *updated(optimizer, params, state, gradients), key

    run = jax.pmap(one, "s", devices=jax.devices()[:n])
    step = lambda *args: run(*args[:3], args[3].reshape(n, -1, 4), args[4].reshape(n, -1))
    params = first_params()
    state = params, optimizer.init(params), jax.random.PRNGKey(0)
    return step, *jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), state)


def as_argument(how: Any) -> Any:
    """A legacy key is an argument, and is folded with the shard."""

    def make_step(optimizer: Any, n: int) -> Any:
        def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
            gradients = how(jax.grad(dropped)(params, x, y, key), n)
            return updated(optimizer, params, state, gradients)

        run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT, WHOLE), WHOLE, mesh_of(s=n))
        params = first_params()
        return run, params, optimizer.init(params)

    return make_step


def with_statistics(of_statistics: Any, of_metric: Any) -> Any:
    """Noise before a moving mean of what a layer sees."""

    def make_step(optimizer: Any, n: int) -> Any:
        def step(params: Any, state: Any, rest: Any, x: Any, y: Any) -> Any:
            stats, count = rest
            key = from_count(count, by_shard=True)
            h = jnp.tanh((x + 0.3 * jax.random.normal(key, x.shape)) @ params["a"])
            value, gradients = jax.value_and_grad(dropped)(params, x, y, key)
            stats = 0.9 * stats + 0.1 * of_statistics(h.mean(0), n)
            params, state = updated(optimizer, params, state, mean(gradients))
            return params, state, (stats, count + 1), of_metric(value, n)

        run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
        params = first_params()
        return run, params, optimizer.init(params), (jnp.zeros(6), jnp.int32(0))

    return make_step


def accumulated(how: Any) -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        rule = optax.MultiSteps(optimizer, every_k_schedule=2)

        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            return updated(rule, params, state, how(jax.grad(mse)(params, x, y)))

        run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
        params = first_params()
        return run, params, rule.init(params)

    return make_step


def own_advantages(epochs: int) -> Any:
    """Normalised over each shard's rows; so many updates in a step."""

    def make_step(optimizer: Any, n: int) -> Any:
        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            advantage = (y - y.mean()) / (y.std() + 1e-6)
            score = lambda p: jnp.tanh(x @ p["a"]) @ p["b"]
            loss = lambda p: -jnp.mean(jax.nn.log_sigmoid(score(p)) * advantage)
            for _ in range(epochs):
                params, state = updated(optimizer, params, state, mean(jax.grad(loss)(params)))
            return params, state

        run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
        params = first_params()
        return run, params, optimizer.init(params)

    return make_step


first = of_weights([8.0, 0, 0, 0, 0, 0, 0, 0])
without_6 = of_weights([1.0, 1, 1, 1, 1, 1, 0, 1])
scale = lambda factor: lambda g, n: jax.tree.map(lambda x: x * (factor if several(n) else 1), g)
average = lambda x, n: mean(x)

WRONG = {
    "a counter that differs between shards": Wrong(
        "update", counting(right, scaled, per_shard=True), "in another direction"
    ),
    "a schedule that advances N times": Wrong(
        "update",
        counting(right, scaled, advance=lambda count: count + lax.psum(1, "s")),
        "times the update",
    ),
    "keys from the count, equal on all shards": Wrong("keys", counting(right, equal), leaves=0),
    "a legacy key in per-shard state, equal on all": Wrong("keys", stacked_keys, leaves=0),
    "a legacy key as argument, equal on all shards": Wrong(
        "keys", as_argument(right), leaves=0, key=jax.random.PRNGKey(1)
    ),
    "noise, and summed": Wrong(
        "update", counting(lambda g, n: lax.psum(g, "s"), noisy), "= N", factor="N"
    ),
    "noise, and averaged twice": Wrong(
        "update", counting(lambda g, n: mean(scale(1 / n)(g, n)), noisy), "= 1/N", factor="1/N"
    ),
    "noise, and not reduced": Wrong("copies", None),
    "noise, and rows dropped": Wrong(
        "update", counting(without_6, noisy), "times the update", leaves=1
    ),
    "noise, and shard 0's own": Wrong("update", counting(first, noisy), "in another direction"),
    "noise, and one leaf is shard 5's own": Wrong(
        "update", counting(of_shard_5, noisy), "in another direction", leaves=1
    ),
    "noise, and divided by 5": Wrong(
        "update", counting(lambda g, n: mean(scale(0.2)(g, n)), noisy), "times the update"
    ),
    "noise, and the other way": Wrong(
        "update", counting(lambda g, n: mean(scale(-1.0)(g, n)), noisy)
    ),
    "noise, and one leaf not updated": Wrong(
        "update",
        counting(lambda g, n: mean({"a": scale(0.0)(g["a"], n), "b": g["b"]}), noisy),
        leaves=1,
        factor="0",
    ),
    "noise, and statistics of shard 0": Wrong(
        "statistics", with_statistics(first, average), leaves=1
    ),
    "noise, and the loss of shard 0": Wrong("metric", with_statistics(average, first), leaves=1),
    "noise, and the loss summed": Wrong(
        "metric", with_statistics(average, lambda x, n: lax.psum(x, "s")), leaves=1, factor="N"
    ),
    "a schedule, and uneven weights": Wrong("update", counting(right, masked)),
    "a schedule, and clipped by value": Wrong("update", counting(clipped, scaled)),
    "a schedule, and rows dropped": Wrong(
        "update", counting(without_6, scaled), "in another direction"
    ),
    "accumulated by Optax, and summed": Wrong(
        ("update", "statistics"), accumulated(lambda g: lax.psum(g, "s")), factor="N"
    ),
    "accumulated by Optax, and clipped by value": Wrong(
        "update", accumulated(lambda g: clipped(g, 0))
    ),
    "advantages normalised by shard": Wrong("update", own_advantages(1)),
    "advantages normalised by shard in epochs": Wrong("update", own_advantages(2)),
}


def not_reduced(optimizer: Any, n: int) -> Any:
    def step(state: Any, x: Any, y: Any) -> Any:
        params, state, count = jax.tree.map(lambda x: x[0], state)
        gradients = jax.grad(noisy)(params, count, x, y)
        after = *updated(optimizer, params, state, gradients), count + 1
        return jax.tree.map(lambda x: x[None], after)

    run = over(step, (SPLIT, SPLIT, SPLIT), SPLIT, mesh_of(s=n))
    params = first_params()
    state = params, optimizer.init(params), jnp.int32(0)
    return run, jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), state)


WRONG["noise, and not reduced"] = Wrong("copies", not_reduced)


# One of each kind; the others take longer.
QUICK = {
    "a schedule that advances N times",
    "a legacy key in per-shard state, equal on all",
    "noise, and rows dropped",
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.deep) for x in WRONG]
)
def test_what_is_wrong_is_named(name: str):
    wrong = WRONG[name]
    found = crossshard.verify(wrong.make_step, X, Y, num_shards=8, key=wrong.key)
    named = (wrong.kinds,) if isinstance(wrong.kinds, str) else wrong.kinds
    assert tuple(fault.kind for fault in found.faults) == named, found
    assert wrong.words in str(found)
    assert found.faults[0].factor == wrong.factor
    assert len(found.faults[0].leaves) == wrong.leaves
