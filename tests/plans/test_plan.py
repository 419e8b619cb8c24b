"""`crossshard.plan` on CPU devices: its bytes are those counted by hand, and by the compiler."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.plans import machine
from crossshard.plans.estimate import on_this_machine

SHARDS = 8
W = {
    "up": jax.ShapeDtypeStruct((16, 64), jnp.float32),
    "down": jax.ShapeDtypeStruct((64, 16), jnp.float32),
    "bias": jax.ShapeDtypeStruct((64,), jnp.float32),
}
# 4 bytes for each of 16 · 64 + 64 · 16 + 64 parameters.
BYTES = 8448
X = jax.ShapeDtypeStruct((32, 16), jnp.float32)


MACHINE = machine.Machine(
    devices=SHARDS,
    products=[(1e3, 1e-6), (1e6, 1e-4), (1e9, 1e-1)],
    memory=[(1e3, 1e-6), (1e6, 1e-4), (1e9, 1e-1)],
    fresh=[(1e3, 1e-6), (1e6, 1e-3), (1e9, 1.0)],
    operation=1e-9,
    transcendental=1e-8,
    kernel=1e-6,
    collectives={
        kind: [(1e5, 1e-4), (1e8, 1e-1)] for kind in ("all-reduce", "reduce-scatter", "all-gather")
    },
    call=1e-4,
    array=1e-5,
)


@pytest.fixture(autouse=True, scope="module")
def known_machine():
    """Figures that nobody has to measure: what is tested here is no time."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("compile", "planning"):
            patch.setattr(f"crossshard.plans.{module}.measured", lambda number: MACHINE)
        yield


