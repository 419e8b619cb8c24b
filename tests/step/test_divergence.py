"""Copies that differ between shards are found, named and repaired; clean ones are not accused."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import crossshard
from crossshard import make_train_step
from crossshard.errors import ArgumentError
from crossshard.guards import find_majority
from crossshard.shards.axes import Shards
from tests.quick import deep
from tests.step.common import sgd_step
from tests.step.faults import KINDS, Snapshot, names_of, one_bit

_rng = np.random.default_rng(7)
PARAMS = {
    "kernel": np.float32(_rng.normal(size=(64, 32)) / 8),  # large enough to be split
    "bias": np.float32(_rng.normal(size=(32,))),
    "half": jnp.bfloat16(_rng.normal(size=(3, 5))),
    "table": np.arange(6),  # never trained
}
BATCH = np.float32(_rng.normal(size=(16, 64)))
ODD_AND_EVEN = [[0, 2, 4, 6], [1, 3, 5, 7]]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch @ params["kernel"] + params["bias"] + params["table"].mean() / 10)
    return (hidden**2).mean() + (params["half"].astype(jnp.float32) ** 2).sum()


CLIP = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))
# Optimizer, and further options.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optax.sgd(0.1), {"weight_update": "replicated"}),
    "adamw sharded": (optax.adamw(0.01), {"weight_update": "sharded"}),
    "parts": (optax.adamw(0.01), {"params": "sharded"}),
    "clip, leaf by leaf": (CLIP, {"weight_update": "sharded"}),
    "groups sharded": (
        crossshard.CrossShardOptimizer(optax.adamw(0.01), group_assignment=ODD_AND_EVEN),
        {"weight_update": "sharded"},
    ),
    "stages": (
        optax.adamw(0.01),
        {
            "weight_update": "replicated",
            "loss_scale": "dynamic",
            "metrics": ("grad_norm", "local_grad_norm"),
            "ema": 0.9,
            "accumulate_steps": 2,
        },
    ),
}
MODEL_AXIS = "model axis"


def build(case: str, **options: Any) -> tuple[Any, Any]:
    """A step and its state before the first step."""
    if case == MODEL_AXIS:
        mesh = jax.make_mesh((4, 2), ("data", "model"))
        lie = {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec("model")}
        put = lambda name, x: jax.device_put(x, NamedSharding(mesh, lie.get(name, PartitionSpec())))
        params = {name: put(name, x) for name, x in PARAMS.items()}
        own = {"axis_name": "data", "weight_update": "sharded"}
        step = make_train_step(loss_fn, optax.adamw(0.01), mesh=mesh, **own, **options)
        return step, step.init(params)
    optimizer, own = CASES[case]
    step = make_train_step(loss_fn, optimizer, num_shards=8, **own, **options)
    return step, step.init(PARAMS)


def told(found: crossshard.guards.Divergence) -> tuple[str, list[int], list[int]]:
    """Whether copies differ, on which shards, and of which leaves."""
    word = "undecided" if found.undecided else "diverged" if found.diverged else "clean"
    return word, np.flatnonzero(found.shards).tolist(), np.flatnonzero(found.leaves).tolist()


CLEAN = ("clean", [], [])


def unwatched(step: Any) -> Any:
    """The step, whose findings are read from the metrics: no later call raises."""
    return jax.jit(step.__call__)


def find_faults(case: str, number: int, seed: int, **options: Any) -> None:
    """Inject faults, each into a clean state before a check, and a repair if that is asked for."""
    step, state = build(case, check_divergence=1, **options)
    run = unwatched(step)
    for _ in range(2):
        state, metrics = run(state, BATCH)
        assert told(metrics["divergence"]) == CLEAN
    rng, clean = np.random.default_rng(seed), Snapshot.of(state)
    after, metrics = run(clean.restored(), BATCH)
    undisturbed = Snapshot.of(after)
    assert told(metrics["divergence"]) == CLEAN
    names, leaves = step.compared(state), names_of(state)
    per_shard = 2 if case == MODEL_AXIS else 1
    for index in range(number):
        place, device = rng.integers(len(names)), rng.integers(8)
        fault = KINDS[index % len(KINDS)]
        broken = clean.restored(
            leaves.index(names[place]), jax.devices()[device], lambda x, fault=fault: fault(x, rng)
        )
        after, metrics = run(broken, BATCH)
        expected = ("diverged", [device // per_shard], [place])
        assert told(metrics["divergence"]) == expected, (fault.__name__, names[place])
        if options:
            assert Snapshot.of(after).has_same_bits(undisturbed), (fault.__name__, names[place])


def test_faults_are_found_and_named_and_clean_steps_are_not_accused():
    find_faults("sgd", 15, seed=1)


# The others compile for long, and run in the soak test.
@pytest.mark.parametrize("case", ["groups sharded", deep("parts"), deep(MODEL_AXIS)])
def test_a_repaired_step_has_the_bits_of_an_undisturbed_one(case: str):
    find_faults(case, 10, seed=2, on_divergence="repair")


@pytest.mark.parametrize("case", [*CASES, MODEL_AXIS])
def test_what_is_compared_is_what_several_shards_have(case: str):
    step, state = build(case, check_divergence=7)
    assert "copies compared every 7 steps" in step.describe()
    names = step.compared(state)
    assert {"step", "rng", "frozen['table']", "params['bias']"} <= set(names)
    assert ("params['kernel']" in names) == (case != "parts")
    has = {name: any(name in each for each in names) for name in ("mu['kernel']", "mu['bias']")}
    is_adam = case != "sgd"
    options = CASES[case][1] if case in CASES else {"weight_update": "sharded"}
    params_sharded = "sharded" in options.values()
    assert has == {"mu['kernel']": is_adam and not params_sharded, "mu['bias']": is_adam}


def test_a_worker_of_one_shard_has_nobody_to_compare_with():
    opt = optax.sgd(0.1, 0.9)
    loss = lambda w, x: ((x - w) ** 2).mean()
    step = make_train_step(loss, opt, num_shards=4, sync_every=3, check_divergence=1)
    state = step.init(jnp.ones(3))
    names, run = step.compared(state), unwatched(step)
    for _ in range(2):
        state, metrics = run(state, np.ones((8, 3), np.float32))
    assert told(metrics["divergence"]) == CLEAN
    assert len(metrics["divergence"].leaves) == len(names)
    assert "params" not in names
    # What all have in common is compared still.
    assert {"step", "rng", "opt_state.outer.anchor"} <= set(names)


def on_device(clean: Snapshot, leaf: int, *devices: int) -> Any:
    """The state with a bit flipped in the copies of some devices."""
    for number in devices:
        fault = lambda x, seed=number: one_bit(x, np.random.default_rng(seed))
        clean = Snapshot.of(clean.restored(leaf, jax.devices()[number], fault))
    return clean.restored()


def small(shards: int, **options: Any) -> tuple[Any, Snapshot, int]:
    """A step, its state before the first step, and the leaf of the parameters."""
    step = sgd_step(lambda w, x: ((x - w) ** 2).mean(), 0.1, shards, **options)
    state = step.init(jnp.ones(5))
    return step, Snapshot.of(state), step.compared(state).index("params")


ROWS = np.ones((8, 5), np.float32)


@pytest.mark.parametrize(
    ("shards", "faulty", "word", "named"),
    [(8, (1, 6, 7), "diverged", [1, 6, 7]), (4, (0, 3), "undecided", [0, 1, 2, 3])],
)
def test_several_faulty_shards_are_outvoted(shards: int, faulty: Any, word: str, named: Any):
    step, clean, leaf = small(shards, check_divergence=1)
    found = unwatched(step)(on_device(clean, leaf, *faulty), ROWS)[1]["divergence"]
    assert told(found) == (word, named, [leaf])


def test_of_two_shards_nobody_can_tell_which_is_right():
    step, clean, leaf = small(2, check_divergence=1, on_divergence="repair")
    after, metrics = step(on_device(clean, leaf, 1), ROWS)
    assert told(metrics["divergence"]) == ("undecided", [0, 1], [leaf])
    copies = [np.asarray(shard.data) for shard in after.params.addressable_shards]
    assert not np.array_equal(*copies)
    after, _ = step(after, ROWS)
    with pytest.raises(
        crossshard.errors.DivergenceError, match=r"shard 0.*shard 1.*nobody can tell"
    ):
        step(after, ROWS)


@pytest.mark.parametrize("repair", [False, True])
def test_the_error_or_the_warning_names_shard_and_leaf(repair: bool):
    options = {"on_divergence": "repair"} if repair else {}
    step, clean, leaf = small(8, check_divergence=1, **options)
    state, _ = step(on_device(clean, leaf, 5), ROWS)
    state, _ = step(state, ROWS)
    message = r"step 0 another copy of params .* shard 5 \(device 5 of process 0\)"
    if not repair:
        with pytest.raises(crossshard.errors.DivergenceError, match=message):
            step(state, ROWS)
        assert int(state.step) == 2  # it has not been donated
        return
    with pytest.warns(crossshard.errors.DivergenceWarning, match=message) as warned:
        state, _ = step(state, ROWS)
    assert warned[0].filename == __file__
    # The next ones are quiet.
    for _ in range(3):
        state, _ = step(state, ROWS)


def test_a_fault_is_found_at_the_next_check():
    step, _, leaf = small(8, check_divergence=5)
    state, seen = step.init(jnp.ones(5)), []
    run = unwatched(step)
    for number in range(11):
        if number == 7:
            state = on_device(Snapshot.of(state), leaf, 2)
        state, metrics = run(state, ROWS)
        seen.append((int(metrics["divergence"].step), told(metrics["divergence"])[0]))
    checked = {0: "clean", 5: "clean", 10: "diverged"}
    assert seen == [(n, checked[n]) if n in checked else (-1, "clean") for n in range(11)]


@pytest.mark.parametrize("repair", ["raise", "repair"])
def test_a_wrong_step_count_does_not_leave_the_others_waiting(repair: str):
    # One shard thinks that a comparison is due, or all others do.
    step, _, _ = small(8, check_divergence=8, on_divergence=repair)
    run = unwatched(step)
    for true, wrong in ((3, 8), (8, 9)):
        state = step.init(jnp.ones(5))
        clean = Snapshot.of(state)
        for device in clean.copies[0]:
            clean.copies[0][device] = np.int32(true)
        clean.copies[0][jax.devices()[4]] = np.int32(wrong)
        after, metrics = run(clean.restored(), ROWS)
        found = metrics["divergence"]
        assert told(found) == ("diverged", [4], [0])
        assert int(found.step) == true
        counts = {int(shard.data) for shard in after.step.addressable_shards}
        assert counts == ({true + 1} if repair == "repair" else {true + 1, wrong + 1})


@pytest.mark.parametrize("number", [2, 3])
def test_a_majority_is_more_than_half(number: int):
    # Words whose bits are among those of others, so that the bits alone have a majority.
    words = np.random.default_rng(number).choice(
        np.uint32([0, 1, 3, 7]), size=(number, 200), p=(0.1, 0.6, 0.2, 0.1)
    )
    shards = Shards(number, ("shards",))
    verdict = jax.vmap(lambda own: find_majority(own, shards), axis_name="shards")(words)
    verdict = jax.tree.map(np.asarray, verdict)
    for leaf, column in enumerate(words.T):
        ((most, votes),) = collections.Counter(column.tolist()).most_common(1)
        assert set(verdict.decided[:, leaf].tolist()) == {2 * votes > number}
        assert set(verdict.equal[:, leaf].tolist()) == {votes == number}
        if 2 * votes > number:
            assert verdict.healthy[:, leaf].tolist() == (column == most).tolist()


# A step that is taken twice: the same bits if nothing is at fault, and names if something is.


def test_a_step_without_faults_has_the_same_bits_twice():
    step, state = build("stages")
    before = Snapshot.of(state)
    assert step.replay(state, BATCH) == {}
    assert Snapshot.of(state).has_same_bits(before)
    # It is a state of this step still, and the step has not been counted.
    after, _ = step(state, BATCH)
    assert int(after.step) == 1


def with_wrong_arithmetic(step: Any, name: str, device: int) -> None:
    """Makes a device compute one bit of one array wrongly, the second time that the step runs."""
    run, runs = step._program, []

    def wrong(state: Any, batch: Any) -> Any:
        after, metrics = run(state, batch)
        runs.append(name)
        if len(runs) != 2:
            return after, metrics
        fault = lambda x: one_bit(x, np.random.default_rng(1))
        leaf = names_of(after).index(name)
        broken = Snapshot.of(after).restored(leaf, jax.devices()[device], fault)
        return broken, metrics

    step._program = wrong


@pytest.mark.parametrize(
    ("case", "name", "device", "shard"),
    [
        # A slice that no other shard has.
        ("adamw sharded", "opt_state.inner_state[0].mu['kernel']", 3, 3),
        (MODEL_AXIS, "opt_state.inner_state[0].nu['kernel']", 5, 2),
    ],
)
def test_what_differs_is_named_with_its_shard(case: str, name: str, device: int, shard: int):
    step, state = build(case)
    with_wrong_arithmetic(step, name, device)
    assert step.replay(state, BATCH) == {name: (shard,)}
    assert step.replay(state, BATCH) == {}


def test_it_is_refused_where_jax_traces():
    step, state = build("sgd")
    with pytest.raises(ArgumentError, match="outside of"):
        jax.jit(lambda state: step.replay(state, BATCH) and 1.0)(state)


def test_a_comparison_does_not_meet_what_groups_and_workers_send():
    """On CPUs the program ended by a signal, or stood still."""

    def weighted(params: Any, batch: Any) -> Any:
        losses = ((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - 1) ** 2).mean(1)
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    rng = np.random.default_rng(0)
    shapes = {"a": (7, 301), "b": (301, 13)}
    params = {name: np.float32(rng.normal(size=shape) / 4) for name, shape in shapes.items()}
    batches = [{"x": rng.normal(size=(24, 7)), "mask": np.ones(24)} for _ in range(4)]
    options: dict[str, Any] = {"sync_every": 2, "accumulate_steps": 2, "weight": "mask"}
    optimizer = crossshard.CrossShardOptimizer(optax.sgd(0.1), group_assignment=[[0, 2], [1, 3]])
    found = []
    for compared in ({}, {"check_divergence": 1}):
        step = make_train_step(weighted, optimizer, num_shards=4, **options, **compared)
        state = step.init(params)
        for batch in batches:
            state, metrics = step(state, batch)
        found.append(jax.device_get((step.model(state, shard=0), metrics["loss"])))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("on_divergence", ["raise", "repair"])
def test_a_step_that_seldom_compares_keeps_its_state_in_place(on_divergence: str):
    loss = lambda w, x: ((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2).mean()
    params = {"a": np.ones((64, 512), np.float32), "b": np.ones((512, 64), np.float32)}
    rows, size = np.ones((16, 64), np.float32), 3 * 2 * 4 * 64 * 512

    def temporary(**options: Any) -> int:
        step = make_train_step(
            loss, optax.adam(0.1), num_shards=2, weight_update="replicated", **options
        )
        compiled = step.lower(step.abstract_init(params), rows).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    more = temporary(check_divergence=100, on_divergence=on_divergence) - temporary()
    assert more < 0.1 * size
