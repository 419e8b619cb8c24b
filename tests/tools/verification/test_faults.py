"""Every planted fault is named, in every way of running a step, and no right step is accused."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import crossshard
from crossshard.errors import ArgumentError
from tests.tools.verification.ways import (
    BATCH,
    ROWS,
    WAYS,
    Here,
    Plan,
    dropped,
    errors,
    hidden,
    loss_fn,
)


@dataclasses.dataclass(frozen=True)
class Planted:
    """A wrong step, and what ``verify`` must say of it."""

    plan: Plan
    words: str = ""
    factor: str = ""
    leaves: int = 2
    kinds: tuple[str, ...] = ("update",)
    groups: list[list[int]] | None = None


# A step is a loss, and a way from the shards' gradients to the update.

each = jax.tree.map
mean = lambda here, x: here.mean(x)
summed = lambda here, x: here.sum(x)
several = lambda here: here.n > 1
plain = lambda here, params, rest, x, y, key: loss_fn(params, x, y)


def by(
    how: Callable = mean,
    loss: Callable = plain,
    metric: Callable = mean,
    advance: Callable = lambda here, params, rest, x: rest,
    **options: Any,
) -> Plan:
    def body(here: Here, params: Any, rest: Any, x: Any, y: Any, key: Any) -> Any:
        of = lambda params: loss(here, params, rest, x, y, key)
        value, gradients = jax.value_and_grad(of)(params)
        after = advance(here, params, rest, x)
        return how(here, gradients), metric(here, value), after

    return Plan(body, **options)


def of_rows(function: Callable) -> Callable:
    """A loss that takes nothing but rows."""
    return lambda here, params, rest, x, y, key: function(params, x, y)


def scaled(factor: Callable[[Here], Any]) -> Callable:
    """The mean times a factor on many shards."""
    return lambda h, g: each(lambda x: factor(h) * x if several(h) else x, h.mean(g))


def weights(weight: Callable[[Any], Any]) -> Callable:
    """The mean with a weight of each shard by its number, on many shards."""
    own = lambda h, i: weight(i) if several(h) else 1.0
    return lambda h, g: each(lambda x: x / h.n, h.weighted(g, lambda i: own(h, i)))


def by_leaf(a: Callable, b: Callable) -> Callable:
    return lambda h, g: {"a": a(h, g["a"]), "b": b(h, g["b"])}


def clipped(h: Here, g: Any) -> Any:
    clip = optax.clip_by_global_norm(0.1)
    return h.mean(clip.update(g, clip.init(g))[0])


clipped_by_value = lambda h, g: h.mean(each(lambda x: jnp.clip(x, -0.05, 0.05), g))
masked = of_rows(lambda params, x, y: (errors(params, x, y) * x[:, 4]).sum() / x[:, 4].sum())
sum_of_rows = of_rows(lambda params, x, y: errors(params, x, y).sum())
own_advantages = of_rows(
    lambda params, x, y: (
        -jnp.mean(jax.nn.log_sigmoid(hidden(params, x) @ params["b"]) * (y - y.mean()) / y.std())
    )
)


def microbatched(here: Here, params: Any, rest: Any, x: Any, y: Any, key: Any) -> Any:
    """Two rows at a time, whose mean is divided by their number once more."""
    number = x.shape[0] // 2
    of = jax.value_and_grad(loss_fn)
    rows = [slice(i, i + 2) for i in range(0, x.shape[0], 2)]
    parts = [of(params, x[each], y[each]) for each in rows]
    total = each(lambda *g: sum(g) / number / number, *[g for _, g in parts])
    return here.mean(total), here.mean(sum(loss for loss, _ in parts) / number), rest


def in_16_bits(h: Here, g: Any) -> Any:
    narrow = lambda x: h.mean(x.astype(jnp.bfloat16)).astype(x.dtype)
    return each(narrow, g) if several(h) else h.mean(g)


# What counts, and what draws random numbers.

COUNT = {"count": jnp.int32(0)}
counted = lambda here, params, rest, x: {"count": rest["count"] + 1}


def counting(loss: Callable, how: Callable = mean, advance: Callable = counted) -> Plan:
    """A counter in the state, which the loss reads."""
    return by(how, loss, rest=COUNT, advance=advance)


def scheduled(here: Here, params: Any, rest: Any, x: Any, y: Any, key: Any) -> Any:
    """KL annealing, a temperature and the like."""
    return loss_fn(params, x, y) / (1.0 + rest["count"])


def key_of(here: Here, rest: Any, *, equal: bool = False) -> Any:
    """A key from the count, or in the state, and the shard."""
    key = jax.random.split(rest["key"])[1] if "key" in rest else jax.random.key(3)
    key = jax.random.fold_in(key, rest["count"]) if "count" in rest else key
    return key if equal else jax.random.fold_in(key, here.index())


noisy = lambda here, params, rest, x, y, key: dropped(params, x, y, key_of(here, rest))
own_key = lambda here, params, rest, x, y, key: dropped(
    params, x, y, jax.random.fold_in(key, here.index())
)
split = lambda here, params, rest, x: {"key": jax.random.split(rest["key"])[0]}
LEGACY, TYPED = jax.random.PRNGKey(5), jax.random.key(7)


def noise_of_rows(here: Here, params: Any, rest: Any, x: Any, y: Any, key: Any) -> Any:
    """The same for a row on any number of shards."""
    rows = here.index() * len(x) + jnp.arange(len(x))
    keys = jax.vmap(lambda row: jax.random.fold_in(key_of(here, rest, equal=True), row))(rows)
    noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
    return loss_fn(params, x + noise, y)


def with_statistics(how: Callable) -> Plan:
    """A moving mean of what a layer sees."""

    def advance(here: Here, params: Any, rest: Any, x: Any) -> Any:
        seen = hidden(params, x).mean(axis=0)
        return {"mean": 0.9 * rest["mean"] + 0.1 * how(here, seen)}

    return by(mean, advance=advance, rest={"mean": jnp.zeros(6)})


of_shard_0 = lambda here, x: here.of(x, 0)
of_shard_5 = lambda here, x: here.of(x, 5)
without_6 = weights(lambda i: jnp.where(i == 6, 0.0, 1.0))
accumulated = lambda optimizer: optax.MultiSteps(optimizer, every_k_schedule=2)
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
ASIDE, COPIES = "in another direction", "differs between the shards"

FAULTS = {
    "sum instead of mean": Planted(by(summed), "8.000 = N", "N"),
    "summed twice": Planted(
        by(lambda h, g: each(lambda x: h.n * x, h.sum(g))), "64.000 times the update"
    ),
    "averaged twice": Planted(by(scaled(lambda h: 1 / h.n)), "0.125 = 1/N", "1/N"),
    "not reduced": Planted(by(lambda h, g: g, per_shard=True), COPIES, kinds=("copies",)),
    "one leaf not reduced": Planted(
        by(by_leaf(mean, lambda h, g: g), per_shard=True),
        "b: differs between the shards",
        leaves=1,
        kinds=("copies",),
    ),
    "shard 3 not reduced": Planted(
        by(
            lambda h, g: each(lambda x, m: jnp.where(h.index() == 3, x, m), g, h.mean(g)),
            per_shard=True,
        ),
        COPIES,
        kinds=("copies",),
    ),
    "shard 0's own": Planted(by(of_shard_0), "times"),
    "one leaf is shard 5's own": Planted(by(by_leaf(of_shard_5, mean)), "a: ", leaves=1),
    "rows dropped": Planted(by(without_6), ASIDE),
    "rows used twice": Planted(
        by(weights(lambda i: jnp.where(i == 2, 2.0, jnp.where(i == 3, 0.0, 1.0)))), ASIDE
    ),
    "uneven weights": Planted(by(loss=masked), ASIDE),
    "unequal shards": Planted(by(weights(lambda i: 0.5 + i / 7)), ASIDE),
    "a sum over rows, averaged": Planted(by(loss=sum_of_rows), "0.125 = 1/N", "1/N"),
    "clipped per shard": Planted(by(clipped), ASIDE),
    "normalised by a local norm": Planted(
        by(scaled(lambda h: 1 / math.sqrt(h.n))), "0.354 = 1/√N", "1/√N"
    ),
    "clipped by value per shard": Planted(by(clipped_by_value)),
    "sent in 16 bits by many only": Planted(by(in_16_bits), "of it in another direction"),
    "microbatches divided twice": Planted(Plan(microbatched), "8.000 = N", "N"),
    "divided by 5": Planted(by(scaled(lambda h: 1 / 5)), "0.200 times the update"),
    "one leaf not updated": Planted(
        by(by_leaf(scaled(lambda h: 0), mean)), "a: 0.000 times the update", "0", leaves=1
    ),
    "the other way": Planted(by(scaled(lambda h: -1)), "-1.000"),
    "scaled by the rows": Planted(by(scaled(lambda h: ROWS)), "32.000 times the update"),
    "reduced in pairs": Planted(
        by(lambda h, g: each(lambda x: x / min(2, h.n), h.group_sum(g, 2)), per_shard=True),
        COPIES,
        kinds=("copies",),
    ),
    "groups ignored": Planted(by(per_shard=True), ASIDE, groups=HALVES),
    "a group's sum over all shards": Planted(
        by(lambda h, g: each(lambda x: x / h.n, h.group_sum(g, 4)), per_shard=True),
        "0.500 = n/N",
        "n/N",
        groups=HALVES,
    ),
    "advantages normalised by shard": Planted(by(loss=own_advantages)),
    "statistics of shard 0": Planted(
        with_statistics(of_shard_0), "that of shard 0 alone", leaves=1, kinds=("statistics",)
    ),
    "loss of shard 0": Planted(
        by(metric=of_shard_0), "that of shard 0 alone", leaves=1, kinds=("metric",)
    ),
    "loss summed": Planted(by(metric=summed), "8.000 = N", "N", 1, ("metric",)),
    # Schedules, which are compared at the same count.
    "a schedule, and summed": Planted(counting(scheduled, summed), "8.000 = N", "N"),
    "a schedule, and rows dropped": Planted(counting(scheduled, without_6), ASIDE),
    "a schedule, and clipped by value": Planted(counting(scheduled, clipped_by_value)),
    "a schedule that advances N times": Planted(
        counting(scheduled, advance=lambda h, p, rest, x: {"count": rest["count"] + h.sum(1)}),
        "times the update",
    ),
    "accumulated by Optax, and summed": Planted(
        by(summed, chain=accumulated), "8.000 = N", "N", kinds=("update", "statistics")
    ),
    "accumulated by Optax, and clipped by value": Planted(by(clipped_by_value, chain=accumulated)),
    "one leaf updated by many only": Planted(
        by(by_leaf(mean, lambda h, g: each(lambda x: x * (3e-7, 1)[several(h)], h.mean(g)))),
        "b: an update, where one device makes none",
        leaves=1,
    ),
    "a rate that overflows": Planted(by(scaled(lambda h: -1e18)), ": -1.0e+18 times the update"),
}

half = lambda tree: each(lambda x: x.astype(jnp.bfloat16), tree)
RIGHT = {
    "mean": by(),
    "mean, a copy for each shard": by(per_shard=True),
    "sum over rows": by(summed, sum_of_rows),
    "clipped after the mean": by(
        lambda h, g: optax.clip_by_global_norm(0.1).update(h.mean(g), None)[0]
    ),
    "mean of statistics": with_statistics(mean),
    "a shared number of weights": by(
        loss=of_rows(lambda p, x, y: (errors(p, x, y) * (jnp.arange(len(x)) % 2)).mean())
    ),
    "in bfloat16 with float32 parameters": by(
        loss=of_rows(lambda p, x, y: loss_fn(half(p), half(x), y).astype(jnp.float32))
    ),
    "clipped, with weight decay": by(
        chain=lambda sgd: optax.chain(
            optax.clip_by_global_norm(0.1), optax.add_decayed_weights(0.1), sgd
        )
    ),
    "a schedule of Optax": by(
        chain=lambda sgd: optax.chain(optax.scale_by_schedule(lambda count: 0.5**count), sgd)
    ),
    "accumulated by Optax": by(chain=lambda sgd: optax.MultiSteps(sgd, every_k_schedule=3)),
    "a schedule by a counter": counting(scheduled),
    "noise with a key for each row": counting(noise_of_rows),
    "noise that all rows share": counting(
        lambda h, p, rest, x, y, key: loss_fn(
            p, x + jax.random.normal(key_of(h, rest, equal=True), (5,)), y
        )
    ),
}
# Each shard has random numbers of its own, whatever they come from.
NOISY = {
    "a key as argument": by(loss=own_key, key=TYPED),
    "a legacy key as argument": by(loss=own_key, key=LEGACY),
    "keys from the count and the shard": counting(noisy),
    "a legacy key in the state": by(loss=noisy, rest={"key": LEGACY}, advance=split),
    "a typed key in the state": by(loss=noisy, rest={"key": TYPED}, advance=split),
    "a legacy key that stays": by(loss=noisy, rest={"key": LEGACY}),
    "and summed": counting(noisy, summed),
}


# Of each kind of fault one, in every way; what is noisy is computed many times.
QUICK = {
    *("sum instead of mean", "one leaf not reduced", "rows dropped", "a sum over rows, averaged"),
    *("one leaf updated by many only", "a rate that overflows"),
    *("a group's sum over all shards", "a schedule that advances N times", "loss summed"),
    *("mean", "mean of statistics", "keys from the count and the shard"),
}


def spread(table: dict[str, Any]) -> list[Any]:
    """Each name in one way, the ways in turn."""
    ways = list(WAYS)
    return [
        pytest.param(
            name,
            ways[number % len(ways)],
            marks=() if name in QUICK else pytest.mark.deep,
            id=f"{ways[number % len(ways)]}-{name}",
        )
        for number, name in enumerate(table)
    ]


@pytest.mark.parametrize(("name", "way"), spread(FAULTS))
def test_a_fault_is_named(name: str, way: str):
    planted = FAULTS[name]
    found = planted.plan.verified(way, groups=planted.groups)
    assert tuple(fault.kind for fault in found.faults) == planted.kinds, found
    fault = found.faults[0]
    assert planted.words in str(found)
    assert fault.factor == planted.factor
    assert len(fault.leaves) == planted.leaves
    assert not found.ok


def test_stacked_statistics_of_one_shard_are_not_taken_for_each_shards_own():
    (fault,) = FAULTS["statistics of shard 0"].plan.verified("pmap").faults
    assert fault.kind == "statistics"


@pytest.mark.parametrize(("name", "way"), spread(RIGHT))
def test_a_right_step_is_fine(name: str, way: str):
    found = RIGHT[name].verified(way)
    assert found.ok, found
    assert all(leaf.verdict == "fine" for leaf in found.leaves)
    assert found.notes == ()


@pytest.mark.parametrize(("name", "way"), spread(NOISY))
def test_what_cannot_be_told_from_noise_is_refused(name: str, way: str):
    with pytest.raises(
        ArgumentError, match=r"another update on 8 shards than .* dropout rate of 0"
    ):
        NOISY[name].verified(way)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["keys from the count and the shard", "a key as argument"])
def test_noise_is_seen_in_a_step_that_cannot_be_traced(name: str):
    def make_step(optimizer: Any, n: int) -> Any:
        run, *state = WAYS["shard_map"](plan, optimizer, n)

        def step(state: Any, x: Any, y: Any, *key: Any) -> Any:
            assert float(y[0]) > -100
            return run(state, x, y, *key)

        return step, *state

    verified = lambda: crossshard.verify(make_step, *BATCH, num_shards=8, key=plan.key)
    plan = NOISY[name]
    with pytest.raises(ArgumentError, match="dropout rate of 0"):
        verified()
    plan = FAULTS["sum instead of mean"].plan
    assert [fault.factor for fault in verified().faults] == ["N"]
