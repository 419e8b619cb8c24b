"""The worked example of CONTRIBUTING.md: a stage written outside of the package."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import (
    Checkpoints,
    CrossshardError,
    CrossShardOptimizer,
    Mean,
    Stage,
    _check,
    make_train_step,
)
from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointWarning, IncomingError
from crossshard.pipeline import Aggregator, Phase, pipeline
from crossshard.pipeline.stages.aggregate import Aggregate
from crossshard.pipeline.stages.metrics import LocalNorms
from crossshard.pipeline.update.optimize import Optimize
from examples.gradient_noise import GradientNoise
from tests.pipeline.ways import trained
from tests.step.common import assert_same

ETA, GAMMA, STEPS, N = 0.3, 0.55, 4, 8
RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(40, 32)).astype(np.float32)
BATCHES = RNG.normal(size=(STEPS, 16, 40)).astype(np.float32)
RATE = 0.1


def optimizer():
    return CrossShardOptimizer(optax.sgd(RATE), preprocess=GradientNoise(ETA, GAMMA, seed=3))


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


@pytest.mark.parametrize("way", ["step, sharded", "update, types"])
def test_all_ways_in_follow_numpy(way):
    batches = BATCHES.reshape(STEPS, N, 2, 40)
    *_, (last, _) = trained(way, optimizer(), loss_fn, {"kernel": KERNEL}, batches, number=N)
    np.testing.assert_allclose(last["kernel"], [in_numpy(N)] * N, rtol=0, atol=2e-6)
    # Since the noise differs between shards.
    assert np.abs(in_numpy(1) - in_numpy(N)).max() > 0.01
    assert "GradientNoise" in optimizer().describe()


@dataclasses.dataclass(frozen=True)
class NoisySteps(GradientNoise):
    """The same inside the package: with an option of its own, and a state by its own name."""

    state_field = "noise"
    scope = "noise"
    options = ("noise_eta", "noise_gamma")
    needs_local = "noise_eta adds noise to"

    @classmethod
    def from_options(cls, options):
        gamma = options.get("noise_gamma")
        eta = options.get("noise_eta", None if gamma is None else ETA)
        if eta is None:
            return None
        if _check.number("noise_eta", eta) < 0:
            raise ArgumentError(f"noise_eta is a variance; got {eta}.")
        return cls(eta, GAMMA if gamma is None else gamma, seed=3)


def lines_before(monkeypatch, lines):
    """Add lines to the tuple of the stages, each before another one."""
    added = [(lines[kind], kind) if kind in lines else (kind,) for kind in pipeline.STAGES]
    monkeypatch.setattr(pipeline, "STAGES", tuple(itertools.chain(*added)))


@pytest.fixture
def one_more_line(monkeypatch):
    """The tuple of the stages with one more line."""
    lines_before(monkeypatch, {pipeline.STAGES[1]: NoisySteps})


def noisy(shards, **options):
    return make_train_step(loss_fn, optax.sgd(RATE), num_shards=shards, **options)


@pytest.mark.usefixtures("one_more_line")
class TestInsideThePackageItIsOneFileAndOneLine:
    def test_it_runs_where_the_line_is_and_a_checkpoint_has_its_state(self, tmp_path):
        eight = noisy(N, noise_eta=ETA)
        state, kernel = eight.init({"kernel": KERNEL}), {"kernel": KERNEL}
        assert "local gradient → NoisySteps → mean" in eight.describe()
        for x in BATCHES[:2]:
            state, _ = eight(state, x)
        with Checkpoints(tmp_path, eight) as checkpoints:
            checkpoints.save(state)
        for shards in (8, 2):
            step = noisy(shards, noise_eta=ETA)
            restored, _ = Checkpoints(tmp_path, step).restore_latest(step.init(kernel))
            np.testing.assert_array_equal(restored.opt_state.of("noise").count, [2] * shards)
            if shards == 8:
                assert_same(restored, state)
        # Another value is told, and so is a step without it.
        for eta, told in ((0.4, "noise_eta is 0.3 in it, and 0.4 here"), (None, "noise is gone")):
            step = noisy(N, noise_eta=eta)
            with pytest.warns(CheckpointWarning, match=told):
                Checkpoints(tmp_path, step).restore_latest(step.init(kernel))
        for x in BATCHES[2:]:
            state, _ = eight(state, x)
        np.testing.assert_allclose(state.params["kernel"], in_numpy(N), rtol=0, atol=2e-6)
        np.testing.assert_array_equal(state.opt_state.of("noise").count, np.full(N, STEPS))

    def test_it_has_the_full_gradient_where_parameters_are_sharded(self):
        step = noisy(N, noise_eta=ETA, params="sharded")
        wide = np.tile(KERNEL, (1, 32))
        kept, state = noisy(N, noise_eta=ETA), step.init({"kernel": wide})
        same = kept.init({"kernel": wide})
        for x in BATCHES:
            (state, _), (same, _) = step(state, x), kept(same, x)
        np.testing.assert_allclose(state.params["kernel"], same.params["kernel"], rtol=0, atol=1e-6)
        assert "noise_eta= needs each shard's own gradient" in step.describe()

    def test_any_of_its_options_asks_for_it(self):
        step = noisy(N, noise_gamma=GAMMA, params="sharded")
        state, _ = step(step.init({"kernel": np.tile(KERNEL, (1, 32))}), BATCHES[0])
        assert state.opt_state.of("noise").count.shape == (N,)
        assert "noise_gamma= needs each shard's own gradient" in step.describe()

    @pytest.mark.parametrize("way", [{"loss_over": "batch"}, {"virtual_shards": 2 * N}])
    def test_a_step_that_has_no_gradient_of_each_shard_refuses_it(self, way):
        # Nothing but ``needs_local`` says so: it has no row of its own.
        says = r"noise_eta=0\.3 adds noise to each shard's own gradient; with .*Leave it out"
        with pytest.raises(ArgumentError, match=says):
            noisy(N, noise_eta=ETA, **way)

    def test_its_option_is_checked_and_what_it_needs(self):
        with pytest.raises(ArgumentError, match="noise_eta is a variance; got -1"):
            CrossShardOptimizer(optax.sgd(RATE), noise_eta=-1.0)
        with pytest.raises(ArgumentTypeError, match="Did you mean noise_eta"):
            noisy(N, noise_etta=ETA)
        wrapped = CrossShardOptimizer(optax.sgd(RATE), incoming="summed", noise_eta=ETA)
        with pytest.raises(ArgumentError, match="Both the optimizer and make_train_step"):
            make_train_step(loss_fn, wrapped, num_shards=N, noise_eta=ETA)
        update = lambda g: wrapped.update(g, wrapped.init(g), g)[0]
        with pytest.raises(IncomingError, match=r"noise_eta adds noise to.*leave noise_eta out"):
            jax.vmap(update, axis_name="shards")(np.ones((N, 3), np.float32))


@dataclasses.dataclass(frozen=True)
class UnitNorm(Stage):
    """Divides each shard's gradient by its norm, and makes NaN zero."""

    state_field = ""
    options = ("unit_norm",)
    needs_local = "unit_norm divides"

    @classmethod
    def from_options(cls, options):
        return cls() if options.get("unit_norm") else None

    def update(self, gradients, state, context):
        values = jax.tree.map(jnp.nan_to_num, gradients.values)
        norm = jnp.maximum(optax.tree.norm(values), 1e-9)
        return gradients.replace(values=jax.tree.map(lambda g: g / norm, values)), state