def loss_fn(w, x):
    return jnp.mean((jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"] - x) ** 2)


def planned(**changed):
    given = {"params": W, "batch": X, "optimizer": optax.adam(1e-3), "topology": f"cpu:{SHARDS}"}
    return crossshard.plan(loss_fn, **{**given, **changed})


@pytest.fixture(scope="module")
def plan():
    return planned()


def test_the_bytes_are_those_counted_by_hand(plan):
    replicated, sharded = plan.candidates
    assert (plan.parameters, plan.devices) == (BYTES // 4, SHARDS)
    assert (replicated.weight_update, sharded.weight_update) == ("replicated", "sharded")
    assert dict(replicated.mesh) == {"data": SHARDS}
    for each in plan.candidates:
        assert each.memory.parameters == each.memory.gradients == BYTES
        # XLA combines the all-reduce of the loss with that of an array, so it counts.
        assert each.links.sent == 2 * 7 / 8 * (BYTES + 4)
        assert dict(each.links.by_link) == {"inside a host": pytest.approx(each.links.sent)}
        # Forward, and backward for both weights and the hidden layer; four rows on each shard.
        assert each.flops == 2 * 4 * 16 * 64 * 5
    # Two moments and a count, of each parameter or of an eighth of it; a bias of 256 bytes is
    # updated by every shard.
    assert replicated.memory.optimizer_state == 2 * BYTES + 4
    assert sharded.memory.optimizer_state == 2 * (BYTES - 256) // 8 + 2 * 256 + 4
    assert dict(replicated.links.collectives) == {"all-reduce": 1}
    assert {"all-gather", "reduce-scatter"} <= set(sharded.links.collectives)


def test_sgd_has_no_state():
    for each in planned(optimizer=optax.sgd(0.1)).candidates:
        assert each.memory.optimizer_state == 0


def test_what_is_needed_is_what_the_compiler_says(plan):
    for each in plan.candidates:
        step = crossshard.make_train_step(
            loss_fn, optax.adam(1e-3), num_shards=SHARDS, weight_update=each.weight_update
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


@pytest.mark.deep
def test_a_model_that_is_split():
    specs = {"up": P(None, "model"), "down": P("model", None), "bias": P("model")}
    found = planned(model_specs=specs)
    meshes = [tuple(each.mesh.items()) for each in found.candidates[::2]]
    assert meshes == [
        (("data", 8),),
        (("data", 4), ("model", 2)),
        (("data", 2), ("model", 4)),
        (("data", 1), ("model", 8)),
    ]
    for each in found.candidates:
        assert each.memory.parameters == BYTES // each.mesh.get("model", 1)
    by_function = planned(model_specs=lambda path, leaf: specs[path[0].key])
    assert [each.memory for each in by_function.candidates] == [
        each.memory for each in found.candidates
    ]


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
    assert found.recommended is None
    assert "None fits" in found.why
    for each in found.candidates:
        assert not each.fits
        assert each.memory.parameters == 4 * found.parameters


def test_a_module_of_flax_that_is_never_made():
    def make():
        return nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    found = crossshard.plan(
        lambda model, x: jnp.mean(model(x) ** 2),
        make,
        lambda devices: jax.ShapeDtypeStruct((2 * devices, 16), jnp.float32),
        optax.sgd(0.1),
        topology="cpu:4",
    )
    assert found.parameters == 16 * 17
    assert [each.memory.parameters for each in found.candidates] == [4 * 16 * 17] * 2


def test_the_recommended_one_fits_and_is_the_fastest_or_as_fast(plan):
    chosen = plan.candidates[plan.recommended]
    fastest = min(each.seconds.step for each in plan.candidates)
    assert chosen.fits
    assert chosen.seconds.step <= 1.05 * fastest
    assert chosen.name in plan.why


def test_the_memory_that_a_call_takes_has_its_time():
    found = on_this_machine(MACHINE, [], [], [], arrays=2, fresh=10**6)
    assert found.memory == pytest.approx(1e-3)
    assert found.step == pytest.approx(1e-3 + MACHINE.call + 2 * MACHINE.array)


def test_as_json_and_as_text(plan):
    read = json.loads(plan.to_json())
    assert read["topology"] == "cpu:8"
    first = read["candidates"][0]
    assert first["fits"] is True
    assert first["memory"]["left"] == first["memory"]["available"] - first["memory"]["needed"]
    assert first["seconds"]["step"] == pytest.approx(
        sum(first["seconds"][key] for key in ("compute", "memory", "communication", "calls"))
    )
    text = str(plan)
    assert "data 8, sharded" in text
    assert "8.45 kB" in text
    assert "estimates" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v9:4x4", "v5e:4x4"),
        ("h100", "h100:4x8"),
        ("cpu:2x2", "one number"),
        ("cpu:0", "cpu:8"),
        (3, "cpu:8"),
        ("v5e:999999x999999", "v5e:4x4"),
    ],
)
def test_a_wrong_topology_is_refused_with_those_that_are_known(name, words):
    with pytest.raises(ArgumentError, match=words) as raised:
        planned(topology=name)
    assert "\n" not in str(raised.value)
    assert str(name) in str(raised.value)


@pytest.mark.parametrize(("name", "extra"), [("v5e:4x4", "tpu"), ("h100:1x8", "gpus")])
def test_a_compiler_that_is_not_installed(name, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=rf'pip install "crossshard\[{extra}\]"'):
        planned(topology=name)


def test_what_the_plan_chooses_itself_is_refused():
    with pytest.raises(ArgumentError, match="leave out weight_update"):
        planned(weight_update="sharded")


def test_specs_that_do_not_fit():
    with pytest.raises(ArgumentError, match=r"params\['up'\].*cannot be split"):
        planned(
            model_specs={"up": P("model"), "down": P(), "bias": P()},
            params={**W, "up": jax.ShapeDtypeStruct((15, 64), jnp.float32)},
        )
    with pytest.raises(ArgumentTypeError, match="like params"):
        planned(model_specs={"up": P()})


def test_options_of_the_step():
    found = planned(accumulate_steps=2, metrics="grad_norm", reduce_dtype=jnp.bfloat16)
    assert len(found.candidates) == 2
    assert np.isfinite(found.candidates[0].seconds.step)


def test_the_demo_says_how_its_model_may_be_split():
    from crossshard.plans.choices import choices
    from crossshard.plans.topology import topology
    from crossshard.plans.work import make_work
    from examples.byte_lm.planned import planned

    for split, meshes in ((False, 1), (True, 4)):
        given = planned(layers=1, width=64, split=split)
        specs, has_aux = given.pop("model_specs"), given.pop("has_aux")
        work = make_work(**given, model_specs=specs, options={"has_aux": has_aux})
        assert len(choices(work, topology("cpu:8"))) == 2 * meshes
        assert work.batch(6)["read"].shape == (18, 64)
