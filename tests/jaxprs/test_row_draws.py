"""Noise in a loss: every draw of rows needs a key that is the shard's own, or each row's."""

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.tpu  # its primitives
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from crossshard.jaxprs.primitives import KEYS
from crossshard.jaxprs.row_facts import SAME_NOISE, OverRows
from tests.jaxprs.proving import over_rows
from tests.quick import deep_but

ROWS, WIDTH = 6, 4
W = np.float32(np.random.default_rng(0).normal(size=WIDTH))
BATCH = {
    "x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    "keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS)),
}
# Of a key and positive parameters, one number for each of these.
DISTRIBUTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "ball": lambda k, a: jax.random.ball(k, 2, shape=a.shape).sum(-1),
    "bernoulli": lambda k, a: jax.random.bernoulli(k, a / (1 + a)),
    "beta": lambda k, a: jax.random.beta(k, a, a),
    "binomial": lambda k, a: jax.random.binomial(k, 3, a / (1 + a)),
    "bits": lambda k, a: jax.random.bits(k, a.shape) % 7,
    "categorical": lambda k, a: jax.random.categorical(k, jnp.stack([a, -a], -1)),
    "cauchy": lambda k, a: jax.random.cauchy(k, a.shape),
    "chisquare": lambda k, a: jax.random.chisquare(k, a),
    "choice": lambda k, a: jax.random.choice(k, 5, a.shape),
    "dirichlet": lambda k, a: jax.random.dirichlet(k, jnp.stack([a, a], -1))[..., 0],
    "double_sided_maxwell": lambda k, a: jax.random.double_sided_maxwell(k, 0.0, 1.0, a.shape),
    "exponential": lambda k, a: jax.random.exponential(k, a.shape),
    "f": lambda k, a: jax.random.f(k, a, a),
    "gamma": lambda k, a: jax.random.gamma(k, a),
    "generalized_normal": lambda k, a: jax.random.generalized_normal(k, 2.0, a.shape),
    "geometric": lambda k, a: jax.random.geometric(k, a / (1 + a)),
    "gumbel": lambda k, a: jax.random.gumbel(k, a.shape),
    "laplace": lambda k, a: jax.random.laplace(k, a.shape),
    "loggamma": lambda k, a: jax.random.loggamma(k, a),
    "logistic": lambda k, a: jax.random.logistic(k, a.shape),
    "lognormal": lambda k, a: jax.random.lognormal(k, a),
    "maxwell": lambda k, a: jax.random.maxwell(k, a.shape),
    "multinomial": lambda k, a: jax.random.multinomial(k, 3, jnp.stack([a, a], -1))[..., 0],
    "multivariate_normal": lambda k, a: jax.random.multivariate_normal(
        k, jnp.zeros(2), jnp.eye(2), a.shape
    )[..., 0],
    "normal": lambda k, a: jax.random.normal(k, a.shape),
    "orthogonal": lambda k, a: jax.random.orthogonal(k, 2, a.shape)[..., 0, 0],
    "pareto": lambda k, a: jax.random.pareto(k, a),
    "poisson": lambda k, a: jax.random.poisson(k, a),
    "rademacher": lambda k, a: jax.random.rademacher(k, a.shape),
    "randint": lambda k, a: jax.random.randint(k, a.shape, 0, 9),
    "rayleigh": lambda k, a: jax.random.rayleigh(k, a),
    "t": lambda k, a: jax.random.t(k, a),
    "triangular": lambda k, a: jax.random.triangular(k, 0.0, a, 2 * a),
    "truncated_normal": lambda k, a: jax.random.truncated_normal(k, -1.0, 1.0, a.shape),
    "uniform": lambda k, a: jax.random.uniform(k, a.shape),
    "wald": lambda k, a: jax.random.wald(k, a),
    "weibull_min": lambda k, a: jax.random.weibull_min(k, a, 2.0, a.shape),
}


def found(loss: Callable[..., Any], own: Any = ()) -> Any:
    return over_rows(loss, BATCH, W, own=own, times=3)


def noisy(name: str, key: Any, parameters: Callable[[Any], Any]) -> Callable[..., Any]:
    """A mean over rows with noise of one key."""

    def loss(b: Any, w: Any, own: Any) -> Any:
        noise = DISTRIBUTIONS[name](key(own), parameters(b["x"]))
        return ((b["x"] @ w) * noise.reshape(len(b["x"]), -1).sum(1)).mean()

    return loss


