"""The order of the stages is data, a tuple that all else loops over; each says what it is."""

import re
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, CrossShardState, make_train_step
from crossshard.collectives.sums import to_average
from crossshard.errors import NestedReductionError
from crossshard.pipeline.pipeline import STAGES, Options
from crossshard.pipeline.stage import Phase, Stage
from crossshard.pipeline.stages.local_sgd import LocalSGD
from crossshard.pipeline.stages.preprocess import Preprocess
from crossshard.step import StepOptions

EVERY = {
    "preprocess": optax.trace(0.9),
    "accumulate_steps": 2,
    "metrics": ("grad_norm", "local_grad_norm"),
    "nonfinite": "skip",
    "loss_scale": "dynamic",
    "master_dtype": "float32",
    "ema": 0.9,
}


def stages(options):
    return CrossShardOptimizer(optax.sgd(0.1), **options)._pipeline.stages


def test_they_stand_in_the_order_of_their_phases_each_with_its_own_state():
    for options in ({}, EVERY):
        phases = [stage.phase for stage in stages(options)]
        assert phases == sorted(phases)
        assert phases.count(Phase.REDUCTION) == 1
    fields = [stage.state_field for stage in stages(EVERY) if stage.state_field]
    # Workers that synchronise rarely are for whole steps.
    assert sorted([*fields, "outer", "others"]) == sorted(CrossShardState._fields)
    # Those that are not asked for are not there.
    without = {type(stage).__name__ for stage in stages({})}
    assert without == {"Weigh", "Aggregate", "Optimize"}


def test_few_files_know_of_workers_that_synchronise_rarely():
    words = re.compile("|".join([*LocalSGD.options, "LocalSGD"]))
    package = Path(crossshard.__file__).parent
    naming = {file.name for file in package.rglob("*.py") if words.search(file.read_text())}
    # Its line, its options for type checkers, what it rules out, and what it makes of a state.
    assert len(naming - {"local_sgd.py"}) <= 4, naming


def test_each_option_is_declared_by_one_stage():
    options = [name for stage in STAGES for name in stage.options]
    assert len(options) == len(set(options))
    assert {*options} - {"preprocess"} <= {*typing.get_type_hints(StepOptions)}


@pytest.mark.parametrize("kind", [kind for kind in STAGES if kind is not Preprocess])
def test_a_stage_says_itself_what_it_is(kind: type[Stage]):
    # What a class leaves out would be that of ``preprocess``, the state in a checkpoint too.
    said = {"scope", "state_field", "options"}
    said |= {"needs_local"} if Phase.CALL < kind.phase < Phase.REDUCTION else set()
    assert said <= vars(kind).keys()
    fields = [other.state_field for other in STAGES if other.state_field]
    assert fields.count(kind.state_field) <= 1


@pytest.mark.parametrize(
    ("function", "options"), [(make_train_step, StepOptions), (CrossShardOptimizer, Options)]
)
def test_a_docstring_lists_all_options(function: Any, options: Any):
    listed = function.__doc__.partition("**options: ")[2].partition("\n\n")[0]
    unlisted = {x for x in typing.get_type_hints(options) if f"``{x}``" not in listed}
    assert unlisted == set(), f"{function.__name__} lists its options after **options:"


def test_what_stages_say_of_shapes_is_checked():
    with pytest.raises(TypeError, match="parameter 'weight'"):
        to_average(jnp.ones(3), jnp.ones(3))
    with pytest.raises(TypeError, match="parameter 'weight'"):
        to_average(jnp.ones(3), jnp.int32(1))


def test_an_optimizer_that_is_only_updated_inside_another_one_is_refused():
    inner, gradient = CrossShardOptimizer(optax.sgd(1.0)), jnp.ones((8, 3))
    state = inner.init(gradient[0])
    hidden = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, none, params=None: (inner.update(updates, state)[0], none),
    )
    outer = CrossShardOptimizer(hidden)
    with pytest.raises(NestedReductionError, match="twice"):
        jax.vmap(lambda g: outer.update(g, outer.init(g))[0], axis_name="shards")(gradient)


# Their names in the compiled program, as docs/guide/profiles.md lists them.

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "profiles.md"


def loss_fn(kernel: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ kernel - 1) ** 2)


def scopes(step: Any, rows: int) -> set[str]:
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
        how: Any = {"weight_update": "sharded", "check_divergence": 9}
        every |= scopes(make_train_step(loss_fn, opt, num_shards=2, **how), 8)
    workers: Any = {"sync_every": 2, "outer_optimizer": optax.sgd(0.7)}
    every |= scopes(make_train_step(loss_fn, optax.sgd(0.1), num_shards=2, **workers), 8)
    listed = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    names = {name for cell in listed for name in re.findall(r"`(\w+)`", cell)}
    unlisted = {kind.scope for kind in STAGES if kind.scope} - names
    assert unlisted == set(), f"{PAGE.name} has a row for each scope"
    assert names - {"name", "accumulate"} <= every
    assert "mine" in every
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
