"""Every rule of the table: a sharded weight update follows the replicated one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossshard
from tests.optimizers.table import ROWS
from tests.quick import deep_but

pytestmark = pytest.mark.filterwarnings("ignore:.*use `optimistic_adam_v2`:DeprecationWarning")

SHARDS = 8
STEPS = 10
BATCH = 16

_rng = np.random.default_rng(425)
_shift = np.linspace(-1.0, 1.0, BATCH)[:, None]
# So far from the start that no gradient passes zero, where a rule that normalises it, or takes its
# sign, would see what rounding left of it.
_far = np.where(_rng.normal(size=1025) > 0, 2.0, -2.0)
BATCHES = [
    {
        "x": np.float32(_rng.normal(size=(BATCH, 48)) / 8 * (1.5 + _shift) + _shift),
        "y": np.float32(_rng.normal(size=(BATCH, 2)) + 2 * _shift),
        "t": np.float32(_far + _rng.normal(size=(BATCH, 1025)) / 4 + _shift / 4),
    }
    for _ in range(STEPS)
]
READOUT = np.float32(_rng.normal(size=(33, 2)) / 16)
# One that is cut in rows, and one whose size nothing divides.
START = {
    "bias": np.float32(_rng.normal(size=1025) / 32),
    "kernel": np.float32(_rng.normal(size=(48, 33)) / 40),
}
LEFT_OUT = {
    "lookahead": "it wants parameters of a form of its own",
    "monitor": "its state changes its structure at the first step",
}
# Those of tests/harness.py are tried there.
QUICK = ["sgd", "MultiSteps"]
RULES = [name for name, row in ROWS.items() if not row.hessian and name not in LEFT_OUT]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    seen = batch["x"] @ params["kernel"] @ READOUT - batch["y"]
    return (seen**2).mean() + 0.05 * ((params["bias"] - batch["t"]) ** 2).sum(-1).mean()


def trained(name: str, weight_update: str) -> tuple[Any, Any, str]:
    """The parameters after all steps, the optimizer state, and what the step says of itself."""
    step = crossshard.make_train_step(
        loss_fn, ROWS[name].make(), num_shards=SHARDS, weight_update=weight_update
    )
    state = step.init(START)
    for batch in BATCHES:
        state, _ = step(state, batch)
    whole = step.unshard(state)
    return jax.device_get(whole.params), jax.device_get(whole.opt_state), step.describe()


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        scale = max(np.max(np.abs(other), initial=0), 1e-3)
        np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", deep_but(QUICK, RULES))
def test_sharded_follows_replicated(name: str):
    params, state, described = trained(name, "sharded")
    expected, expected_state, _ = trained(name, "replicated")
    moved = [np.abs(expected[key] - START[key]).max() for key in START]
    assert np.isfinite(moved).all()
    assert name == "freeze" or max(moved) > 1e-3
    # A rule that looks at norms magnifies what rounding does to them.
    tolerance = 1e-5 if "weight update sharded" in described else 1e-4
    assert_close(params, expected, tolerance)
    assert_close(state, expected_state, 10 * tolerance)


def test_the_rules_left_out_are_in_the_table():
    assert ROWS.keys() >= LEFT_OUT.keys()
    assert len(RULES) > 75
    assert set(QUICK) <= set(RULES)
