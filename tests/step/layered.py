"""A small network of stacked layers, and the ways in which a loss may use its parameters."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import crossshard
from crossshard import make_train_step

SHARDS = 4
LAYERS, WIDTH, ROWS = 3, 192, 24

_rng = np.random.default_rng(11)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return np.float32(scale * _rng.normal(size=shape))


PARAMS = {
    "layers": {"w": normal(LAYERS, WIDTH, WIDTH, scale=0.05), "b": normal(LAYERS, WIDTH)},
    "embed": normal(WIDTH, WIDTH, scale=0.05),
    "out": normal(WIDTH, scale=0.1),
    "scale": np.float32(1.5),
}
# The rows of a shard differ from those of the next in more than noise.
BATCHES = [
    {
        "x": normal(ROWS, WIDTH) + np.linspace(-1, 1, ROWS, dtype=np.float32)[:, None],
        "y": normal(ROWS) + 2 * np.linspace(-1, 1, ROWS, dtype=np.float32),
    }
    for _ in range(3)
]

# How a step may keep its parameters and update them.
MODES: dict[str, dict[str, str]] = {
    "replicated": {"weight_update": "replicated"},
    "sharded": {"weight_update": "sharded"},
    "parts": {"params": "sharded"},
}


def step_of(mode: str, loss: Any, optimizer: Any = None, **options: Any) -> Any:
    """A step in one of the modes; of plain SGD by default."""
    optimizer = optax.sgd(0.01) if optimizer is None else optimizer
    if "mesh" not in options:
        options.setdefault("num_shards", SHARDS)
    return make_train_step(loss, optimizer, **MODES[mode], **options)


def sent(step: Any, params: Any = None, batch: Any = None) -> list[tuple[str, str, int | None]]:
    """The collectives of a step that move more than small arrays: kind, array, and how often."""
    state = step.abstract_init(PARAMS if params is None else params)
    report = crossshard.inspect(step.lower(state, BATCHES[0] if batch is None else batch))
    return sorted(
        (each.kind, " ".join(map(str, each.operands)), each.times)
        for each in report.collectives
        if each.bytes_sent > 1 << 14
    )


def layer(h: Any, p: Any) -> Any:
    return h + 0.5 * jnp.tanh(h @ p["w"] + p["b"])


def embedded(params: Any, batch: Any) -> Any:
    return jnp.tanh(batch["x"] @ params["embed"])


def error(params: Any, h: Any, batch: Any) -> Any:
    return ((h @ params["out"]) * params["scale"] - batch["y"]) ** 2


def through(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss whose layers are run by ``run(h, layers)``."""

    def loss(params: Any, batch: Any) -> Any:
        return error(params, run(embedded(params, batch), params["layers"]), batch).mean()

    return loss


def scanned(h: Any, layers: Any, body: Any = layer, **options: Any) -> Any:
    return lax.scan(lambda h, p: (body(h, p), None), h, layers, **options)[0]


scan_loss = through(scanned)


# Ways to run the layers.


def _named(h: Any, p: Any) -> Any:
    w = checkpoint_name(p["w"], "weights")
    return h + 0.5 * jnp.tanh(checkpoint_name(h @ w, "products") + p["b"])


def _remat(policy: Any, body: Any = layer, **options: Any) -> Any:
    return lambda h, p: scanned(h, p, jax.checkpoint(body, policy=policy, **options))


def _branch(h: Any, p: Any) -> Any:
    big = lambda h, w: h @ w
    small = lambda h, w: 0.5 * h @ w
    return h + 0.5 * jnp.tanh(lax.cond(h.sum() > 1e9, big, small, h, p["w"]) + p["b"])


def _stacks(h: Any, layers: Any) -> Any:
    """Returns something of the weights from each turn of the loop."""
    h, weights = lax.scan(lambda h, p: (layer(h, p), 2 * p["w"]), h, layers)
    return h + 0.1 * jnp.tanh(h @ weights.sum(0))


def _both(h: Any, layers: Any) -> Any:
    """Two loops over the same weights."""
    return scanned(scanned(h, layers), layers, reverse=True)


def _nested(h: Any, layers: Any) -> Any:
    """A loop within each turn, of the turn's weights."""
    again = lambda h, p: lax.scan(lambda h, _: (layer(h, p), None), h, length=2)[0]
    return scanned(h, layers, again)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss.

    Attributes:
      loss: the loss.
      by_layer: whether one layer at a time is gathered, and its gradient summed.
      over: what it is a mean over.
    """

    loss: Callable[[Any, Any], Any]
    by_layer: bool = True
    over: str = "rows"


def _penalty(params: Any, batch: Any) -> Any:
    return scan_loss(params, batch) + 1e-2 * (params["layers"]["w"] ** 2).sum()


def _gradient_penalty(params: Any, batch: Any) -> Any:
    of = lambda h: error(params, scanned(h, params["layers"]), batch).sum()
    value, slope = jax.value_and_grad(of)(embedded(params, batch))
    return value / len(batch["y"]) + 0.1 * (slope**2).mean()


def _tied(params: Any, batch: Any) -> Any:
    """Embeds and reads out with one matrix."""
    h = scanned(embedded(params, batch), params["layers"])
    return error(params, h + 0.1 * h @ params["embed"].T, batch).mean()


def _unused(params: Any, batch: Any) -> Any:
    return error(params, embedded(params, batch), batch).mean()


def _unrolled_by_hand(h: Any, layers: Any) -> Any:
    for i in range(LAYERS):
        h = layer(h, jax.tree.map(lambda x, i=i: x[i], layers))
    return h


_policies = jax.checkpoint_policies
CASES: dict[str, Case] = {
    "scan": Case(scan_loss),
    "nested": Case(through(_nested)),
    "remat": Case(through(_remat(None))),
    "remat, dots": Case(through(_remat(_policies.dots_saveable))),
    "remat, weights": Case(through(_remat(_policies.save_only_these_names("weights"), _named))),
    "remat around": Case(through(jax.checkpoint(scanned))),
    # Each shard branches on its own rows.
    "cond": Case(through(functools.partial(scanned, body=_branch)), over="shard"),
    "stacks": Case(through(_stacks)),
    "both": Case(through(_both), False),
    "by hand": Case(through(_unrolled_by_hand)),
    "penalty": Case(_penalty, False),
    "gradient penalty": Case(_gradient_penalty, False),
    "tied": Case(_tied),
    "unused": Case(_unused),
}
