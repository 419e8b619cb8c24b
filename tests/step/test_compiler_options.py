"""The options that a step is compiled with, and none where the user has set them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import crossshard
from crossshard.step import program
from crossshard.step.program import compiler_options
from crossshard.tools.inspection.hlo import parse
from tests.step.common import sgd_step

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
THRESHOLD = "xla_gpu_reduce_scatter_combine_threshold_bytes"
LEVEL = "optimization_level"
GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.parametrize("shards", [2, 8, 32, 1024])
def test_gradients_are_combined_as_for_all_reduces(shards: int):
    options = compiler_options("gpu", shards)
    # XLA counts the output of a reduce-scatter, 1/N of the gradients.
    assert options[THRESHOLD] * shards <= 30 * 2**20 < (options[THRESHOLD] + 1) * shards
    assert options[SCHEDULER] is True


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # XLA also reads a file of flags.
    (tmp_path / "flags").write_text(f"--{SCHEDULER}=true\n--{THRESHOLD}=1\n")
    for flags, left in (
        (f"--xla_gpu_autotune_level=0 --{SCHEDULER}=false", {THRESHOLD}),
        (f"--{THRESHOLD}=1", {SCHEDULER}),
        (tmp_path / "flags", set()),
        (tmp_path / "nowhere", {SCHEDULER, THRESHOLD}),
    ):
        monkeypatch.setenv("XLA_FLAGS", str(flags))
        assert compiler_options("gpu", 8).keys() == left


def test_this_jax_knows_them():
    # The flags of all platforms are compiled into each; an unknown one is an error.
    options = compiler_options("gpu", 8)
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such": 1})(1)


PARAMS = jnp.ones((8, 4))
BATCH = jnp.ones((16, 8))


def make(**options: Any) -> crossshard.TrainStep:
    opt = crossshard.CrossShardOptimizer(optax.sgd(0.1), **options)
    return crossshard.make_train_step(lambda w, x: ((x @ w) ** 2).mean(), opt, num_shards=8)


def test_the_same_bits_have_one_order_of_sums_on_cpus(monkeypatch: pytest.MonkeyPatch):
    w, x = jnp.ones((64, 64)), jnp.ones((8, 64))
    loss = lambda w, x: ((x @ w) ** 2).mean() + (w**2).sum()
    made = lambda **options: sgd_step(loss, 0.1, 8, **options)
    name = "xla_cpu_experimental_ynn_fusion_type"
    assert made().compiler_options == {}
    step = made(virtual_shards=8)
    assert step.compiler_options == {name: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    # An option that this JAX does not know is an error.
    module = parse(step.lower(step.abstract_init(w), x).compile().as_text())
    for computation in module.computations.values():
        for each in computation.instructions.values():
            if each.name.startswith("ynn_fusion"):
                (fused,) = each.called("calls")
                opcodes = {x.opcode for x in module.computations[fused].instructions.values()}
                assert "reduce" not in opcodes
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=")
    assert made(virtual_shards=8).compiler_options == {}


def test_sharded_parameters_travel_beside_the_sums(monkeypatch: pytest.MonkeyPatch):
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
    assert compiler_options("gpu", 32, params_sharded=True) == {
        **compiler_options("gpu", 32),
        limit: 3,
    }
    assert limit not in compiler_options("gpu", 8, params_sharded=True)
    # Few bits are two collectives each, and within a host, too, they wait for none.
    for number in (8, 32):
        assert compiler_options("gpu", number, params_sharded=True, few_bits=True)[limit] == 4
    assert limit not in compiler_options("gpu", 8, few_bits=True)
    monkeypatch.setenv("XLA_FLAGS", f"--{limit}=1")
    assert limit not in compiler_options("gpu", 32, params_sharded=True)


def test_other_steps_have_none():
    for platform, shards in (("cpu", 8), ("tpu", 8), ("gpu", 1)):
        assert compiler_options(platform, shards) == {}
    assert make().compiler_options == {}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps compile as if these devices were GPUs; a list of who asked, with what."""
    calls: list[Any] = []

    def options(platform: str, shards: int, **how: bool) -> dict[str, Any]:
        calls.append((platform, shards))
        return compiler_options("gpu", shards, **how)

    monkeypatch.setattr(program, "compiler_options", options)
    return calls