@pytest.fixture
def unit_norm(monkeypatch):
    """A line for a stage that reads all of a gradient, and hides what is not finite."""
    lines_before(monkeypatch, {LocalNorms: UnitNorm})


def loss_of_two(params, x):
    return ((x @ params["kernel"] + params["frozen"]) ** 2).mean()


@pytest.mark.usefixtures("unit_norm")
class TestAStageOnEachShardsGradientMayReadAndHideAllOfIt:
    def test_a_gradient_that_the_optimizer_does_not_read_is_computed_for_it(self):
        frozen = optax.masked(optax.set_to_zero(), {"kernel": False, "frozen": True})
        step = make_train_step(
            loss_of_two, optax.chain(optax.sgd(RATE), frozen), num_shards=N, unit_norm=True
        )
        state = step.init({"kernel": KERNEL, "frozen": np.ones(32, np.float32)})
        state, _ = step(state, BATCHES[0])
        gradients = []
        for x in np.split(BATCHES[0].astype(np.float64), N):
            of_sum = 2 * (x @ KERNEL.astype(np.float64) + 1) / (len(x) * KERNEL.shape[1])
            own = x.T @ of_sum
            gradients.append(own / np.sqrt((own**2).sum() + (of_sum.sum(0) ** 2).sum()))
        want = KERNEL - RATE * np.mean(gradients, 0)
        np.testing.assert_allclose(state.params["kernel"], want, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("action", ["skip", "quarantine"])
    def test_what_was_not_finite_before_it_is_found(self, action):
        # At a row of zeros the norm is finite, and its gradient is not.
        loss_of_norms = lambda params, x: jnp.sqrt(((x @ params["kernel"]) ** 2).sum(1)).mean()
        options = {"num_shards": N, "unit_norm": True, "nonfinite": action}
        step = make_train_step(loss_of_norms, optax.sgd(RATE), **options)
        bad = BATCHES[0].copy()
        bad[2 * 3] = 0
        _, metrics = step(step.init({"kernel": KERNEL}), bad)
        assert metrics["nonfinite"].shard == 3
        assert bool(metrics["skipped"]) == (action == "skip")

    def test_counted_gradients_that_it_changes_are_not_counted_anew(self):
        step = make_train_step(
            lambda params, x: Mean(((x @ params["kernel"]) ** 2).sum(), x.shape[0]),
            optax.sgd(RATE),
            num_shards=N,
            unit_norm=True,
            nonfinite="quarantine",
        )
        with pytest.raises(ArgumentError, match=r"unit_norm= changes them in between"):
            step(step.init({"kernel": KERNEL}), BATCHES[0])


class Signs(Stage):
    """Sums the signs of the shards' gradients, for ``Agreed``, which has the option."""

    state_field = ""
    options = ()
    asked_by = ("agreed",)
    needs_local = "agreed compares"

    @classmethod
    def from_options(cls, options):
        return cls() if options.get("agreed") else None

    def update(self, gradients, state, context):
        signs = jax.tree.map(lambda g: jnp.sign(g).astype(jnp.int8), gradients.values)
        return gradients.replace(sums={**gradients.sums, "signs": signs}), state


class Agreed(Signs):
    """Keeps of the gradient what has the same sign on all shards."""

    phase = Phase.UPDATE
    options = ("agreed",)
    needs_local = ""

    def update(self, gradients, state, context):
        number = context.shards.group_size
        one = lambda g, signs: jnp.where(abs(signs) == number, g, 0)
        kept = jax.tree.map(one, gradients.values, gradients.sums["signs"])
        return gradients.replace(values=kept), state


@pytest.fixture
def agreed(monkeypatch):
    """Lines for a rule of two halves, of which the second has the option."""
    lines_before(monkeypatch, {Aggregate: Signs, Optimize: Agreed})


@pytest.mark.usefixtures("agreed")
class TestARuleOfTwoHalves:
    @pytest.mark.parametrize("wire", [None, "int8"])
    def test_it_may_sum_integers_beside_the_gradient(self, wire):
        step = noisy(2, agreed=True, reduce_dtype=wire)
        state, _ = step(step.init({"kernel": KERNEL}), BATCHES[0])
        own = [x.T @ (x @ KERNEL) * 2 / (len(x) * 32) for x in np.split(BATCHES[0], 2)]
        want = np.where(np.sign(own[0]) == np.sign(own[1]), np.mean(own, 0), 0)
        moved = (KERNEL - np.asarray(state.params["kernel"])) / RATE
        assert (moved[want == 0] == 0).all()
        np.testing.assert_allclose(moved, want, rtol=0, atol=1e-5 if wire is None else 0.05)

    @pytest.mark.parametrize("way", [{"loss_over": "batch"}, {"virtual_shards": 2 * N}])
    def test_a_step_that_has_no_gradient_of_each_shard_refuses_it(self, way):
        with pytest.raises(ArgumentError, match=r"agreed=True compares each shard's own gradient"):
            noisy(N, agreed=True, **way)


# Mistakes of who writes one.


def own(update=lambda gradients, state: (gradients, state), state=(), **attributes):
    """A stage with one thing wrong with it."""
    methods = {
        "init": lambda self, params: state,
        "update": lambda self, gradients, state, context: update(gradients, state),
    }
    return type("Own", (Stage,), methods | attributes)()


def own_sum(total=lambda sums, state: (sums, state), state=()):
    """An aggregator with one thing wrong with it."""
    methods = {
        "init": lambda self, params: state,
        "sum": lambda self, values, state, peers: total(jax.tree.map(peers.sum, values), state),
    }
    return type("OwnSum", (Aggregator,), methods)()


MISTAKES = [
    (own(lambda g, s: g), r"Own\.update must return \(gradients, state\); .*Grad"),
    (own(lambda g, s: (g, s, 1)), r"must return \(gradients, state\).*tuple of 3"),
    (own(lambda g, s: (g.values, s)), r"gradients\.replace\(values=values\)"),
    (own(lambda g, s: (g.replace(values=None), s)), r"values that .* structure"),
    (own(lambda g, s: (g.replace(value=1), s)), r"no field 'value'.*values"),
    (own(lambda g, s: (g.replace(values={"kernel": "x"}), s)), r"\['kernel'\].*'x' \(str"),
    (own(lambda g, s: (g, {"count": 1})), r"state that Own\.update .* structure"),
    (own(lambda g, s: (g, s.sum()), np.zeros(3)), r"that Own\.update .* shape \(3,\).*\(\)"),
    (own(state="x"), r"state of preprocess must be an array.*'x'"),
    (own(placement="both"), r"Own\.placement .*REPLICATED or .*PER_SHARD; got 'both'"),
    (own(phase="local"), r"Own\.phase .*Phase\.LOCAL.*'local'"),
    (own(phase=Phase.UPDATE), r"Own\.phase .*before the sum"),
    (own(state_field="mine"), r"Own\.state_field must be 'preprocess'.*'mine'"),
    (own_sum(lambda g, s: g), r"OwnSum\.sum must return \(sums, state\)"),
    (own_sum(lambda g, s: ([g], s)), r"sums that OwnSum\.sum returned .* structure"),
    (
        own_sum(lambda g, s: ({"kernel": g["kernel"][0]}, s)),
        r"returned\['kernel'\] must have sh",
    ),
    (own_sum(lambda g, s: (g, {"count": 1})), r"state that OwnSum\.sum .* struct"),
    (own_sum(state="x"), r"state of aggregate must be an array.*'x'"),
]


@pytest.mark.parametrize(("stage", "says"), MISTAKES)
def test_a_mistake_is_named(stage, says):
    option = "preprocess" if isinstance(stage, Stage) else "aggregator"

    def train():
        opt = CrossShardOptimizer(optax.sgd(RATE), **{option: stage})
        step = make_train_step(loss_fn, opt, num_shards=2)
        step(step.init({"kernel": KERNEL}), BATCHES[0])

    with pytest.raises(CrossshardError, match=says):
        train()
