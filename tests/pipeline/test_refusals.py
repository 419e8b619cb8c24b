"""What the options of the pipeline refuse, in an optimizer and in a whole step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer, DynamicLossScale, Nonfinite, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, IncomingError

SCALE, WIRE, MASTERS = "DynamicLossScale", "reduce_dtype must be bf", "master_dtype must be float32"
ACTIONS = r"'quarantine', 'skip'(,| or) 'raise'"
NO_VALUES: list[tuple[str, list[Any], type[Exception], str]] = [
    ("accumulate_steps", [0, -1], ArgumentError, "accumulate_steps"),
    ("accumulate_steps", [2.0, True], ArgumentTypeError, "accumulate_steps"),
    ("loss_scale", [1024, 2.0**15, "static", True, DynamicLossScale], ArgumentTypeError, SCALE),
    ("reduce_dtype", ["float16", "int16", "bfloat", 16, "float64"], ArgumentError, WIRE),
    ("reduce_dtype", ["float8_e5m2", {}, {3: "int8"}], ArgumentError, "reduce_dtype"),
    ("master_dtype", ["bfloat16", "float16", "int32", "wide", 32, 1.5], ArgumentError, MASTERS),
    ("ema", [0.0, 1.0, -0.5, float("nan"), 0], ArgumentError, "ema"),
    ("ema", ["0.9", True, lambda: 0.9, lambda n: n, lambda n: (0.9, n)], ArgumentTypeError, "ema"),
    ("metrics", [("gradnorm",)], ArgumentError, r"'gradnorm'.*grad_norm"),
    ("metrics", [3, (jnp.linalg.norm,)], ArgumentTypeError, "must be names"),
    ("nonfinite", ["off"], ArgumentError, ACTIONS),
    ("nonfinite", [True, Nonfinite], ArgumentTypeError, ACTIONS),
    ("preprocess", [3, "clip", optax.sgd, object()], ArgumentTypeError, "preprocess"),
]


@pytest.mark.parametrize(
    ("option", "value", "error", "match"),
    [(name, value, *said) for name, values, *said in NO_VALUES for value in values],
)
def test_what_is_no_value_of_an_option(option: str, value: Any, error: Any, match: str):
    with pytest.raises(error, match=match):
        CrossShardOptimizer(optax.sgd(0.1), **{option: value})
    if option != "preprocess":
        with pytest.raises(error, match=match):
            make_train_step(lambda w, x: w * x, optax.sgd(0.1), num_shards=4, **{option: value})


def updated(opt: CrossShardOptimizer, **kwargs: Any) -> Any:
    step = lambda g: opt.update(g, opt.init(g), **kwargs)[0]
    return jax.vmap(step, axis_name="shards")(jnp.ones((4, 3)))


@pytest.mark.parametrize("incoming", ["summed", "reduced"])
@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"accumulate_steps": 2}, "accumulate_steps adds up each shard's local gradient"),
        ({"metrics": "local_grad_norm"}, "metrics measure each shard's local gradient"),
        ({"preprocess": optax.clip(1.0)}, "preprocess applies to each shard's local gradient"),
        ({"nonfinite": "skip"}, "nonfinite checks each shard's local gradient"),
    ],
)
def test_what_needs_local_gradients_refuses_others(option: Any, match: str, incoming: str):
    with pytest.raises(IncomingError, match=match):
        updated(CrossShardOptimizer(optax.sgd(0.1), **option), incoming=incoming)


ONCE: dict[str, Any] = {
    "ema": 0.8,
    "master_dtype": "float32",
    "metrics": "param_norm",
    "reduce_dtype": "bfloat16",
    "loss_scale": "dynamic",
}


@pytest.mark.parametrize("option", ONCE)
def test_an_option_that_is_given_twice_and_parameters_that_are_not_passed(option: str):
    opt = CrossShardOptimizer(optax.sgd(0.1), **{option: ONCE[option]})
    with pytest.raises(ArgumentError, match=f"were given {option}"):
        make_train_step(lambda w, x: w * x, opt, num_shards=4, **{option: ONCE[option]})
    if option in ("ema", "master_dtype", "metrics"):
        with pytest.raises(ArgumentError, match=r"opt.update\(grads, state, params\)"):
            updated(opt)


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (np.ones(2, np.float32), ArgumentError),
        ("n", ArgumentTypeError),
        (object(), ArgumentTypeError),
    ],
)
def test_a_weight_is_one_number(bad: Any, kind: Any):
    with pytest.raises(kind, match="weight is one number"):
        updated(CrossShardOptimizer(optax.sgd(0.1)), weight=bad)


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (
            optax.scale_by_distance_over_gradients(),
            "changes params['s'] from float32[] to float32[1] in a step, but",
        ),
        (
            optax.chain(optax.sgd(0.1), optax.monitor({"now": optax.tree.norm})),
            "changes state[1].measurements['now'] from nothing to float32[] in a step, but a step "
            "is compiled for one of them. If it measures, as optax.monitor does, write metrics=, "
            "or measure outside.",
        ),
    ],
    ids=["shape", "structure"],
)
def test_an_update_that_changes_a_type_is_refused_before_the_first_step(
    inner: Any, said: str, weight_update: str
):
    params = {"a": jnp.ones((64, 32)), "s": jnp.ones(())}
    # Optax changes it, too.
    state = inner.init(params)
    updates, after = inner.update(params, state, params)
    types = lambda *trees: [(x.shape, x.dtype) for x in jax.tree.leaves(trees)]
    assert types(params, state) != types(optax.apply_updates(params, updates), after)
    loss = lambda p, x: ((x @ p["a"]) * p["s"]).mean()
    step = make_train_step(loss, inner, num_shards=4, weight_update=weight_update)
    with pytest.raises(ArgumentError) as caught:
        step.init(params)
    assert said in str(caught.value)
