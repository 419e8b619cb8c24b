"""`plan` on CPU devices: its bytes are those counted by hand, and by the compiler."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import crossshard
from crossshard._text import size
from crossshard.errors import ArgumentError
from crossshard.tools.inspection.collectives import Collective
from crossshard.tools.planning import Topology, bytes_across

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
    replicated, sharded, params_sharded = plan.candidates
    assert (plan.parameters, plan.devices) == (BYTES // 4, SHARDS)
    assert [each.weight_update for each in plan.candidates] == ["replicated", "sharded", "sharded"]
    assert [each.params for each in plan.candidates] == ["replicated", "replicated", "sharded"]
    assert params_sharded.name == "params sharded"
    whole = [BYTES, BYTES, (BYTES - 256) // 8 + 256]
    for each, parameters in zip(plan.candidates, whole, strict=True):
        assert each.memory.parameters == parameters
        assert each.compiled
        # XLA combines the all-reduce of the loss with that of an array, so it counts.
        assert each.links.sent == 2 * 7 / 8 * (BYTES + 4)
        assert each.links.across == 0
    # Two moments and a count, of each parameter or of an eighth of it; a bias of 256 bytes is
    # updated by every shard.
    assert replicated.memory.optimizer_state == 2 * BYTES + 4
    assert dict(replicated.links.collectives) == {"all-reduce": 1}
    for each in (sharded, params_sharded):
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


def test_what_is_needed_is_what_the_compiler_says(plan):
    step = crossshard.make_train_step(
        loss_fn, optax.adam(1e-3), num_shards=SHARDS, weight_update="sharded"
    )
    stats = step.lower(step.abstract_init(W), X).compile().memory_analysis()
    use, results = plan.candidates[1].memory, stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert use.temporaries == stats.temp_size_in_bytes
    assert use.needed == stats.argument_size_in_bytes + stats.temp_size_in_bytes + results
    known = use.parameters + use.optimizer_state + use.other
    assert known == stats.argument_size_in_bytes
    # Four rows of the batch, and the rest of the state: a key and a count.
    assert use.other >= 4 * 16 * 4


def test_a_model_of_70_billion_parameters_is_a_matter_of_shapes():
    layers, width = 80, 8192
    names = "replicated; sharded; params sharded"
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
        f"Not compiled, since what a device keeps between steps is more than its memory: {names}."
    )
    assert words in str(found)
    for each, shards in zip(found.candidates, (1, 1, SHARDS), strict=True):
        assert (each.fits, each.compiled) == (False, False)
        assert each.links is None
        assert each.memory.parameters == 4 * found.parameters // shards
        assert f"no, at least {size(-each.memory.left)} too much" in str(found)


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
    params_sharded = 4 * (64 * 64 // 4 + 64)
    assert [each.memory.parameters for each in found.candidates] == [whole, whole, params_sharded]


def test_as_json_and_as_text(plan):
    read = json.loads(plan.to_json())
    assert read["topology"] == "cpu:8"
    first = read["candidates"][0]
    assert first["fits"] is True
    assert first["memory"]["left"] == first["memory"]["available"] - first["memory"]["needed"]
    text = str(plan)
    assert "\nparams sharded " in text
    assert "8.45 kB" in text


REFUSED = {
    "leave out weight_update": {"weight_update": "sharded"},
    "replicated and sharded parameters itself": {"params": "sharded"},
    # Compilers that are not installed, and topologies that there are not.
    r'pip install "crossshard\[tpu\]"': {"topology": "v5e:4x4"},
    r'h100:1x8 needs JAX for CUDA.* pip install "crossshard\[cuda12\]"': {"topology": "h100:1x8"},
    r"no topology 'v9:4x4'\. Known are v5e:4x4": {"topology": "v9:4x4"},
    r"no topology 'h100'\. .* h100:4x8": {"topology": "h100"},
    r"no topology 'h200:4x8'\. .* h100:4x8": {"topology": "h200:4x8"},
    "cpu takes 1 number, as in cpu:8; got 'cpu:2x2'": {"topology": "cpu:2x2"},
    r"no topology 'cpu:0'\. ": {"topology": "cpu:0"},
    r"no topology 3\. ": {"topology": 3},
    "no topology 'v5e:999999x999999'": {"topology": "v5e:999999x999999"},
}


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words, given in REFUSED.items():
        with pytest.raises(ArgumentError, match=words) as raised:
            planned(**given)
        assert "\n" not in str(raised.value)


# What XLA says of libtpu 0.0.52 and JAX 0.10.2 for v5p:4x4x4, after 30 lines of its stack.
UNREADABLE = "INTERNAL: RET_CHECK failure (xla/hlo_instruction.cc:390) async-update should have 1"


def test_a_program_that_cannot_be_read_is_refused_with_one_line_and_quietly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def inspect(program: object) -> None:
        os.write(2, b"*** Begin stack trace ***\n")
        raise jax.errors.JaxRuntimeError(f"{UNREADABLE}\n*** Begin stack trace ***")

    # CPU devices in the place of those that only libtpu describes.
    slice_ = Topology("v5p:2x2x2", 2**30, jax.devices()[:8])
    monkeypatch.setattr("crossshard.tools.planning._topology_of", lambda name: slice_)
    monkeypatch.setattr("crossshard.tools.planning.inspect", inspect)
    words = r"replicated cannot be read for v5p:2x2x2: INTERNAL: RET_CHECK"
    with pytest.raises(ArgumentError, match=words) as caught:
        planned(topology="v5p:2x2x2")
    assert "stack" not in str(caught.value)
    assert "stack" not in capfd.readouterr().err


def test_options_of_the_step_and_the_dtype_of_gathers_for_sharded_parameters(plan):
    narrow = planned(gather_dtype=jnp.bfloat16, accumulate_steps=2, metrics="grad_norm")
    assert all(each.fits for each in narrow.candidates)
    wide, narrow = ([each.links.sent for each in x.candidates] for x in (plan, narrow))
    assert narrow[:2] == wide[:2]
    # An eighth of two matrices of 4096 bytes each is sent by each shard to seven.
    assert wide[2] - narrow[2] == 7 * 2 * 4096 // 8 // 2


def test_groups_have_no_sharded_parameters():
    grouped = crossshard.CrossShardOptimizer(
        optax.sgd(1e-3), group_assignment=[[0, 1, 2, 3], [4, 5, 6, 7]]
    )
    found = planned(optimizer=grouped)
    assert [each.name for each in found.candidates] == ["replicated", "sharded"]
    assert [each.memory.optimizer_state for each in found.candidates] == [0, 0]


# Bytes to other hosts, counted on rings by hand.


@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int
    platform: str = "gpu"
    slice_index: int | None = None


def sent(kind: str, groups: tuple[tuple[int, ...], ...], each: float, devices: list[Device]):
    collective = Collective(
        kind=kind, operands=(), groups=groups, group_size=len(groups[0]), bytes_sent=each,
        scalar_bytes_sent=0, source=None, op_name=None, in_loop=False, in_branch=False, times=1,
        widened=False, asynchronous=False, matrix_products=0, other_kernels=0, name="",
    )  # fmt: skip
    return bytes_across(collective, devices)


def test_bytes_to_other_hosts():
    cluster, everyone = [Device(i // 8) for i in range(32)], (tuple(range(32)),)
    # On a ring over four hosts four of 32 neighbours are on another.
    assert sent("all-reduce", everyone, 3200.0, cluster) == 400
    # Groups of a host stay in it, and groups across leave it.
    inside = tuple(tuple(range(8 * host, 8 * host + 8)) for host in range(4))
    assert sent("all-gather", inside, 10.0, cluster) == 0
    across = tuple(tuple(range(place, 32, 8)) for place in range(8))
    assert sent("all-gather", across, 10.0, cluster) == 10
    # Of eight pairs in a ring one goes to the next host.
    ring = tuple((i, (i + 1) % 32) for i in range(32))
    assert sent("collective-permute", ring, 8.0, cluster) == 1
    # An all-to-all sends to all.
    assert sent("all-to-all", everyone, 31.0, cluster) == pytest.approx(24)
    many = [Device(i // 8) for i in range(256)]
    assert sent("all-to-all", (tuple(range(256)),), 255.0, many) == pytest.approx(248)
    # Hosts of a TPU slice are inside it, and slices are not.
    slices = [Device(i // 4, "tpu", i // 8) for i in range(16)]
    assert sent("all-reduce", (tuple(range(16)),), 16.0, slices) == 2
