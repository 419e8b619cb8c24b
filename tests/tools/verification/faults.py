"""Planted faults: what a shard does wrong, and the kind that ``verify`` must name."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossshard.tools.verification import kinds
from tests.tools.verification.ways import ROWS, Here, Plan, errors, hidden, loss_fn


@dataclasses.dataclass(frozen=True)
class Planted:
    kind: str
    plan: Plan
    words: str = ""
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
    "sum instead of mean": Planted(kinds.SUMMED, by(lambda h, g: h.sum(g)), "8.000 = N: summed"),
    "summed twice": Planted(
        kinds.SUMMED_TWICE, by(lambda h, g: each(lambda x: h.n * x, h.sum(g))), "64.000 = N²"
    ),
    "averaged twice": Planted(
        kinds.AVERAGED_TWICE, by(lambda h, g: each(lambda x: x / h.n, h.mean(g))), "0.125 = 1/N"
    ),
    "not reduced": Planted(kinds.NOT_REDUCED, by(lambda h, g: g, per_shard=True), "not reduced"),
    "one leaf not reduced": Planted(
        kinds.NOT_REDUCED,
        by(lambda h, g: {"a": h.mean(g["a"]), "b": g["b"]}, per_shard=True),
        "b: each shard has",
        leaves=1,
    ),
    "shard 3 not reduced": Planted(
        kinds.SHARD_DIFFERS,
        by(
            lambda h, g: each(lambda x, m: jnp.where(h.index() == 3, x, m), g, h.mean(g)),
            per_shard=True,
        ),
        "shard 3 differs: not reduced",
    ),
    "shard 0's own": Planted(kinds.ONE_SHARD, by(lambda h, g: h.of(g, 0)), "shard 0's own"),
    "one leaf is shard 5's own": Planted(
        kinds.ONE_SHARD,
        by(lambda h, g: {"a": h.of(g["a"], 5), "b": h.mean(g["b"])}),
        "a: is shard 5's own",
        leaves=1,
    ),
    "rows dropped": Planted(
        kinds.ROWS_DROPPED,
        by(lambda h, g: weights(lambda i: jnp.where(several(h) & (i == 6), 0.0, 1.0))(h, g)),
        "rows of shard 6 are left out",
    ),
    "rows used twice": Planted(
        kinds.ROWS_REPEATED,
        by(
            lambda h, g: weights(
                lambda i: jnp.where(i == 2, 2.0, jnp.where(i == 3, 0.0, 1.0)) if several(h) else 1.0
            )(h, g)
        ),
        "rows of shard 2 count twice, and the rows of shard 3 are left out",
    ),
    "uneven weights": Planted(kinds.WEIGHTS, by(mean, masked), "uneven weights"),
    "unequal shards": Planted(
        kinds.WEIGHTS,
        by(lambda h, g: weights(lambda i: 0.5 + i / (h.n - 1) if several(h) else 1.0)(h, g)),
        "count as 0.06",
    ),
    "a sum over rows, averaged": Planted(
        kinds.SUM_AVERAGED,
        by(mean, lambda params, x, y: errors(params, x, y).sum()),
        "0.125 = 1/N: averaged, but the loss is a sum",
    ),
    "clipped per shard": Planted(kinds.LOCAL_NORM, by(clipped), "local norm"),
    "normalised by a local norm": Planted(
        kinds.LOCAL_NORM,
        by(lambda h, g: each(lambda x: x / math.sqrt(h.n), h.mean(g))),
        "0.354 = 1/√N: clipped",
    ),
    "clipped by value per shard": Planted(
        kinds.NOT_LINEAR, by(lambda h, g: h.mean(each(lambda x: jnp.clip(x, -0.05, 0.05), g)))
    ),
    "sent in 16 bits": Planted(kinds.LOW_PRECISION, by(in_16_bits), "16 bits"),
    "sent in 16 bits by many only": Planted(
        kinds.LOW_PRECISION,
        by(lambda h, g: in_16_bits(h, g) if several(h) else h.mean(g)),
        "16 bits",
    ),
    "microbatches divided twice": Planted(
        kinds.MICROBATCHES, Plan(microbatched), "divided twice by the number"
    ),
    "divided by 4 microbatches": Planted(
        kinds.MICROBATCHES,
        by(lambda h, g: each(lambda x: x / (5 if several(h) else 1), h.mean(g))),
        "0.200 = 1/5",
    ),
    "one leaf not updated": Planted(
        kinds.NOT_UPDATED,
        by(lambda h, g: {"a": (0 if several(h) else 1) * h.mean(g["a"]), "b": h.mean(g["b"])}),
        "a: 0.000: not updated",
        leaves=1,
    ),
    "the other way": Planted(
        kinds.SCALED, by(lambda h, g: each(lambda x: -x if several(h) else x, h.mean(g))), "-1.000"
    ),
    "scaled by the rows": Planted(
        kinds.SCALED_BY_ROWS,
        by(lambda h, g: each(lambda x: ROWS * x if several(h) else x, h.mean(g))),
        "32.000 = the rows of the batch",
    ),
    "reduced in pairs": Planted(
        kinds.IN_GROUPS,
        by(lambda h, g: each(lambda x: x / min(2, h.n), h.group_sum(g, 2)), per_shard=True),
        "only within groups of shards: 0–1, 2–3, 4–5, 6–7",
    ),
    "groups ignored": Planted(
        kinds.GROUPS_IGNORED, by(mean, per_shard=True), "the groups are ignored", groups=GROUPS
    ),
    "a group's sum over all shards": Planted(
        kinds.GROUP_SIZE,
        by(lambda h, g: each(lambda x: x / h.n, h.group_sum(g, 4)), per_shard=True),
        "0.500 = n/N",
        groups=GROUPS,
    ),
    "batch not split": Planted(
        kinds.BATCH_NOT_SPLIT, by(mean, whole_batch=True), "the batch is not split", leaves=0
    ),
    "equal random keys": Planted(
        kinds.KEYS_EQUAL, dropout(own_keys=False), "random keys are equal on all shards", leaves=0
    ),
    "statistics of shard 0": Planted(
        kinds.STATISTICS, statistics(lambda h, x: h.of(x, 0)), "it is shard 0's own", 1
    ),
    "loss of shard 0": Planted(
        kinds.METRIC_ONE_SHARD, metric(lambda h, x: h.of(x, 0)), "it is shard 0's own", 1
    ),
    "loss summed": Planted(
        kinds.METRIC_SUMMED, metric(lambda h, x: h.sum(x)), "8.000 = N: summed", 1
    ),
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
