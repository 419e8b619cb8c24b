"""The stateful optimizer as a node of NNX's graph: state, copies, transforms, checkpoints."""

import copy
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentTypeError, IncomingError, VariableError
from tests.quick import deep_but
from tests.stateful import assert_same, sgd

SHARDS = 8
X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
}
of_each = pytest.mark.parametrize("name", deep_but(["sgd", "adam"], OPTIMIZERS))


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(3, 1, rngs=nnx.Rngs(seed))


def mse(model: Any, x: Any, y: Any) -> Any:
    return ((model(x)[:, 0] - y) ** 2).mean()


def minimize(model: Any, opt: CrossShardOptimizer, x: Any, y: Any) -> Any:
    return opt.minimize(lambda: mse(model, x, y), var_list=model)


step = crossshard.shard(num_shards=SHARDS)(minimize)


def on_one_device(name: str, steps: int) -> nnx.Linear:
    """Flax's own optimizer on the whole batch."""
    model = linear()
    optimizer = nnx.Optimizer(model, OPTIMIZERS[name](), wrt=nnx.Param)
    for _ in range(steps):
        optimizer.update(model, nnx.grad(mse)(model, X, Y))
    return model


def assert_close(model: Any, expected: Any) -> None:
    assert_same(model, expected, atol=1e-6)


def made(name: str, **kwargs: Any) -> tuple[nnx.Linear, CrossShardOptimizer]:
    return linear(), CrossShardOptimizer(OPTIMIZERS[name](), **kwargs)


def split_and_merged(pair: Any) -> Any:
    graph, state = nnx.split(pair)
    return nnx.merge(graph, jax.tree.map(jnp.copy, state))


COPIES = {
    "clone": nnx.clone,
    "split": split_and_merged,
    "deepcopy": copy.deepcopy,
    "deepcopy, the optimizer first": lambda pair: copy.deepcopy(pair[::-1])[::-1],
}


@pytest.mark.parametrize(
    ("name", "copied"),
    deep_but(
        lambda case: case in (("sgd", "clone"), ("adam", "deepcopy"), ("adam", "split")),
        itertools.product(OPTIMIZERS, COPIES),
    ),
)
def test_copies_go_their_own_way(name: str, copied: str):
    model, opt = made(name)
    step(model, opt, X, Y)
    other_model, other = COPIES[copied]((model, opt))
    assert type(other) is CrossShardOptimizer
    assert isinstance(other, optax.GradientTransformationExtraArgs)
    for _ in range(2):
        step(other_model, other, X, Y)
    assert_close(other_model, on_one_device(name, 3))
    assert_close(model, on_one_device(name, 1))
    for _ in range(2):
        step(model, opt, X, Y)
    # Its state is its slots, by their names.
    state, theirs = (nnx.to_pure_dict(nnx.state({"opt": each})) for each in (opt, other))
    assert jax.tree.leaves(state) or name == "sgd"
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), state, theirs)
    updates, _ = jax.jit(other.update)(jnp.ones(2), other.init(jnp.ones(2)), jnp.ones(2))
    assert updates.shape == (2,)


@of_each
def test_a_copy_does_not_start_again_under_other_names(name: str):
    model, opt = made(name)
    step(model, opt, X, Y)
    model, opt = nnx.clone((model, opt))
    nested = nnx.Dict(inner=model)

    @crossshard.shard(num_shards=8)
    def of_nested(nested: Any, opt: Any, x: Any, y: Any) -> None:
        opt.minimize(lambda: mse(nested.inner, x, y))

    message = r"Param.*cannot be found here: there are slots of bias, kernel"
    with pytest.raises(crossshard.errors.VariableError, match=message):
        of_nested(nested, opt, X, Y)
    with pytest.raises(crossshard.errors.VariableError, match=message):
        opt.build(nested)
    opt.build(model)
    for _ in range(2):
        of_nested(nested, opt, X, Y)
    assert_close(model, on_one_device(name, 3))


