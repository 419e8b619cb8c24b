"""Planted faults: what a shard does wrong, and what ``verify`` must say of it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.tools.verification.ways import ROWS, Here, Plan, errors, hidden, loss_fn


@dataclasses.dataclass(frozen=True)
class Planted:
    kind: str
    plan: Plan
    words: str = ""
    factor: str = ""
    leaves: int = 2
    groups: tuple[tuple[int, ...], ...] | None = None


def local(here: Here, params: Any, x: Any, y: Any, of: Any = loss_fn) -> tuple[Any, Any]:
    return jax.value_and_grad(of)(here.local(params), x, y)


def by(how: Any, of: Any = loss_fn, **options: Any) -> Plan:
    """A step with another way from the shards' gradients to the update."""

    def body(here: Here, params: Any, stats: Any, x: Any, y: Any, key: Any) -> Any:
        loss, gradients = local(here, params, x, y, of)
        return how(here, gradients), here.mean(loss), stats

    return Plan(body, **options)


each = jax.tree.map
mean = lambda here, g: here.mean(g)
several = lambda here: here.n > 1


def clipped(here: Here, g: Any) -> Any:
    clip = optax.clip_by_global_norm(0.1)
    return here.mean(clip.update(g, clip.init(g))[0])


def masked(params: Any, x: Any, y: Any) -> Any:
    return (errors(params, x, y) * x[:, 4]).sum() / x[:, 4].sum()


def metric(how: Any) -> Plan:
    def body(here: Here, params: Any, stats: Any, x: Any, y: Any, key: Any) -> Any:
        loss, gradients = local(here, params, x, y)
        return here.mean(gradients), how(here, loss), stats

    return Plan(body)


def statistics(how: Any) -> Plan:
    def body(here: Here, params: Any, stats: Any, x: Any, y: Any, key: Any) -> Any:
        loss, gradients = local(here, params, x, y)
        seen = hidden(here.local(params), x).mean(axis=0)
        stats = {"mean": 0.9 * stats["mean"] + 0.1 * how(here, seen)}
        return here.mean(gradients), here.mean(loss), stats

    return Plan(body, stats=True)


def dropout(own_keys: bool) -> Plan:
    def body(here: Here, params: Any, stats: Any, x: Any, y: Any, key: Any) -> Any:
        key = jax.random.fold_in(key, here.index()) if own_keys else key

        def of(params: Any, x: Any, y: Any) -> Any:
            h = hidden(params, x)
            kept = jax.random.bernoulli(key, 0.8, h.shape)
            return jnp.mean((jnp.where(kept, h / 0.8, 0) @ params["b"] - y) ** 2)

        loss, gradients = local(here, params, x, y, of)
        return here.mean(gradients), here.mean(loss), stats

    return Plan(body, keyed=True)


def microbatched(here: Here, params: Any, stats: Any, x: Any, y: Any, key: Any) -> Any:
    """Two rows at a time, whose mean is divided by their number once more."""
    number = x.shape[0] // 2
    parts = [local(here, params, x[i : i + 2], y[i : i + 2]) for i in range(0, x.shape[0], 2)]
    total = each(lambda *g: sum(g) / number / number, *[g for _, g in parts])
    return here.mean(total), here.mean(sum(loss for loss, _ in parts) / number), stats


def in_16_bits(here: Here, g: Any) -> Any:
    return each(lambda x: here.mean(x.astype(jnp.bfloat16)).astype(x.dtype), g)


GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7]]
weights = lambda weight: lambda here, g: each(lambda x: x / here.n, here.weighted(g, weight))

