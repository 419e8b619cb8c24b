"""What a runner compiles for: unhashable configurations, threads, and what outlives what."""

import gc
import threading
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard.errors import VariableError
from crossshard.nnx import program
from tests.quick import deep, deep_but
from tests.stateful import adam, sgd

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


class Config:
    """A configuration as others make them: it compares by value and has no hash."""

    def __init__(self, scale: float):
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.scale == other.scale


class ByIdentity:
    """One that compares by identity, and has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, scale: float):
        self.scale = scale


class AsDict:
    def __new__(cls, scale: float) -> Any:
        return {"model": {"scale": scale, "layers": [1, 2]}}


class Configured(nnx.Module):
    def __init__(self, config: Any):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.config = config

    def __call__(self, x: Any) -> Any:
        config = self.config
        return (config["model"]["scale"] if isinstance(config, dict) else config.scale) * (
            self.linear(x)
        )


def counted(traces: list[int]) -> Any:
    @crossshard.shard(num_shards=8)
    def step(model: Any, opt: Any, x: Any) -> Any:
        traces.append(1)
        return opt.minimize(lambda: (model(x) ** 2).mean(), var_list=model)

    return step


@pytest.mark.parametrize("kind", [deep(Config), deep(ByIdentity), AsDict])
def test_a_configuration_without_a_hash(kind: Any):
    traces: list[int] = []
    step, model, reference = counted(traces), Configured(kind(0.5)), Configured(kind(0.5))
    opt, optimizer = sgd(0.1), nnx.Optimizer(reference, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(3):
        known = len(traces)
        step(model, opt, X)
        optimizer.update(reference, nnx.grad(lambda m: (m(X) ** 2).mean())(reference))
    assert len(traces) == known
    np.testing.assert_allclose(model.linear.kernel[...], reference.linear.kernel[...], atol=1e-6)


@pytest.mark.parametrize("kind", [Config, AsDict])
def test_a_configuration_that_is_written_to_is_another(kind: Any):
    model = Configured(kind(1.0))
    run = crossshard.shard(num_shards=2)(lambda model, x: model(x))
    once = np.asarray(run(model, X))
    if isinstance(model.config, dict):
        model.config["model"]["scale"] = 2.0
    else:
        model.config.scale = 2.0
    np.testing.assert_allclose(run(model, X), 2 * once, rtol=1e-6)
    model.config = kind(1.0)
    np.testing.assert_array_equal(run(model, X), once)


def test_a_later_call_walks_the_model_once(monkeypatch: pytest.MonkeyPatch):
    # The walks are most of what such a call costs beside its program.
    model, opt = Configured(Config(1.0)), adam(0.1)
    step, walks = counted([]), []
    step(model, opt, X)
    flatten = program._flatten
    monkeypatch.setattr(program, "_flatten", lambda roots: walks.append(roots) or flatten(roots))
    for walk in ("iter_graph", "split"):
        monkeypatch.setattr(nnx, walk, None)
    step(model, opt, X)
    assert walks == [[model, opt]]


# What outlives what. A variable and an optimizer take no weak references; a module does, and the
# module's variables live as long as the arrays that are counted here.


class Big(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((256, 256)))


def held_bytes() -> int:
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def trial(step: Any, opt: Any) -> Any:
    model = Big()
    step(model, opt, X)
    return weakref.ref(model)


MOVES = {
    "sgd": lambda: sgd(0.1),
    "adam": lambda: adam(0.1),
    "groups": lambda: adam(0.1, group_assignment=[[0, 1], [2, 3]]),
}


@pytest.mark.parametrize(
    ("name", "form"),
    deep_but(
        [("sgd", "original")],
        [(name, form) for name in MOVES for form in ("decorated", "original")],
    ),
)
def test_a_runner_keeps_no_model_that_it_met(name: str, form: str):
    def minimized(model: Any, opt: Any, x: Any) -> Any:
        return opt.minimize(lambda: (model.w[...] ** 2).mean() + 0 * x.sum(), var_list=model)

    decorated = crossshard.shard(num_shards=4)(minimized)
    step = {
        "decorated": decorated,
        "original": lambda *arguments: crossshard.shard(minimized, list(arguments), num_shards=4),
    }[form]
    assert_kept_nowhere(step, MOVES[name])


def assert_kept_nowhere(step: Any, optimizer: Any) -> None:
    trial(step, optimizer())
    before = held_bytes()
    models = [trial(step, optimizer()) for _ in range(4)]
    gc.collect()
    assert [model() for model in models] == [None] * 4
    assert held_bytes() - before < 256 * 256 * 4


def test_gradients_that_are_never_applied_keep_no_model():
    opt = adam(0.1)

    @crossshard.shard(num_shards=4)
    def step(model: Any, opt: Any, x: Any) -> Any:
        pairs = opt.compute_gradients(lambda: (model.w[...] * x.sum()).sum(), var_list=model)
        return pairs[0][0].sum()

    assert_kept_nowhere(step, lambda: opt)


@pytest.mark.deep
def test_gradients_of_one_model_are_remembered_once():
    model, opt = Big(), sgd(0.1)
    with crossshard.shard_context(1):
        opt.compute_gradients(lambda: model.w[...].sum(), var_list=model)
        before = held_bytes()
        for _ in range(20):
            opt.compute_gradients(lambda: model.w[...].sum(), var_list=model)
    assert held_bytes() == before


def test_no_tracer_stays_in_an_optimizer_after_a_step_that_was_refused():
    opt = adam(0.1)

    def step(opt: Any, x: Any) -> None:
        model = Big()
        opt.minimize(lambda: model.w[...].sum(), var_list=model)

    with jax.checking_leaks():
        for _ in range(2):
            with pytest.raises(VariableError, match="either both passed"):
                crossshard.shard(step, [opt, X], num_shards=4)
    assert opt.slots.variables == {}


# Threads.


def test_threads_share_a_model():
    slow = threading.Event()

    class Slow(nnx.Module):
        """Takes its time to be traced, so that another thread comes by meanwhile."""

        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(()))

        def __call__(self, x: Any) -> Any:
            slow.set()
            time.sleep(0.2)
            return self.w[...] * x

    model, opt = Slow(), sgd(0.0)
    step = crossshard.shard(num_shards=4)(
        lambda model, opt, x: opt.minimize(lambda: model(x).mean(), var_list=model)
    )
    look = crossshard.shard(num_shards=4)(lambda model, x: model.w[...] * x)
    seen: list[Any] = []
    failed: list[BaseException] = []

    def run(function: Any) -> None:
        try:
            seen.append(np.asarray(function()))
        except BaseException as error:  # to be shown by the test's own thread
            failed.append(error)

    ones = np.ones((8,), np.float32)
    first = threading.Thread(target=run, args=(lambda: step(model, opt, ones),))
    first.start()
    slow.wait()
    others = [threading.Thread(target=run, args=(lambda: look(model, ones),)) for _ in range(3)]
    for thread in others:
        thread.start()
    for thread in [first, *others]:
        thread.join()
    assert failed == []
    assert len(seen) == 4
    np.testing.assert_array_equal(seen[-1], ones)
    assert not isinstance(model.w.get_raw_value(), jax.core.Tracer)
    np.testing.assert_array_equal(model.w[...], 1.0)


class Scaled(nnx.Module):
    """Has an array that is no variable."""

    def __init__(self, scale: Any):
        self.scale = nnx.data(scale)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_an_array_that_is_an_attribute_is_no_constant_for_ever(of: Any):
    traces = []

    @crossshard.shard(num_shards=2)
    def step(model: Any, x: Any) -> Any:
        traces.append(None)
        return model.scale * x

    model, x = Scaled(of([2.0, 3.0])), np.ones((4, 2), np.float32)
    np.testing.assert_array_equal(step(model, x)[0], [2, 3])
    seen = len(traces)
    model.scale = of([2.0, 3.0])  # equal, as after nnx.jit
    step(model, x)
    assert len(traces) == seen
    model.scale = of([2.0, 4.0])
    np.testing.assert_array_equal(step(model, x)[0], [2, 4])


def test_an_attribute_of_numpy_that_is_written_to():
    model = Scaled(np.ones(2, np.float32))
    step = crossshard.shard(num_shards=2)(lambda model, x: model.scale * x)
    step(model, np.ones((4, 2), np.float32))
    model.scale[0] = 5
    np.testing.assert_array_equal(step(model, np.ones((4, 2), np.float32))[0], [5, 1])
