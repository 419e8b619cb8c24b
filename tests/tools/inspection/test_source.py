"""Which line a collective is said to come from: the first that is the user's."""

import inspect as python
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import crossshard
from crossshard.tools.inspection.collectives import collectives
from crossshard.tools.inspection.hlo import parse, source_of, users_line
from tests.tools.inspection.test_hlo import ASYNCHRONOUS
from tests.tools.steps import SPLIT, WHOLE, over

PARAMS = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 8)), "c": jnp.ones((8, 8))}
X = jnp.ones((64, 16))
OURS = crossshard.__file__.removesuffix("__init__.py")
FLAX = "/home/me/env/lib/python3.12/site-packages/flax/nnx/nn/normalization.py:7"


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"] @ params["c"]) ** 2)


def lowered(step: Any, *args: Any) -> Any:
    return over(step, (*(WHOLE for _ in args[1:]), SPLIT), WHOLE).lower(*args)


def line_of(function: Any, marker: str) -> str:
    lines, start = python.getsourcelines(function)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if marker in line)}"


def sources(program: Any) -> set[str | None]:
    return {each.source for each in crossshard.inspect(program).collectives}


@pytest.mark.parametrize(
    ("lines", "users"),
    [
        (["/home/me/train.py:3"], "/home/me/train.py:3"),
        ([FLAX, "/home/me/model.py:5", "/home/me/train.py:3"], "/home/me/model.py:5"),
        ([f"{OURS}optimizer/pipeline.py:1", "/home/me/train.py:3"], "/home/me/train.py:3"),
        (["/env/lib/python3.12/site-packages/crossshard/x.py:1", "train.py:3"], "train.py:3"),
        (["/usr/lib/python3.12/contextlib.py:81", "train.py:3"], "train.py:3"),
        # What is installed and is not one of these libraries may well be the user's.
        (["/env/lib/python3.12/site-packages/ours/model.py:1", "train.py:3"],
         "/env/lib/python3.12/site-packages/ours/model.py:1"),
        ([FLAX], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_first_line_of_the_users(lines: list[str], users: str | None):
    assert users_line(lines) == users


def test_where_no_line_is_the_users_it_is_another_librarys_and_never_ours():
    assert source_of([f"{OURS}optimizer/pipeline.py:1", FLAX]) == FLAX
    assert source_of([f"{OURS}optimizer/pipeline.py:1"]) is None
    # What calls our command is not the user's training.
    command = [f"{OURS}train_step.py:1", f"{OURS}tools/cli.py:1", "bin/it:3"]
    assert source_of(command) is None


def test_our_optimizer_in_a_step_of_the_users():
    opt = crossshard.CrossShardOptimizer(optax.chain(optax.clip(1.0), optax.adam(1e-3)))

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = opt.update(crossshard.grad(loss)(params, x), state, params)  # theirs
        return optax.apply_updates(params, updates), state

    program = lowered(step, PARAMS, opt.init(PARAMS), X)
    assert sources(program) == {line_of(step, "# theirs")}
    assert OURS not in str(crossshard.inspect(program))


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_a_whole_step_of_ours(weight_update: Any):
    step = crossshard.make_train_step(
        loss, optax.adam(1e-3), num_shards=8, weight_update=weight_update
    )

    def lower() -> Any:
        return step.lower(step.abstract_init(PARAMS), X)  # theirs

    assert sources(lower()) == {line_of(lower, "# theirs")}


def test_a_layer_of_flax_in_a_model_of_the_users():
    norm = nnx.BatchNorm(16, axis_name="s", rngs=nnx.Rngs(0))
    graph, state = nnx.split(norm)

    def forward(state: Any, x: Any) -> Any:
        out = nnx.merge(graph, state)(x)  # theirs
        return out.mean()

    program = lowered(forward, state, X)
    (source,) = sources(program)
    assert source == line_of(forward, "# theirs")


def test_of_several_that_are_combined_one_line_is_kept_and_the_number_said():
    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(jnp.subtract, params, lax.pmean(grads, "s"))  # theirs

    report = crossshard.inspect(lowered(step, PARAMS, X))
    (only,) = report.collectives
    assert len(only.operands) == 3
    assert f"{line_of(step, '# theirs')} (1 of 3 combined)" in report.table()


def test_callers_in_both_ways_of_counting_them():
    # Frame 1 calls 2, which is ours, in either: XLA of today writes one more than the number.
    for first, second in ((1, 2), (0, 1)):
        text = ASYNCHRONOUS.replace('"other.py"', f'"{OURS}optimizer/pipeline.py"')
        text = text.replace("id=1 parent_frame_id=1", f"id=1 parent_frame_id={first}")
        text = text.replace("id=2 parent_frame_id=1", f"id=2 parent_frame_id={second}")
        text = text.replace("metadata={stack_frame_id=1}", "metadata={stack_frame_id=2}")
        (gather,) = (each for each in collectives(parse(text)) if each.kind == "all-gather")
        assert gather.source == "train.py:12"
