"""The order of the stages is data: one tuple, sorted by phase, that everything else loops over."""

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
from crossshard import CrossShardOptimizer, CrossShardState
from crossshard.collectives.sums import to_average
from crossshard.errors import NestedReductionError
from crossshard.pipeline.pipeline import STAGES
from crossshard.pipeline.stage import Phase
from crossshard.pipeline.stages.local_sgd import LocalSGD
from crossshard.pipeline.update.arrays import Parts
from crossshard.pipeline.update.owners import Owners
from crossshard.pipeline.update.plan import Planner, WeightUpdate
from crossshard.shards.axes import Shards
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


@pytest.mark.parametrize("options", [{}, EVERY], ids=["none", "all"])
def test_they_stand_in_the_order_of_their_phases(options):
    phases = [stage.phase for stage in stages(options)]
    assert phases == sorted(phases)
    assert phases.count(Phase.REDUCTION) == 1


def test_each_has_its_own_field_of_the_state():
    fields = [stage.state_field for stage in stages(EVERY) if stage.state_field]
    # Workers that synchronise rarely are for whole steps.
    assert sorted([*fields, "outer", "others"]) == sorted(CrossShardState._fields)


def test_those_that_are_not_asked_for_are_not_there():
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


def test_an_update_is_traced_once_on_whole_arrays_and_once_on_slices():
    seen: list[tuple[int, ...]] = []

    def update(gradients: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        del params, extra_args
        seen.append(gradients.shape)
        return -gradients, state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    params = jax.ShapeDtypeStruct((64, 64), np.float32)
    plan, _ = Planner(optimizer, params, Shards(8), wanted=WeightUpdate.SHARDED).plan()
    assert isinstance(plan, Parts)
    assert seen == [(64, 64), (8, 64)]


def test_planning_traces_an_optimizer_that_is_dealt_out_once():
    """Neither on slices, as full arrays show that it mixes elements, nor anew leaf by leaf."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append({name: x.shape for name, x in updates.items()})
        return {name: x @ x.T @ x for name, x in updates.items()}, state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    params = {name: jax.ShapeDtypeStruct((64, 64), np.float32) for name in "abcdefgh"}
    mesh = jax.make_mesh((8,), ("shards",))
    planner = Planner(optimizer, params, Shards(8), mesh=mesh, wanted=WeightUpdate.SHARDED)
    assert isinstance(planner.plan()[0], Owners)
    assert seen == [dict.fromkeys(params, (64, 64))]