def test_update_writes_in_place():
    model, opt = made("adam")
    step(model, opt, X, Y)
    before = nnx.clone(nnx.state((model, opt)))
    slots = opt.variables()
    step(model, opt, X, Y)
    nnx.update((model, opt), before)
    assert all(a is b for a, b in zip(opt.variables(), slots, strict=True))
    step(model, opt, X, Y)
    assert_close(model, on_one_device("adam", 2))


# Transforms.


def in_a_runner(function: Callable[..., Any]) -> Callable[..., Any]:
    return crossshard.shard(num_shards=SHARDS)(function)


def in_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    run = nnx.jit(function)

    def on_one_shard(*given: Any) -> Any:
        with crossshard.shard_context(1):
            return run(*given)

    return on_one_shard


AROUND = pytest.mark.parametrize("around", [in_a_runner, in_jit])


def looped(model: Any, opt: Any, x: Any, y: Any) -> None:
    def body(_: Any, carry: Any) -> Any:
        minimize(*carry)
        return carry

    nnx.fori_loop(0, 3, body, (model, opt, x, y))


def scanned(model: Any, opt: Any, x: Any, y: Any) -> None:
    @nnx.scan(in_axes=(nnx.Carry, None, None, 0), out_axes=(nnx.Carry, 0))
    def body(pair: Any, x: Any, y: Any, _: Any) -> Any:
        return pair, minimize(*pair, x, y)

    body((model, opt), x, y, jnp.arange(3))


def branched(model: Any, opt: Any, x: Any, y: Any) -> None:
    none = lambda model, opt, x, y: jnp.zeros(())
    for taken in (True, False, True, True):
        nnx.cond(jnp.array(taken), minimize, none, model, opt, x, y)


def gradients_of(model: Any, opt: Any, x: Any, y: Any) -> Any:
    pairs = opt.compute_gradients(lambda: mse(model, x, y), var_list=model)
    names = {id(model.kernel): "kernel", id(model.bias): "bias"}
    return {names[id(variable)]: gradient for gradient, variable in pairs}


def apply(model: Any, opt: Any, gradients: Any) -> None:
    opt.build(model)
    pairs = [(gradients[name], getattr(model, name)) for name in gradients]
    opt.apply_gradients(pairs, incoming="scaled")


def applied_in_a_branch(model: Any, opt: Any, x: Any, y: Any) -> None:
    for closes, taken in enumerate((True, False, True, True)):
        gradients = gradients_of(model, opt, x, y)
        # Once the gradients are the branch's by closure.
        branch = functools.partial(apply, gradients=gradients) if closes == 2 else apply
        given = (model, opt) if closes == 2 else (model, opt, gradients)
        nnx.cond(jnp.array(taken), branch, lambda *_: None, *given)


def jitted(model: Any, opt: Any, x: Any, y: Any) -> None:
    inner = nnx.jit(minimize)
    for _ in range(3):
        inner(model, opt, x, y)


BODIES = [looped, scanned, branched, applied_in_a_branch, jitted]


@pytest.mark.parametrize(
    ("name", "around", "body"),
    deep_but(
        [
            *itertools.product(["adam"], [in_a_runner], [looped, scanned, branched, jitted]),
            *itertools.product(["adam"], [in_jit], [applied_in_a_branch]),
        ],
        itertools.product(OPTIMIZERS, [in_a_runner, in_jit], BODIES),
    ),
)
def test_inside_control_flow(name: str, around: Callable[..., Any], body: Callable[..., Any]):
    model, opt = made(name)
    opt.build(model)
    run = around(body)
    for _ in range(2):
        run(model, opt, X, Y)
    assert_close(model, on_one_device(name, 6))


@pytest.mark.parametrize("body", deep_but([looped, applied_in_a_branch], BODIES))
def test_slots_that_the_step_made_before_the_control_flow(body: Callable[..., Any]):
    model, opt = made("adam")

    @in_a_runner
    def run(model: Any, opt: Any, x: Any, y: Any) -> None:
        minimize(model, opt, x, y)
        body(model, opt, x, y)

    run(model, opt, X, Y)
    run(model, opt, X, Y)
    assert_close(model, on_one_device("adam", 8))


