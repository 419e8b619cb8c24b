"""Losses that compare rows, as their owners write them for one device, with what they train on."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from flax import linen
from jax import lax

ROWS, FEATURES, WIDTH = 16, 24, 32
EXPERTS, CAPACITY = 4, 6
SEED = 5


def array(seed: int, *shape: int) -> Any:
    """Normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS = {
    "first": array(1, FEATURES, WIDTH) / 5,
    "scale": jnp.ones(WIDTH),
    "second": array(2, WIDTH, WIDTH) / 5,
}
_rng = np.random.default_rng(0)
_seen = np.linspace(0.1, 1, ROWS)[:, None]
BATCHES = [
    {
        "x": np.float32(_rng.normal(size=(ROWS, FEATURES))),
        "y": np.float32(_rng.normal(size=(ROWS, WIDTH))),
        "mask": np.float32(_rng.random((ROWS, WIDTH)) < _seen),
        "kind": _rng.permutation(np.arange(ROWS) % 4),
        "neighbour": _rng.integers(ROWS, size=(ROWS, 3)),
    }
    for _ in range(3)
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss and what it trains.

    Attributes:
      loss: ``loss(params[, model_state], batch[, rng])``.
      make: makes the parameters and the model state, which is ``None`` if it takes none.
      takes_rng: whether it takes a key.
    """

    loss: Callable[..., Any]
    make: Callable[[], tuple[Any, Any]] = lambda: (PARAMS, None)
    takes_rng: bool = False

    def on_one_device(self, optimizer: Any) -> Any:
        """The arrays of the model that plain JAX and Optax reach, and the loss of each step."""
        model, model_state = self.make()
        trained, rest = eqx.partition(model, eqx.is_inexact_array)
        opt_state, losses = optimizer.init(trained), []

        def loss_of(trained: Any, model_state: Any, batch: Any, *keys: Any) -> Any:
            model = eqx.combine(trained, rest)
            if model_state is None:
                return self.loss(model, batch, *keys), None
            return self.loss(model, model_state, batch, *keys)

        value_and_grad = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
        for count, batch in enumerate(BATCHES):
            fold = jax.random.fold_in
            keys = (fold(fold(jax.random.key(SEED), count), 0),) if self.takes_rng else ()
            (value, model_state), gradients = value_and_grad(trained, model_state, batch, *keys)
            updates, opt_state = optimizer.update(gradients, opt_state, trained)
            trained = optax.apply_updates(trained, updates)
            losses.append(value)
        model = eqx.filter(eqx.combine(trained, rest), eqx.is_array)
        return (model if model_state is None else (model, model_state)), losses


def _unit(x: Any) -> Any:
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def _hidden(params: Any, batch: Any) -> Any:
    return jnp.tanh(batch["x"] @ params["first"] * params["scale"])


def _out(params: Any, batch: Any) -> Any:
    return _hidden(params, batch) @ params["second"]


def _squared(params: Any, batch: Any) -> Any:
    return ((_out(params, batch) - batch["y"]) ** 2).mean(1)


def _distances(x: Any, y: Any) -> Any:
    return ((x[:, None] - y[None]) ** 2).mean(-1)


def contrastive(params: Any, batch: Any) -> Any:
    images = _unit(batch["x"] @ params["first"] * params["scale"])
    logits = images @ _unit(batch["y"] @ params["second"]).T / 0.2
    both = jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)
    return -jnp.diag(both).mean() / 2


def triplet_hardest_in_batch(params: Any, batch: Any) -> Any:
    found = _out(params, batch)
    distances, same = _distances(found, found), batch["kind"][:, None] == batch["kind"]
    positive = jnp.where(same, distances, -jnp.inf).max(1)
    negative = jnp.where(same, jnp.inf, distances).min(1)
    return jax.nn.relu(positive - negative + 0.5).mean()


def negatives_by_a_roll(params: Any, batch: Any) -> Any:
    pairs = lambda y: (_out(params, batch) * y).mean(1)
    return jax.nn.softplus(pairs(jnp.roll(batch["y"], 1, 0)) - pairs(batch["y"])).mean()


def cox_partial_likelihood(params: Any, batch: Any) -> Any:
    risk = _out(params, batch).mean(1)[jnp.argsort(-batch["y"][:, 0])]
    return (jnp.log(jnp.cumsum(jnp.exp(risk))) - risk).mean()


def batch_norm(params: Any, batch: Any) -> Any:
    hidden = batch["x"] @ params["first"]
    hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-3)
    hidden = jax.nn.relu(hidden * params["scale"])
    return ((hidden @ params["second"] - batch["y"]) ** 2).mean()


def token_mean(params: Any, batch: Any) -> Any:
    errors = (_out(params, batch) - batch["y"]) ** 2
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


def whitened(params: Any, batch: Any) -> Any:
    found = _out(params, batch)[:, :8]
    centred = found - found.mean(0)
    covariance = centred.T @ centred / len(found) + jnp.eye(8)
    white = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(covariance), centred.T).T
    return ((white - batch["y"][:, :8]) ** 2).mean()


def sinkhorn(params: Any, batch: Any) -> Any:
    cost = _distances(_out(params, batch), batch["y"])
    uniform = -jnp.log(float(len(cost)))

    def turn(dual: Any, _: Any) -> Any:
        other = uniform - jax.nn.logsumexp(dual[:, None] - cost / 0.5, axis=0)
        return uniform - jax.nn.logsumexp(other - cost / 0.5, axis=1), other

    dual, others = lax.scan(turn, jnp.zeros(len(cost)), None, 5)
    return (jnp.exp(dual[:, None] + others[-1] - cost / 0.5) * cost).sum()


def experts_with_a_capacity(params: Any, batch: Any) -> Any:
    """Each row goes to two experts, as long as these have room; the surest rows come first."""
    routed = jax.nn.softmax(batch["x"] @ params["first"][:, :EXPERTS])
    gates, chosen = lax.top_k(routed, 2)
    gates, chosen = gates.reshape(-1), chosen.reshape(-1)
    order = jnp.argsort(-gates)
    mine = jax.nn.one_hot(chosen[order], EXPERTS, dtype=jnp.int32)
    place, rows = ((mine.cumsum(0) - 1) * mine).sum(1), order // 2
    slots = jnp.zeros((EXPERTS, CAPACITY, WIDTH)).at[chosen[order], place]
    slots = slots.set(_hidden(params, batch)[rows], mode="drop")
    of_expert = params["second"].reshape(EXPERTS, -1, WIDTH)
    answers = jnp.einsum("ecw,ekw,ekv->ecv", slots, of_expert, of_expert)
    taken = answers.at[chosen[order], place].get(mode="fill", fill_value=0)
    out = jnp.zeros((len(batch["x"]), WIDTH)).at[rows].add(taken * gates[order][:, None])
    balance = EXPERTS * (mine.mean(0) * routed.mean(0)).sum()
    return ((out - batch["y"]) ** 2).mean() + 0.1 * balance


def graph_of_rows(params: Any, batch: Any) -> Any:
    hidden = _hidden(params, batch)
    sent, receivers = jnp.repeat(hidden, 3, axis=0), batch["neighbour"].reshape(-1)
    got = jax.ops.segment_sum(sent, receivers, len(hidden))
    return (((hidden + got) @ params["second"] - batch["y"]) ** 2).mean()


def loop_over_rows(params: Any, batch: Any) -> Any:
    def one(before: Any, row: Any) -> Any:
        after = jnp.tanh(row @ params["first"] * params["scale"] + before @ params["second"])
        return after, after

    _, found = lax.scan(one, jnp.zeros(WIDTH), batch["x"])
    return ((found - batch["y"]) ** 2).mean()


def mixup(params: Any, batch: Any, rng: Any) -> Any:
    of_order, of_share, of_row = jax.random.split(rng, 3)
    order = jax.random.permutation(of_order, len(batch["x"]))
    share = jax.random.beta(of_share, 0.4, 0.4)
    mixed = {name: share * x + (1 - share) * x[order] for name, x in batch.items() if name in "xy"}
    noise = jax.vmap(lambda key: jax.random.normal(key, (FEATURES,)))
    mixed["x"] += noise(jax.random.split(of_row, len(batch["x"])))
    return _squared(params, mixed).mean()


# Layers of libraries, whose statistics are model state.


class _Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        norm = linen.BatchNorm(use_running_average=False, momentum=0.5)
        hidden = linen.relu(norm(linen.Dense(WIDTH, use_bias=False)(x)))
        return linen.Dense(WIDTH)(linen.Dropout(0.2, deterministic=False)(hidden))


def _of_linen() -> Any:
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    variables = _Linen().init(rngs, jnp.zeros((1, FEATURES)))
    return variables["params"], {"batch_stats": variables["batch_stats"], "seen": jnp.int32(0)}


def linen_batch_norm(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    variables = {"params": params, "batch_stats": model_state["batch_stats"]}
    apply = functools.partial(_Linen().apply, mutable=["batch_stats"], rngs={"dropout": rng})
    out, after = apply(variables, batch["x"])
    # An integer that depends on the batch.
    seen = model_state["seen"] + (batch["x"][:, 0] > 0).sum(dtype=jnp.int32)
    return ((out - batch["y"]) ** 2).mean(), {"batch_stats": after["batch_stats"], "seen": seen}


@hk.transform_with_state
def _haiku(x: Any) -> Any:
    hidden = hk.Linear(WIDTH, with_bias=False)(x)
    hidden = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.5)(hidden, True)
    hidden = hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(hidden))
    return hk.Linear(WIDTH)(hidden)


def haiku_batch_norm(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    out, after = _haiku.apply(params, model_state, rng, batch["x"])
    return ((out - batch["y"]) ** 2).mean(), after


class _Equinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self) -> None:
        self.first = eqx.nn.Linear(FEATURES, WIDTH, use_bias=False, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(WIDTH, "rows", momentum=0.5, mode="batch")

    def __call__(self, x: Any, state: Any) -> Any:
        hidden, state = self.norm(self.first(x), state)
        return jax.nn.relu(hidden), state


def equinox_batch_norm(model: Any, model_state: Any, batch: Any) -> Any:
    of_row = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
    out, after = of_row(batch["x"], model_state)
    return ((out - batch["y"]) ** 2).mean(), after


@functools.cache
def _keras() -> Any:
    layers = keras.layers
    inner = [layers.Dense(WIDTH, use_bias=False), layers.BatchNormalization(momentum=0.5)]
    last = [layers.Activation("relu"), layers.Dropout(0.2, seed=3), layers.Dense(WIDTH)]
    return keras.Sequential([layers.Input((FEATURES,)), *inner, *last])


def _of_keras() -> Any:
    keras.utils.set_random_seed(0)
    values = lambda variables: [jnp.asarray(x.value) for x in variables]
    return values(_keras().trainable_variables), values(_keras().non_trainable_variables)


def keras_batch_norm(params: Any, model_state: Any, batch: Any) -> Any:
    out, after = _keras().stateless_call(params, model_state, batch["x"], training=True)
    return ((out - batch["y"]) ** 2).mean(), after


CASES = {
    "contrastive": Case(contrastive),
    "triplet": Case(triplet_hardest_in_batch),
    "roll": Case(negatives_by_a_roll),
    "sorted": Case(cox_partial_likelihood),
    "batch norm": Case(batch_norm),
    "tokens": Case(token_mean),
    "the worst quarter": Case(lambda p, b: lax.top_k(_squared(p, b), ROWS // 4)[0].mean()),
    "median": Case(lambda p, b: jnp.quantile(_squared(p, b), 0.5)),
    "root": Case(lambda p, b: jnp.sqrt(_squared(p, b).mean())),
    "whitened": Case(whitened),
    "sinkhorn": Case(sinkhorn),
    "experts": Case(experts_with_a_capacity),
    "graph": Case(graph_of_rows),
    "loop": Case(loop_over_rows),
    "mixup": Case(mixup, takes_rng=True),
    "linen": Case(linen_batch_norm, _of_linen, takes_rng=True),
    "haiku": Case(
        haiku_batch_norm,
        lambda: _haiku.init(jax.random.key(0), jnp.zeros((1, FEATURES))),
        takes_rng=True,
    ),
    "equinox": Case(equinox_batch_norm, lambda: eqx.nn.make_with_state(_Equinox)()),
    "keras": Case(keras_batch_norm, _of_keras),
}
