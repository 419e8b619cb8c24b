"""`plan` on CPU devices: its bytes are those counted by hand, and by the compiler."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import crossshard
from crossshard._text import size
from crossshard.errors import ArgumentError

SHARDS = 8
W = {
    "up": jax.ShapeDtypeStruct((16, 64), jnp.float32),
    "down": jax.ShapeDtypeStruct((64, 16), jnp.float32),
    "bias": jax.ShapeDtypeStruct((64,), jnp.float32),
}
# 4 bytes for each of 16 · 64 + 64 · 16 + 64 parameters.
BYTES = 8448
X = jax.ShapeDtypeStruct((32, 16), jnp.float32)


def loss_fn(w, x):
    return jnp.mean((jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"] - x) ** 2)


def planned(**changed):
    given = {"params": W, "batch": X, "optimizer": optax.adam(1e-3), "topology": f"cpu:{SHARDS}"}
    return crossshard.plan(loss_fn, **{**given, **changed})


@pytest.fixture(scope="module")
def plan():
    return planned()


def test_the_bytes_are_those_counted_by_hand(plan):
    replicated, sharded, in_parts = plan.candidates
    assert (plan.parameters, plan.devices) == (BYTES // 4, SHARDS)
    assert [each.weight_update for each in plan.candidates] == ["replicated", "sharded", "sharded"]
    assert [each.params for each in plan.candidates] == ["replicated", "replicated", "sharded"]
    assert in_parts.name == "data 8, in parts"
    assert dict(replicated.mesh) == {"data": SHARDS}
    whole = [BYTES, BYTES, (BYTES - 256) // 8 + 256]
    for each, parameters in zip(plan.candidates, whole, strict=True):
        assert each.memory.parameters == each.memory.gradients == parameters
        assert each.compiled
        # XLA combines the all-reduce of the loss with that of an array, so it counts.
        assert each.links.sent == 2 * 7 / 8 * (BYTES + 4)
        assert dict(each.links.by_link) == {"inside a host": pytest.approx(each.links.sent)}
    # Two moments and a count, of each parameter or of an eighth of it; a bias of 256 bytes is
    # updated by every shard.
    assert replicated.memory.optimizer_state == 2 * BYTES + 4
    assert dict(replicated.links.collectives) == {"all-reduce": 1}
    for each in (sharded, in_parts):
        assert each.memory.optimizer_state == 2 * (BYTES - 256) // 8 + 2 * 256 + 4
        assert {"all-gather", "reduce-scatter"} <= set(each.links.collectives)


def test_of_a_batch_devices_have_parts_along_its_axis_and_whole_entries():
    batch = {"x": jax.ShapeDtypeStruct((16, 32), jnp.float32), "table": X, "scale": 2.0}
    loss = lambda w, b: b["scale"] * loss_fn(w, b["x"].T) + jnp.abs(b["table"]).mean()
    found = crossshard.plan(
        loss,
        W,
        batch,
        optax.adam(1e-3),
        topology=f"cpu:{SHARDS}",
        batch_axis={"x": 1, "table": None, "scale": None},
    )
    # Of two arrays of 2,048 bytes one is split; beside them a number, a count and a key.
    assert {each.compiled for each in found.candidates} == {True}
    other = found.candidates[0].memory.other
    assert 2048 // SHARDS + 2048 <= other < 2048 // SHARDS + 2048 + 64


def test_sgd_has_no_state():
    for each in planned(optimizer=optax.sgd(0.1)).candidates:
        assert each.memory.optimizer_state == 0


def test_what_is_needed_is_what_the_compiler_says(plan):
    for each in plan.candidates:
        step = crossshard.make_train_step(
            *(loss_fn, optax.adam(1e-3)),
            num_shards=SHARDS,
            weight_update=each.weight_update,
            params=each.params,
        )
        stats = step.lower(step.abstract_init(W), X).compile().memory_analysis()
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        assert each.memory.temporaries == stats.temp_size_in_bytes
        assert each.memory.needed == (
            stats.argument_size_in_bytes + stats.temp_size_in_bytes + results
        )
        use = each.memory
        known = use.parameters + use.optimizer_state + use.other
        assert known == stats.argument_size_in_bytes
        # Four rows of the batch, and the rest of the state: a key and a count.
        assert use.other >= 4 * 16 * 4


def test_a_model_of_70_billion_parameters_is_a_matter_of_shapes():
    layers, width = 80, 8192
    big = jax.ShapeDtypeStruct((layers, 13 * width, width), jnp.float32)

    def loss_fn(w, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.T)[:, :width] @ w[:width], None), x, w)
        return jnp.mean(x**2)

    found = crossshard.plan(
        loss_fn,
        big,
        jax.ShapeDtypeStruct((SHARDS, width), jnp.float32),
        optax.adam(1e-3),
        topology=f"cpu:{SHARDS}",
    )
    assert found.parameters == 80 * 13 * 8192**2  # 69.8 billion
    # By their state alone: they are not compiled, and may need more.
    words = (
        f"Not compiled, since what a device keeps between steps is more than its memory: {NAMES}."
    )
    assert words in str(found)
    for each, shards in zip(found.candidates, (1, 1, SHARDS), strict=True):
        assert (each.fits, each.compiled) == (False, False)
        assert each.links is None
        assert each.memory.parameters == 4 * found.parameters // shards
        assert f"no, at least {size(-each.memory.left)} too much" in str(found)


NAMES = "data 8, replicated; data 8, sharded; data 8, in parts"


def test_a_module_of_flax_that_is_never_made():
    def make():
        return nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    found = crossshard.plan(
        lambda model, x: jnp.mean(model(x) ** 2),
        make,
        lambda devices: jax.ShapeDtypeStruct((2 * devices, 64), jnp.float32),
        optax.sgd(0.1),
        topology="cpu:4",
    )
    assert found.parameters == 64 * 65
    # In parts the bias stays whole, since it is tiny.
    whole = 4 * 64 * 65
    in_parts = 4 * (64 * 64 // 4 + 64)
    assert [each.memory.parameters for each in found.candidates] == [whole, whole, in_parts]


def test_as_json_and_as_text(plan):
    read = json.loads(plan.to_json())
    assert read["topology"] == "cpu:8"
    first = read["candidates"][0]
    assert first["fits"] is True
    assert first["memory"]["left"] == first["memory"]["available"] - first["memory"]["needed"]
    text = str(plan)
    assert "data 8, sharded" in text
    assert "8.45 kB" in text


TOPOLOGIES = {
    "v9:4x4": "v5e:4x4",
    "h100": "h100:4x8",
    "cpu:2x2": "one number",
    "cpu:0": "cpu:8",
    3: "cpu:8",
    "v5e:999999x999999": "v5e:4x4",
}


def test_a_wrong_topology_is_refused_with_those_that_are_known():
    for name, words in TOPOLOGIES.items():
        with pytest.raises(ArgumentError, match=words) as raised:
            planned(topology=name)
        assert "\n" not in str(raised.value)
        assert str(name) in str(raised.value)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        # Compilers that are not installed.
        ({"topology": "v5e:4x4"}, ArgumentError, r'pip install "crossshard\[tpu\]"'),
        ({"topology": "h100:1x8"}, ArgumentError, r'pip install "crossshard\[cuda12\]"'),
        # What the plan chooses itself.
        ({"weight_update": "sharded"}, ArgumentError, "leave out weight_update"),
        ({"params": "sharded"}, ArgumentError, "replicated and sharded parameters itself"),
    ],
)
def test_what_is_refused(given, error, words, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(error, match=words):
        planned(**given)


def test_options_of_the_step():
    found = planned(accumulate_steps=2, metrics="grad_norm", reduce_dtype=jnp.bfloat16)
    assert len(found.candidates) == 3
    assert all(each.fits for each in found.candidates)


def test_the_dtype_of_gathers_is_for_parameters_in_parts():
    # An eighth of two matrices of 4096 bytes each is sent by each shard to seven.
    wide, narrow = planned(), planned(gather_dtype=jnp.bfloat16)
    sent = lambda found: [each.links.sent for each in found.candidates]
    assert sent(narrow)[:2] == sent(wide)[:2]
    assert sent(wide)[2] - sent(narrow)[2] == 7 * 2 * 4096 // 8 // 2


def test_groups_have_no_parameters_in_parts():
    grouped = crossshard.CrossShardOptimizer(
        optax.adam(1e-3), group_assignment=[[0, 1, 2, 3], [4, 5, 6, 7]]
    )
    found = planned(optimizer=grouped)
    assert [each.name for each in found.candidates] == ["data 8, replicated", "data 8, sharded"]