@pytest.mark.parametrize("body", [looped, scanned, branched])
@AROUND
def test_slots_are_not_made_inside_control_flow(
    body: Callable[..., Any], around: Callable[..., Any]
):
    model, opt = made("adam")
    with pytest.raises(VariableError, match=r"build\(model\)"):
        around(body)(model, opt, X, Y)
    assert opt.variables() == []
    step(model, opt, X, Y)
    assert_close(model, on_one_device("adam", 1))


def test_which_slots_are_a_variables_is_asked_where_it_cannot_be_known():
    model, opt = made("momentum")
    opt.build(model)

    @in_a_runner
    def run(model: Any, opt: Any, x: Any, y: Any) -> None:
        apply = lambda kernel, opt, g: opt.apply_gradients([(g, kernel)], incoming="scaled")
        gradient = jnp.ones((3, 1))
        nnx.cond(jnp.array(True), apply, lambda *_: None, model.kernel, opt, gradient)

    with pytest.raises(VariableError, match=r"bias, kernel.*build\(model\)"):
        run(model, opt, X, Y)


@pytest.mark.parametrize("whose", ["jax", "another's", "its own"])
def test_where_a_gradient_is_from_is_told_in_a_branch(whose: str):
    model, opt = made("sgd")
    opt.build(model)
    another = sgd(0.1)

    @in_a_runner
    def run(model: Any, opt: Any, x: Any, y: Any) -> None:
        opt.compute_gradients(lambda: mse(model, x, y), var_list=model)
        if whose == "jax":
            gradient = crossshard.grad(mse)(model, x, y).kernel[...]
        else:
            whom = opt if whose == "its own" else another
            ((gradient, _),) = whom.compute_gradients(
                lambda: mse(model, x, y), var_list=[model.kernel]
            )

        def apply(model: Any, opt: Any) -> None:
            opt.build(model)
            opt.apply_gradients([(gradient, model.kernel)])

        nnx.cond(jnp.array(True), apply, lambda *_: None, model, opt)

    with pytest.raises(IncomingError, match="incoming='local'"):
        run(model, opt, X, Y)


@pytest.mark.parametrize("cond", [jax.lax.cond, nnx.cond], ids=["jax", "nnx"])
def test_what_control_flow_cannot_see_is_told(cond: Callable[..., Any]):
    model, opt = made("sgd")

    @in_a_runner
    def run(model: Any, opt: Any, x: Any, y: Any) -> None:
        none = lambda: jnp.zeros(())
        cond(jnp.array(True), lambda: minimize(model, opt, x, y), none)

    with pytest.raises(TraceContextError):
        run(model, opt, X, Y)


class Trainer(nnx.Module):
    def __init__(self, name: str):
        self.model, self.opt = made(name)

    def step(self, x: Any, y: Any) -> Any:
        return minimize(self.model, self.opt, x, y)


@of_each
@AROUND
def test_a_module_that_holds_it(name: str, around: Callable[..., Any]):
    trainer = Trainer(name)
    if around is in_jit:
        trainer.opt.build(trainer.model)
    run = around(lambda trainer, x, y: trainer.step(x, y))
    for _ in range(3):
        run(trainer, X, Y)
    copied = nnx.clone(trainer)
    in_a_runner(lambda trainer, x, y: trainer.step(x, y))(copied, X, Y)
    assert_close(copied.model, on_one_device(name, 4))
    assert_close(trainer.model, on_one_device(name, 3))


def test_it_has_no_subclasses_is_not_pickled_and_prints_what_it_is(
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(ArgumentTypeError, match=r"no subclasses.*optax\.chain"):
        type("Scheduled", (CrossShardOptimizer,), {})
    with pytest.raises(ArgumentTypeError, match=r"cannot be pickled.*build\(model\)"):
        pickle.dumps(made("adam")[1])
    trainer = Trainer("adam")
    trainer.opt.build(trainer.model)
    for each in (trainer, trainer.opt, nnx.graphdef(trainer)):
        nnx.display(each)
    printed = capsys.readouterr().out
    assert "CrossShardOptimizer(optax" in printed
    assert "('bias', 'kernel')" in printed
    assert "object at 0x" not in printed.replace("<function", "")