def test_a_call_and_a_lowered_step_have_the_same(monkeypatch: pytest.MonkeyPatch):
    # XLA refuses an unknown option where it gets it, and only there.
    monkeypatch.setattr(program, "compiler_options", lambda *_, **__: {"xla_no_such": 1})
    step = make()
    state = step.init(PARAMS)
    for compiled in (step.lower(state, BATCH).compile, lambda: step(state, BATCH)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such"):
            compiled()


def test_a_step_runs_with_them_alone_and_within_a_jit(asked: list[Any]):
    step = make()
    assert asked == [("cpu", 8)]
    assert step.compiler_options == compiler_options("gpu", 8)
    own, outer = lambda s, x: step(s, x), {"compiler_options": step.compiler_options}
    # JAX refuses options of an inner jit.
    for run in (step, jax.jit(own, **outer), jax.jit(own)):
        assert run(step.init(PARAMS), BATCH)[1]["loss"] == 64


def test_shards_are_those_that_reduce_together(asked: list[Any]):
    make(group_assignment=GROUPS)
    assert asked == [("cpu", 4)]


def layers(
    w: jax.Array, x: jax.Array, *, checkpoint: bool = True, in_a_loop: bool = False
) -> jax.Array:
    """The loss of a scan over layers, or of two runs of one in a loop."""
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    run = lambda x: jax.lax.scan(jax.checkpoint(layer) if checkpoint else layer, x, w)[0]
    if in_a_loop:
        run, once = (lambda x: jax.lax.scan(lambda x, _: (once(x), None), x, None, 2)[0]), run
    return jnp.mean(run(x) ** 2)


@pytest.mark.parametrize(
    ("how", "options", "flags", "chosen"),
    [
        ({}, {}, "", True),
        ({}, {"nonfinite": "quarantine"}, "", True),
        # XLA would carry what the backward pass reads from one copy to the next.
        ({"checkpoint": False}, {}, "", False),
        ({"in_a_loop": True}, {}, "", False),
        ({}, {"accumulate_steps": 2}, "", False),
        # One program for 8 shards, and another for fewer, would have other bits.
        ({}, {"virtual_shards": 8}, "", False),
        # The level sets these, whatever a flag says.
        ({}, {}, "--xla_gpu_enable_while_loop_double_buffering=false", False),
        ({}, {}, f"--{SCHEDULER}=false", False),
    ],
)
def test_a_scan_over_checkpoints_is_compiled_at_a_higher_level(
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, Any],
    options: dict[str, Any],
    flags: str,
    chosen: bool,
):
    monkeypatch.setenv("XLA_FLAGS", flags)
    traced: list[int] = []

    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        traced.append(1)
        return layers(w, x, **how)

    params, given = jnp.full((3, 8, 8), 0.1), (loss_fn, optax.sgd(0.1))
    step = crossshard.make_train_step(*given, num_shards=8, **options)
    assert LEVEL not in step.compiler_options
    state, metrics = step(step.init(params), BATCH)
    assert (LEVEL in step.compiler_options) == chosen
    times = len(traced)
    loss = step(state, BATCH)[1]["loss"]
    assert len(traced) == times
    # Compiled on CPUs the options change nothing.
    monkeypatch.setattr(program, "compiler_options", lambda *_, **__: {})
    traced.clear()
    plain = crossshard.make_train_step(*given, num_shards=8, **options)
    state, expected = plain(plain.init(params), BATCH)
    assert (metrics["loss"], loss) == (expected["loss"], plain(state, BATCH)[1]["loss"])
    # Looking at the program has not traced the loss once more.
    assert times == len(traced)


def test_a_level_of_the_user_stays(asked: list[Any]):
    jax.config.update("jax_optimization_level", "O0")
    try:
        step = crossshard.make_train_step(layers, optax.sgd(0.1), num_shards=8)
        step.lower(step.abstract_init(jnp.ones((3, 8, 8))), BATCH)
        assert step.compiler_options.keys() == {SCHEDULER, THRESHOLD}
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