FAULTS = {
    "sum instead of mean": Planted("update", by(lambda h, g: h.sum(g)), "8.000 = N", "N"),
    "summed twice": Planted(
        "update", by(lambda h, g: each(lambda x: h.n * x, h.sum(g))), "64.000 times the update"
    ),
    "averaged twice": Planted(
        "update", by(lambda h, g: each(lambda x: x / h.n, h.mean(g))), "0.125 = 1/N", "1/N"
    ),
    "not reduced": Planted(
        "copies", by(lambda h, g: g, per_shard=True), "differs between the shards"
    ),
    "one leaf not reduced": Planted(
        "copies",
        by(lambda h, g: {"a": h.mean(g["a"]), "b": g["b"]}, per_shard=True),
        "b: differs between the shards",
        leaves=1,
    ),
    "shard 3 not reduced": Planted(
        "copies",
        by(
            lambda h, g: each(lambda x, m: jnp.where(h.index() == 3, x, m), g, h.mean(g)),
            per_shard=True,
        ),
        "differs between the shards",
    ),
    "shard 0's own": Planted("update", by(lambda h, g: h.of(g, 0)), "times"),
    "one leaf is shard 5's own": Planted(
        "update",
        by(lambda h, g: {"a": h.of(g["a"], 5), "b": h.mean(g["b"])}),
        "a: ",
        leaves=1,
    ),
    "rows dropped": Planted(
        "update",
        by(lambda h, g: weights(lambda i: jnp.where(several(h) & (i == 6), 0.0, 1.0))(h, g)),
        "in another direction",
    ),
    "rows used twice": Planted(
        "update",
        by(
            lambda h, g: weights(
                lambda i: jnp.where(i == 2, 2.0, jnp.where(i == 3, 0.0, 1.0)) if several(h) else 1.0
            )(h, g)
        ),
        "in another direction",
    ),
    "uneven weights": Planted("update", by(mean, masked), "in another direction"),
    "unequal shards": Planted(
        "update",
        by(lambda h, g: weights(lambda i: 0.5 + i / (h.n - 1) if several(h) else 1.0)(h, g)),
        "in another direction",
    ),
    "a sum over rows, averaged": Planted(
        "update",
        by(mean, lambda params, x, y: errors(params, x, y).sum()),
        "0.125 = 1/N",
        "1/N",
    ),
    "clipped per shard": Planted("update", by(clipped), "in another direction"),
    "normalised by a local norm": Planted(
        "update",
        by(lambda h, g: each(lambda x: x / math.sqrt(h.n), h.mean(g))),
        "0.354 = 1/√N",
        "1/√N",
    ),
    "clipped by value per shard": Planted(
        "update", by(lambda h, g: h.mean(each(lambda x: jnp.clip(x, -0.05, 0.05), g)))
    ),
    "sent in 16 bits by many only": Planted(
        "update",
        by(lambda h, g: in_16_bits(h, g) if several(h) else h.mean(g)),
        "of it in another direction",
    ),
    "microbatches divided twice": Planted("update", Plan(microbatched), "8.000 = N", "N"),
    "divided by 4 microbatches": Planted(
        "update",
        by(lambda h, g: each(lambda x: x / (5 if several(h) else 1), h.mean(g))),
        "0.200 times the update",
    ),
    "one leaf not updated": Planted(
        "update",
        by(lambda h, g: {"a": (0 if several(h) else 1) * h.mean(g["a"]), "b": h.mean(g["b"])}),
        "a: 0.000 times the update",
        "0",
        leaves=1,
    ),
    "the other way": Planted(
        "update", by(lambda h, g: each(lambda x: -x if several(h) else x, h.mean(g))), "-1.000"
    ),
    "scaled by the rows": Planted(
        "update",
        by(lambda h, g: each(lambda x: ROWS * x if several(h) else x, h.mean(g))),
        "32.000 times the update",
    ),
    "reduced in pairs": Planted(
        "copies",
        by(lambda h, g: each(lambda x: x / min(2, h.n), h.group_sum(g, 2)), per_shard=True),
        "differs between the shards",
    ),
    "groups ignored": Planted(
        "update", by(mean, per_shard=True), "in another direction", groups=GROUPS
    ),
    "a group's sum over all shards": Planted(
        "update",
        by(lambda h, g: each(lambda x: x / h.n, h.group_sum(g, 4)), per_shard=True),
        "0.500 = n/N",
        "n/N",
        groups=GROUPS,
    ),
    "equal random keys": Planted(
        "keys", dropout(own_keys=False), "random keys are equal on all shards", leaves=0
    ),
    "statistics of shard 0": Planted(
        "statistics", statistics(lambda h, x: h.of(x, 0)), "that of shard 0 alone", leaves=1
    ),
    "loss of shard 0": Planted(
        "metric", metric(lambda h, x: h.of(x, 0)), "that of shard 0 alone", leaves=1
    ),
    "loss summed": Planted("metric", metric(lambda h, x: h.sum(x)), "8.000 = N", "N", 1),
}

RIGHT = {
    "mean": by(mean),
    "mean, a copy for each shard": by(mean, per_shard=True),
    "sum over rows": by(lambda h, g: h.sum(g), lambda params, x, y: errors(params, x, y).sum()),
    "clipped after the mean": by(
        lambda h, g: optax.clip_by_global_norm(0.1).update(h.mean(g), None)[0]
    ),
    "mean of statistics": statistics(lambda h, x: h.mean(x)),
    "dropout": dropout(own_keys=True),
    "a shared number of weights": by(
        lambda h, g: h.mean(g),
        lambda params, x, y: (errors(params, x, y) * (jnp.arange(x.shape[0]) % 2)).mean(),
    ),
}
