"""The stages of a step are named in its compiled program, as docs/guide/profiles.md lists them."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer, make_train_step

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "profiles.md"


def loss_fn(kernel: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ kernel - 1) ** 2)


def scopes(step, rows: int) -> set[str]:
    """The names of scopes of the compiled step, below those of JAX's own."""
    state = step.init(np.zeros((64, 512), np.float32))
    compiled = step.lower(state, np.ones((rows, 64), np.float32)).compile().as_text()
    found = re.findall(r'op_name="jit\(\w+\)/([^"]*)"', compiled)
    return {name for op_name in found for name in op_name.removeprefix("shard_map/").split("/")}


def test_each_stage_has_its_scope():
    every = set()
    for options in (
        {"nonfinite": "quarantine", "preprocess": optax.clip_by_global_norm(1.0)},
        {"loss_scale": "dynamic", "metrics": ("grad_norm",)},
    ):
        opt = CrossShardOptimizer(optax.adamw(1e-3), name="mine", **options)
        step = make_train_step(
            loss_fn, opt, num_shards=2, weight_update="sharded", check_divergence=9
        )
        every |= scopes(step, 8)
    listed = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    names = {name for cell in listed for name in re.findall(r"`(\w+)`", cell)}
    assert names - {"name", "accumulate"} <= every
    assert "mine" in every


def test_what_adds_up_calls_has_its_scope():
    opt = CrossShardOptimizer(optax.sgd(0.1), accumulate_steps=2)
    gradients = np.ones((2, 3), np.float32)
    state = jax.vmap(opt.init, axis_name="shards")(gradients)
    lowered = jax.jit(jax.vmap(opt.update, axis_name="shards")).lower(gradients, state)
    assert re.search(r"CrossShardOptimizer\W*/accumulate/", lowered.compile().as_text())


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_a_step_without_options_has_only_those_that_it_needs(weight_update: str):
    step = make_train_step(loss_fn, optax.adamw(1e-3), num_shards=2, weight_update=weight_update)
    own = {"loss", "reduce", "update"} | ({"gather"} if weight_update == "sharded" else set())
    others = {"nonfinite", "preprocess", "weigh", "loss_scale", "metrics", "check_divergence"}
    assert scopes(step, 2) & (own | others) == own
