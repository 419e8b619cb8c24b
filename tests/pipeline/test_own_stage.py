"""The worked example of CONTRIBUTING.md: a stage written outside of the package."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from crossshard import (
    Checkpoints,
    CrossshardError,
    CrossShardOptimizer,
    Stage,
    _check,
    make_train_step,
)
from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointWarning, IncomingError
from crossshard.pipeline import Aggregator, Phase, pipeline
from examples.gradient_noise import GradientNoise
from tests.pipeline.ways import WAYS, trained
from tests.quick import deep

ETA, GAMMA, STEPS, N = 0.3, 0.55, 4, 8
RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(40, 32)).astype(np.float32)
BATCHES = RNG.normal(size=(STEPS, 16, 40)).astype(np.float32)
RATE = 0.1


def optimizer(inner=None):
    return CrossShardOptimizer(
        inner or optax.sgd(RATE), preprocess=GradientNoise(ETA, GAMMA, seed=3)
    )


def loss_fn(params, x):
    return ((x @ params["kernel"]) ** 2).mean()


def in_numpy(shards):
    """Plain SGD in float64 with the same noise."""
    kernel = KERNEL.astype(np.float64)
    for count, batch in enumerate(BATCHES):
        parts = np.split(batch.astype(np.float64), shards)
        gradients = []
        for shard, x in enumerate(parts):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), count), shard)
            noise = jax.random.normal(jax.random.split(key, 1)[0], kernel.shape)
            scale = np.sqrt(ETA / (1 + count) ** GAMMA)
            own = 2 * x.T @ (x @ kernel) / (len(x) * kernel.shape[1])
            gradients.append(own + scale * np.asarray(noise, np.float64))
        kernel = kernel - RATE * np.mean(gradients, 0)
    return kernel


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"vmap", "variables, pairs"}))
def test_all_ways_in_follow_numpy(way):
    batches = BATCHES.reshape(STEPS, N, 2, 40)
    *_, (last, _) = trained(way, optimizer(), loss_fn, {"kernel": KERNEL}, batches, number=N)
    np.testing.assert_allclose(last["kernel"], [in_numpy(N)] * N, rtol=0, atol=2e-6)


def test_the_noise_differs_between_shards():
    assert np.abs(in_numpy(1) - in_numpy(N)).max() > 0.01


@pytest.mark.parametrize("after", [deep(8), 2])
@pytest.mark.parametrize("inner", [optax.sgd(RATE), optax.adam(RATE)], ids=["sgd", "adam"])
def test_its_state_is_checkpointed_and_resharded(tmp_path, inner, after):
    eight = make_train_step(loss_fn, optimizer(inner), num_shards=8)
    state = eight.init({"kernel": KERNEL})
    for x in BATCHES[:2]:
        state, _ = eight(state, x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", eight.unshard(state))
    step = make_train_step(loss_fn, optimizer(inner), num_shards=after)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "state", eight.unshard(state))
    restored = step.reshard(saved)
    noise = restored.opt_state.preprocess
    assert noise.key.shape == (after, 2)
    np.testing.assert_array_equal(noise.count, np.full(after, 2))
    goes_on, _ = step(restored, BATCHES[2])
    assert int(goes_on.opt_state.preprocess.count[0]) == 3
    if after == 8:
        expected, _ = eight(state, BATCHES[2])
        for one, other in zip(jax.tree.leaves(goes_on), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)


def test_it_is_one_short_file():
    source = Path(__file__).parents[2] / "examples" / "gradient_noise.py"
    lines = source.read_text().splitlines()
    assert len(lines) <= 40
    assert len(list(filter(None, lines))) <= 30


@dataclasses.dataclass(frozen=True)
class NoisySteps(GradientNoise):
    """The same inside the package: with an option of its own, and a state by its own name."""

    state_field = "noise"
    scope = "noise"
    options = ("noise_eta",)
    needs_local = "noise_eta adds noise to"

    @classmethod
    def from_options(cls, options):
        eta = options.get("noise_eta")
        if eta is None:
            return None
        if _check.number("noise_eta", eta) < 0:
            raise ArgumentError(f"noise_eta is a variance; got {eta}.")
        return cls(eta, GAMMA, seed=3)


@pytest.fixture
def one_more_line(monkeypatch):
    """The tuple of the stages with one more line."""
    first, *others = pipeline.STAGES
    monkeypatch.setattr(pipeline, "STAGES", (first, NoisySteps, *others))


@pytest.mark.usefixtures("one_more_line")
class TestInsideThePackageItIsOneFileAndOneLine:
    def test_it_runs_where_the_line_is(self):
        step = make_train_step(loss_fn, optax.sgd(RATE), num_shards=N, noise_eta=ETA)
        state = step.init({"kernel": KERNEL})
        for x in BATCHES:
            state, _ = step(state, x)
        np.testing.assert_allclose(state.params["kernel"], in_numpy(N), rtol=0, atol=2e-6)
        np.testing.assert_array_equal(state.opt_state.of("noise").count, np.full(N, STEPS))
        assert "local gradient → NoisySteps → mean" in step.describe()

    @pytest.mark.parametrize("way", sorted(WAYS.keys() - {"vmap", "variables, pairs", "step"}))
    def test_the_other_ways_in_take_it(self, way):
        wrapped = CrossShardOptimizer(optax.sgd(RATE), noise_eta=ETA)
        batches = BATCHES.reshape(STEPS, N, 2, 40)
        *_, (last, _) = trained(way, wrapped, loss_fn, {"kernel": KERNEL}, batches, number=N)
        np.testing.assert_allclose(last["kernel"], [in_numpy(N)] * N, rtol=0, atol=2e-6)

    def test_its_option_is_checked(self):
        with pytest.raises(ArgumentError, match="noise_eta is a variance; got -1"):
            CrossShardOptimizer(optax.sgd(RATE), noise_eta=-1.0)
        with pytest.raises(ArgumentTypeError, match="Did you mean noise_eta"):
            make_train_step(loss_fn, optax.sgd(RATE), noise_etta=ETA)
        wrapped = CrossShardOptimizer(optax.sgd(RATE), noise_eta=ETA)
        with pytest.raises(ArgumentError, match="Both the optimizer and make_train_step"):
            make_train_step(loss_fn, wrapped, num_shards=N, noise_eta=ETA)

    def test_what_it_needs_is_refused(self):
        wrapped = CrossShardOptimizer(optax.sgd(RATE), incoming="summed", noise_eta=ETA)
        update = lambda g: wrapped.update(g, wrapped.init(g), g)[0]
        with pytest.raises(IncomingError, match=r"noise_eta adds noise to.*leave noise_eta out"):
            jax.vmap(update, axis_name="shards")(np.ones((N, 3), np.float32))

    @pytest.mark.parametrize("after", [8, 2])
    def test_a_checkpoint_has_its_state(self, tmp_path, after):
        make = lambda shards, eta=ETA: make_train_step(
            loss_fn, optax.sgd(RATE), num_shards=shards, noise_eta=eta
        )
        step = make(8)
        state = step.init({"kernel": KERNEL})
        for x in BATCHES[:2]:
            state, _ = step(state, x)
        with Checkpoints(tmp_path, step) as checkpoints:
            checkpoints.save(state)
        there = make(after)
        restored, _ = Checkpoints(tmp_path, there).restore_latest(there.init({"kernel": KERNEL}))
        np.testing.assert_array_equal(restored.opt_state.of("noise").count, np.full(after, 2))
        if after == 8:
            for one, other in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
                np.testing.assert_array_equal(one, other)
        # Another value is told, and so is a step without it.
        for eta, told in ((0.4, "noise_eta is 0.3 in it, and 0.4 here"), (None, "noise is gone")):
            other = make(after, eta)
            with pytest.warns(CheckpointWarning, match=told):
                Checkpoints(tmp_path, other).restore_latest(other.init({"kernel": KERNEL}))


def test_describe_names_it():
    assert "GradientNoise" in optimizer().describe()


# Mistakes of who writes one.


def own(update=None, state=(), **attributes):
    """A stage with one thing wrong with it."""

    class Own(Stage):
        def init(self, params):
            return state

        def update(self, gradients, state, context):
            return (gradients, state) if update is None else update(gradients, state)

    for name, value in attributes.items():
        setattr(Own, name, value)
    return Own()


def own_sum(total=None, state=()):
    """An aggregator with one thing wrong with it."""

    class OwnSum(Aggregator):
        def init(self, params):
            return state

        def sum(self, values, state, peers):
            sums = jax.tree.map(peers.sum, values)
            return (sums, state) if total is None else total(sums, state)

    return OwnSum()


MISTAKES = {
    "only gradients": (
        own(lambda g, s: g),
        r"Own\.update must return \(gradients, state\); .*Grad",
    ),
    "three": (own(lambda g, s: (g, s, 1)), r"must return \(gradients, state\).*tuple of 3"),
    "nothing": (own(lambda g, s: None), r"returned NoneType"),
    "only values": (own(lambda g, s: (g.values, s)), r"gradients\.replace\(values=values\)"),
    "no values": (own(lambda g, s: (g.replace(values=None), s)), r"values that .* structure"),
    "a misspelt field": (own(lambda g, s: (g.replace(value=1), s)), r"no field 'value'.*values"),
    "a word": (
        own(lambda g, s: (g.replace(values={"kernel": "x"}), s)),
        r"\['kernel'\].*'x' \(str",
    ),
    "another state": (own(lambda g, s: (g, {"count": 1})), r"state that Own\.update .* structure"),
    "a smaller state": (
        own(lambda g, s: (g, s.sum()), np.zeros(3)),
        r"state that Own\.update .* shape \(3,\).*\(\)",
    ),
    "a state of words": (own(state="x"), r"state of preprocess must be an array.*'x'"),
    "placement": (own(placement="both"), r"Own\.placement .*REPLICATED or .*PER_SHARD; got 'both'"),
    "phase": (own(phase="local"), r"Own\.phase .*Phase\.LOCAL.*'local'"),
    "a later phase": (own(phase=Phase.UPDATE), r"Own\.phase .*before the sum"),
    "state_field": (own(state_field="mine"), r"Own\.state_field must be 'preprocess'.*'mine'"),
    "only sums": (own_sum(lambda g, s: g), r"OwnSum\.sum must return \(sums, state\)"),
    "other sums": (own_sum(lambda g, s: ([g], s)), r"sums that OwnSum\.sum returned .* structure"),
    "sums of others": (
        own_sum(lambda g, s: (jax.tree.map(lambda x: x[None], g), s)),
        r"sums that OwnSum\.sum returned\['kernel'\] must have shape",
    ),
    "the sums' state": (
        own_sum(lambda g, s: (g, {"count": 1})),
        r"state that OwnSum\.sum .* struct",
    ),
    "words": (own_sum(state="x"), r"state of aggregate must be an array.*'x'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    stage, says = MISTAKES[name]
    option = "preprocess" if isinstance(stage, Stage) else "aggregator"

    def train():
        opt = CrossShardOptimizer(optax.sgd(RATE), **{option: stage})
        step = make_train_step(loss_fn, opt, num_shards=2)
        step(step.init({"kernel": KERNEL}), BATCHES[0])

    with pytest.raises(CrossshardError, match=says):
        train()


def test_what_is_no_mistake():
    for stage in (own(), own(state=np.zeros(3)), own(state=3, phase=Phase.ARRIVAL)):
        opt = CrossShardOptimizer(optax.sgd(RATE), preprocess=stage)
        step = make_train_step(loss_fn, opt, num_shards=2)
        plain = make_train_step(loss_fn, optax.sgd(RATE), num_shards=2)
        state, _ = step(step.init({"kernel": KERNEL}), BATCHES[0])
        want, _ = plain(plain.init({"kernel": KERNEL}), BATCHES[0])
        np.testing.assert_allclose(state.params["kernel"], want.params["kernel"], atol=1e-6)
