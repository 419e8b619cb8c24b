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


def params() -> Any:
    """The parameters of most losses."""
    return {
        "first": array(1, FEATURES, WIDTH) / 5,
        "scale": jnp.ones(WIDTH),
        "second": array(2, WIDTH, WIDTH) / 5,
    }


def batches() -> list[Any]:
    """Three batches."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    seen = np.linspace(0.1, 1, ROWS)[:, None]
    return [
        {
            "x": normal(ROWS, FEATURES),
            "y": normal(ROWS, WIDTH),
            "mask": (rng.random((ROWS, WIDTH)) < seen).astype(np.float32),
            "kind": rng.permutation(np.arange(ROWS) % 4),
            "neighbour": rng.integers(ROWS, size=(ROWS, 3)),
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
    make: Callable[[], tuple[Any, Any]]
    takes_rng: bool

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

        @jax.jit
        def run(trained: Any, model_state: Any, opt_state: Any, *given: Any) -> Any:
            (value, model_state), gradients = jax.value_and_grad(loss_of, has_aux=True)(
                trained, model_state, *given
            )
            updates, opt_state = optimizer.update(gradients, opt_state, trained)
            return value, optax.apply_updates(trained, updates), model_state, opt_state

        for count, batch in enumerate(batches()):
            fold = jax.random.fold_in
            keys = (fold(fold(jax.random.key(SEED), count), 0),) if self.takes_rng else ()
            value, trained, model_state, opt_state = run(
                trained, model_state, opt_state, batch, *keys
            )
            losses.append(value)
        model = eqx.filter(eqx.combine(trained, rest), eqx.is_array)
        return (model if model_state is None else (model, model_state)), losses


CASES: dict[str, Case] = {}


def comparing(
    make: Callable[[], tuple[Any, Any]] = lambda: (params(), None), *, rng: bool = False
) -> Callable[[Any], Any]:
    """Enters a loss in the table."""

    def enter(loss: Any) -> Any:
        CASES[loss.__name__] = Case(loss, make, rng)
        return loss

    return enter


def _unit(x: Any) -> Any:
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def _hidden(params: Any, batch: Any) -> Any:
    return jnp.tanh(batch["x"] @ params["first"] * params["scale"])


def _out(params: Any, batch: Any) -> Any:
    return _hidden(params, batch) @ params["second"]


def _squared(params: Any, batch: Any) -> Any:
    return ((_out(params, batch) - batch["y"]) ** 2).mean(1)


def _standardized(x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)


def _distances(x: Any, y: Any) -> Any:
    return ((x[:, None] - y[None]) ** 2).mean(-1)


# Contrastive losses.


def _pairs(params: Any, batch: Any) -> Any:
    """The similarity of each row's x with each row's y."""
    images = _unit(batch["x"] @ params["first"] * params["scale"])
    return images @ _unit(batch["y"] @ params["second"]).T


@comparing()
def contrastive(params: Any, batch: Any) -> Any:
    logits = _pairs(params, batch) / 0.2
    both = jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)
    return -jnp.diag(both).mean() / 2


@comparing()
def siglip(params: Any, batch: Any) -> Any:
    labels = 2 * jnp.eye(len(batch["x"])) - 1
    return -jax.nn.log_sigmoid(labels * (5 * _pairs(params, batch) - 3)).sum(1).mean()


@comparing()
def triplet_hardest_in_batch(params: Any, batch: Any) -> Any:
    found = _out(params, batch)
    distances, same = _distances(found, found), batch["kind"][:, None] == batch["kind"]
    positive = jnp.where(same, distances, -jnp.inf).max(1)
    negative = jnp.where(same, jnp.inf, distances).min(1)
    return jax.nn.relu(positive - negative + 0.5).mean()


@comparing()
def negatives_by_a_roll(params: Any, batch: Any) -> Any:
    pairs = lambda y: (_out(params, batch) * y).mean(1)
    return jax.nn.softplus(pairs(jnp.roll(batch["y"], 1, 0)) - pairs(batch["y"])).mean()


@comparing()
def pairwise_ranking(params: Any, batch: Any) -> Any:
    score, order = _out(params, batch).mean(1), batch["y"][:, 0]
    worse = order[:, None] > order
    return jnp.where(worse, jax.nn.softplus(score - score[:, None]), 0).sum() / worse.sum()


@comparing()
def cox_partial_likelihood(params: Any, batch: Any) -> Any:
    risk = _out(params, batch).mean(1)[jnp.argsort(-batch["y"][:, 0])]
    return (jnp.log(jnp.cumsum(jnp.exp(risk))) - risk).mean()


# Statistics over the rows.


@comparing()
def batch_norm(params: Any, batch: Any) -> Any:
    hidden = jax.nn.relu(_standardized(batch["x"] @ params["first"]) * params["scale"])
    return ((hidden @ params["second"] - batch["y"]) ** 2).mean()


@comparing()
def advantages(params: Any, batch: Any) -> Any:
    logits = batch["x"] @ params["first"] * params["scale"] @ params["second"]
    reward = batch["y"].sum(1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    return -(jax.nn.log_softmax(logits)[:, 0] * advantage).mean()


@comparing()
def ppo_with_advantages_of_its_own_values(params: Any, batch: Any) -> Any:
    out = _out(params, batch)
    value, logits = out[:, 0], jax.nn.log_softmax(out[:, 1:])
    advantage = _standardized(lax.stop_gradient(batch["y"][:, 0] - value))
    ratio = jnp.exp(jnp.take_along_axis(logits, batch["kind"][:, None], 1)[:, 0] + 3)
    clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return ((batch["y"][:, 0] - value) ** 2 - clipped).mean()


@comparing()
def token_mean(params: Any, batch: Any) -> Any:
    errors = (_out(params, batch) - batch["y"]) ** 2
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


@comparing()
def root_of_the_mean_square(params: Any, batch: Any) -> Any:
    return jnp.sqrt(_squared(params, batch).mean())


@comparing()
def vicreg(params: Any, batch: Any) -> Any:
    found = _out(params, batch)
    centred = found - found.mean(0)
    covariance = centred.T @ centred / (len(found) - 1)
    apart = (covariance**2).sum() - (jnp.diag(covariance) ** 2).sum()
    spread = jax.nn.relu(1 - jnp.sqrt(found.var(0) + 1e-3)).mean()
    return _squared(params, batch).mean() + spread + apart / WIDTH**2


@comparing()
def barlow_twins(params: Any, batch: Any) -> Any:
    one, other = _standardized(_out(params, batch)), _standardized(batch["y"] @ params["second"])
    correlation = one.T @ other / len(one)
    return ((correlation - jnp.eye(WIDTH)) ** 2).mean()


@comparing()
def whitened(params: Any, batch: Any) -> Any:
    found = _out(params, batch)[:, :8]
    centred = found - found.mean(0)
    covariance = centred.T @ centred / len(found) + jnp.eye(8)
    white = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(covariance), centred.T).T
    return ((white - batch["y"][:, :8]) ** 2).mean()


@comparing()
def pearson_correlation(params: Any, batch: Any) -> Any:
    score, wanted = _out(params, batch).mean(1), batch["y"].mean(1)
    score, wanted = score - score.mean(), wanted - wanted.mean()
    return 1 - (score * wanted).sum() / jnp.sqrt((score**2).sum() * (wanted**2).sum())


@comparing()
def mean_of_the_worst_quarter(params: Any, batch: Any) -> Any:
    return lax.top_k(_squared(params, batch), len(batch["x"]) // 4)[0].mean()


@comparing()
def median(params: Any, batch: Any) -> Any:
    return jnp.quantile(_squared(params, batch), 0.5)


@comparing()
def gan_with_minibatch_statistics(params: Any, batch: Any) -> Any:
    def critic(x: Any) -> Any:
        hidden = jnp.tanh(x @ params["second"])
        spread = jnp.sqrt(hidden.var(0) + 1e-3).mean()
        return hidden.mean(1) + 0.5 * spread

    fake, real = critic(_out(params, batch)), critic(batch["y"])
    return jax.nn.softplus(fake).mean() + jax.nn.softplus(-real).mean()


@comparing()
def relativistic_gan(params: Any, batch: Any) -> Any:
    fake, real = _out(params, batch).mean(1), (batch["y"] @ params["second"]).mean(1)
    fooled = jax.nn.softplus(fake - real.mean()) + jax.nn.softplus(fake.mean() - real)
    return fooled.mean()


# Distances between sets of rows.


@comparing()
def maximum_mean_discrepancy(params: Any, batch: Any) -> Any:
    kernel = lambda x, y: jnp.exp(-_distances(x, y) / 2).mean()
    found, wanted = _out(params, batch), batch["y"]
    return kernel(found, found) - 2 * kernel(found, wanted) + kernel(wanted, wanted)


@comparing()
def sinkhorn(params: Any, batch: Any) -> Any:
    cost = _distances(_out(params, batch), batch["y"])
    uniform = -jnp.log(float(len(cost)))

    def turn(dual: Any, _: Any) -> Any:
        other = uniform - jax.nn.logsumexp(dual[:, None] - cost / 0.5, axis=0)
        return uniform - jax.nn.logsumexp(other - cost / 0.5, axis=1), other

    dual, others = lax.scan(turn, jnp.zeros(len(cost)), None, 5)
    plan = jnp.exp(dual[:, None] + others[-1] - cost / 0.5)
    return (plan * cost).sum()


# Rows that read other rows.


@comparing()
def load_balance(params: Any, batch: Any) -> Any:
    routed = jax.nn.softmax(batch["x"] @ params["first"] * params["scale"])
    chosen = jax.nn.one_hot(routed.argmax(1), WIDTH).mean(0)
    loss = ((routed @ params["second"] - batch["y"]) ** 2).mean()
    return loss + 0.1 * WIDTH * (chosen * routed.mean(0)).sum()


@comparing()
def experts_with_a_capacity(params: Any, batch: Any) -> Any:
    """Each row goes to two experts, as long as these have room; the surest rows come first."""
    routed = jax.nn.softmax(batch["x"] @ params["first"][:, :EXPERTS])
    gates, chosen = lax.top_k(routed, 2)
    gates, chosen = gates.reshape(-1), chosen.reshape(-1)
    order = jnp.argsort(-gates)
    mine = jax.nn.one_hot(chosen[order], EXPERTS, dtype=jnp.int32)
    place = ((mine.cumsum(0) - 1) * mine).sum(1)
    rows = order // 2
    slots = (
        jnp.zeros((EXPERTS, CAPACITY, WIDTH))
        .at[chosen[order], place]
        .set(_hidden(params, batch)[rows], mode="drop")
    )
    of_expert = params["second"].reshape(EXPERTS, -1, WIDTH)
    answers = jnp.einsum("ecw,ekw,ekv->ecv", slots, of_expert, of_expert)
    taken = answers.at[chosen[order], place].get(mode="fill", fill_value=0)
    out = jnp.zeros((len(batch["x"]), WIDTH)).at[rows].add(taken * gates[order][:, None])
    balance = EXPERTS * (mine.mean(0) * routed.mean(0)).sum()
    return ((out - batch["y"]) ** 2).mean() + 0.1 * balance


@comparing()
def attention_over_rows(params: Any, batch: Any) -> Any:
    hidden = _hidden(params, batch)
    mixed = jax.nn.softmax(hidden @ params["second"] @ hidden.T) @ hidden
    return ((mixed - batch["y"]) ** 2).mean()


@comparing()
def graph_of_rows(params: Any, batch: Any) -> Any:
    hidden = _hidden(params, batch)
    receivers = batch["neighbour"].reshape(-1)
    sent = jnp.repeat(hidden, 3, axis=0)
    got = jax.ops.segment_sum(sent, receivers, len(hidden))
    return (((hidden + got) @ params["second"] - batch["y"]) ** 2).mean()


@comparing()
def loop_over_rows(params: Any, batch: Any) -> Any:
    def one(before: Any, row: Any) -> Any:
        after = jnp.tanh(row @ params["first"] * params["scale"] + before @ params["second"])
        return after, after

    _, found = lax.scan(one, jnp.zeros(WIDTH), batch["x"])
    return ((found - batch["y"]) ** 2).mean()


# Noise: one key for the step.


@comparing(rng=True)
def noise_and_dropout(params: Any, batch: Any, rng: Any) -> Any:
    one, other = jax.random.split(rng)
    hidden = batch["x"] @ params["first"] * params["scale"]
    hidden = hidden * jax.random.bernoulli(one, 0.8, hidden.shape) / 0.8
    found = hidden @ params["second"] + jax.random.normal(other, batch["y"].shape)
    return ((found - batch["y"]) ** 2).mean()


@comparing(rng=True)
def a_key_for_each_row(params: Any, batch: Any, rng: Any) -> Any:
    keys = jax.random.split(rng, len(batch["x"]))
    noise = jax.vmap(lambda key: jax.random.normal(key, (FEATURES,)))(keys)
    return _squared(params, {**batch, "x": batch["x"] + noise}).mean()


@comparing(rng=True)
def mixup(params: Any, batch: Any, rng: Any) -> Any:
    of_order, of_share = jax.random.split(rng)
    order = jax.random.permutation(of_order, len(batch["x"]))
    share = jax.random.beta(of_share, 0.4, 0.4)
    mixed = {name: share * x + (1 - share) * x[order] for name, x in batch.items() if name in "xy"}
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


@comparing(_of_linen, rng=True)
def linen_batch_norm(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    variables = {"params": params, "batch_stats": model_state["batch_stats"]}
    out, after = _Linen().apply(
        variables, batch["x"], mutable=["batch_stats"], rngs={"dropout": rng}
    )
    # An integer that depends on the batch.
    seen = model_state["seen"] + (batch["x"][:, 0] > 0).sum(dtype=jnp.int32)
    return ((out - batch["y"]) ** 2).mean(), {"batch_stats": after["batch_stats"], "seen": seen}


@hk.transform_with_state
def _haiku(x: Any) -> Any:
    hidden = hk.Linear(WIDTH, with_bias=False)(x)
    hidden = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.5)(hidden, True)
    hidden = hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(hidden))
    return hk.Linear(WIDTH)(hidden)


@comparing(lambda: _haiku.init(jax.random.key(0), jnp.zeros((1, FEATURES))), rng=True)
def haiku_batch_norm(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    out, after = _haiku.apply(params, model_state, rng, batch["x"])
    return ((out - batch["y"]) ** 2).mean(), after


class _Equinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Linear

    def __init__(self) -> None:
        one, other = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(FEATURES, WIDTH, use_bias=False, key=one)
        self.norm = eqx.nn.BatchNorm(WIDTH, "rows", momentum=0.5, mode="batch")
        self.second = eqx.nn.Linear(WIDTH, WIDTH, key=other)

    def __call__(self, x: Any, state: Any) -> Any:
        hidden, state = self.norm(self.first(x), state)
        return self.second(jax.nn.relu(hidden)), state


@comparing(lambda: eqx.nn.make_with_state(_Equinox)())
def equinox_batch_norm(model: Any, model_state: Any, batch: Any) -> Any:
    of_row = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
    out, after = of_row(batch["x"], model_state)
    return ((out - batch["y"]) ** 2).mean(), after


@functools.cache
def _keras() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((FEATURES,)),
            layers.Dense(WIDTH, use_bias=False),
            layers.BatchNormalization(momentum=0.5),
            layers.Activation("relu"),
            layers.Dropout(0.2, seed=3),
            layers.Dense(WIDTH),
        ]
    )


def _of_keras() -> Any:
    keras.utils.set_random_seed(0)
    values = lambda variables: [jnp.asarray(x.value) for x in variables]
    return values(_keras().trainable_variables), values(_keras().non_trainable_variables)


@comparing(_of_keras)
def keras_batch_norm_and_dropout(params: Any, model_state: Any, batch: Any) -> Any:
    out, after = _keras().stateless_call(params, model_state, batch["x"], training=True)
    return ((out - batch["y"]) ** 2).mean(), after