# One of each kind of draw: of bits, by a loop, of its own primitive, of a shape beside the rows'.
QUICK = {
    "normal",
    "randint",
    "binomial",
    "poisson",
    "gamma",
    "beta",
    "categorical",
    "choice",
    "ball",
}
of_distributions = pytest.mark.parametrize("name", deep_but(QUICK, DISTRIBUTIONS))
OF_ROWS = {
    "constant": lambda x: jnp.full(len(x), 2.0),
    "of rows": lambda x: 1 + jnp.abs(x).sum(1),
}


@pytest.mark.parametrize("parameters", OF_ROWS)
@of_distributions
def test_noise_of_a_key_that_all_shards_share_is_refused(name: str, parameters: str):
    shared = lambda own: jax.random.key(7)
    finding = found(noisy(name, shared, OF_ROWS[parameters]))
    assert (finding.kind, finding.reason) == (OverRows.COMPARED, SAME_NOISE)


# Their loops end when all rows have their number, which nothing proves to change none.
LOOPS = {"binomial", "multinomial", "poisson"}


@of_distributions
def test_noise_of_a_shards_own_key_is_a_rows_own(name: str):
    finding = found(noisy(name, lambda own: own, OF_ROWS["of rows"]), jax.random.key(0))
    assert finding.kind is (OverRows.UNDECIDED if name in LOOPS else OverRows.MEAN), finding


@of_distributions
def test_noise_of_a_rows_own_key_is_its_own(name: str):
    def loss(b: Any, w: Any, own: Any) -> Any:
        one = lambda key, x: DISTRIBUTIONS[name](key, 1 + jnp.abs(x)).sum() * (x @ w)
        return jax.vmap(one)(b["keys"], b["x"]).mean()

    assert found(loss).kind is (OverRows.UNDECIDED if name in LOOPS else OverRows.MEAN)


def test_keys_of_a_shared_key_and_the_number_of_a_row_are_shared():
    def loss(b: Any, w: Any, own: Any) -> Any:
        numbers = jnp.arange(len(b["x"]))
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(1), i))(numbers)
        return (jax.vmap(lambda k, x: jax.random.normal(k) * x)(keys, b["x"]) @ w).mean()

    assert found(loss).reason == SAME_NOISE


def test_noise_that_all_rows_share_with_all_shards_is_none():
    loss = lambda b, w, own: (b["x"] @ (w * jax.random.gamma(jax.random.key(1), w**2))).mean()
    assert found(loss).kind is OverRows.MEAN


def test_every_random_primitive_of_jax_is_in_the_table():
    # What was imported is frozen by conftest.py.
    gc.unfreeze()
    made = {x.name for x in gc.get_objects() if isinstance(x, jax.extend.core.Primitive)}
    gc.freeze()
    random = {x for x in made if any(word in x for word in ("random", "rng", "threefry"))}
    assert {"random_bits", "random_gamma", "rng_uniform"} <= random
    assert random <= KEYS.keys(), random - KEYS.keys()
    public = {name for name, _ in vars(jax.random).items() if not name.startswith("_")}
    aside = "Key PRNGKey clone fold_in key key_data key_dtype key_impl permutation random_gamma_p"
    assert public <= DISTRIBUTIONS.keys() | {*aside.split(), "split", "wrap_key_data"}, (
        public - DISTRIBUTIONS.keys()
    )


# Numbers without noise would find the rows in their own order.
ORDERS: dict[str, Callable[[Any, int], Any]] = {
    "permutation": jax.random.permutation,
    "argsort": lambda key, rows: jnp.argsort(jax.random.uniform(key, (rows,))),
    "of normal numbers": lambda key, rows: jnp.argsort(
        -2 * jax.random.normal(key, (rows, 1))[:, 0]
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_rows_in_a_random_order_meet_each_other(name: str):
    def loss(b: Any, w: Any, own: Any) -> Any:
        others = b["x"][ORDERS[name](own, len(b["x"]))]
        return (((b["x"] + others) @ w) ** 2).mean()

    assert found(loss, jax.random.key(0)).kind is OverRows.COMPARED


def test_each_rows_own_order_at_random_is_its_own():
    def loss(b: Any, w: Any, own: Any) -> Any:  # as a masked autoencoder chooses patches
        order = jnp.argsort(jax.random.uniform(own, b["x"].shape), 1)
        return (jnp.take_along_axis(b["x"], order, 1) @ w).mean()

    assert found(loss, jax.random.key(0)).kind is OverRows.MEAN
