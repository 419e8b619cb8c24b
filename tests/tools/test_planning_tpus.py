"""Plans for TPU slices, where libtpu is installed: bytes by hand, quietly, two at once."""

import concurrent.futures
import importlib.util
import json
from pathlib import Path

import pytest

from tests.tools.command import process

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

# Three matrices, AdamW; 4 · 3 · 1024² bytes. With 4,096 rows, which 4,096 shards divide.
TRAIN = """
import jax, jax.numpy as jnp, optax

def make():
    w = [jax.ShapeDtypeStruct((4096, 256), jnp.float32)] * 3

    def loss_fn(w, x):
        return sum(jnp.mean(jnp.tanh((n + x) @ each) ** 2) for n, each in enumerate(w))

    rows = lambda devices: jax.ShapeDtypeStruct((8 * devices, 4096), jnp.float32)
    return {"loss_fn": loss_fn, "params": w, "batch": rows, "optimizer": optax.adam(1e-3)}

def large():
    given = make()
    return {**given, "params": [jax.ShapeDtypeStruct((4096, 2**18), jnp.float32)],
            "loss_fn": lambda w, x: jnp.mean((x @ w[0]) ** 2)}
"""
BYTES = 4 * 3 * 1024**2


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    ended = process(folder, "plan", *words)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tpus")
    (folder / "train.py").write_text(TRAIN)
    return folder


def planned(folder: Path, topology: str, name: str = "make", code: int = 0):
    returned, out, errors = run(folder, f"train:{name}", "--topology", topology, "--json")
    assert (returned, errors) == (code, "")
    return json.loads(out)


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_a_single_chip_sends_nothing(folder, topology):
    found = planned(folder, topology)
    (alone,) = found["candidates"]
    assert (found["devices"], alone["links"]["sent"]) == (1, 0)
    assert alone["memory"]["parameters"] == BYTES


@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:8x8", "v5p:4x4x4", "v5p:16x16x16"])
def test_the_bytes_are_those_counted_by_hand(folder, topology):
    found = planned(folder, topology)
    chips = found["devices"]
    bound = 2 * (chips - 1) / chips * BYTES
    replicated, sharded, params_sharded = found["candidates"]
    assert params_sharded["memory"]["parameters"] == BYTES // chips
    for each in (replicated, sharded):
        assert each["memory"]["parameters"] == BYTES
    # XLA sums in one all-reduce of all. For the v6e it makes the second stage of a sharded step's
    # reduce-scatter an all-reduce.
    assert replicated["links"]["sent"] == pytest.approx(bound, rel=1e-6)
    assert bound <= sharded["links"]["sent"] <= 1.06 * bound
    # XLA for TPUs multiplies in bfloat16, and gathers the matrices so.
    assert 0.75 * bound <= params_sharded["links"]["sent"] <= 0.82 * bound
    assert replicated["memory"]["optimizer_state"] == 2 * BYTES + 4
    for each in (sharded, params_sharded):
        assert each["memory"]["optimizer_state"] == 2 * BYTES // chips + 4
    assert replicated["links"]["across"] == 0


def test_what_the_compiler_refuses_does_not_fit(folder):
    found = planned(folder, "v5e:4x4", "large")
    replicated, sharded, _ = found["candidates"]
    # Parameters, moments and gradients of 4 GiB each, of which the sharded step keeps two.
    assert not replicated["fits"]
    assert sharded["fits"]


def test_two_at_once_are_quiet(folder):
    plan = lambda name: run(folder, "train:make", "--topology", name)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for code, out, errors in pool.map(plan, ("v5e:4x4", "v5p:4x4x4")):
            assert (code, errors) == (0, "")
            assert "params sharded" in out


def test_a_slice_that_does_not_exist_is_refused_in_one_line(folder):
    for name in ("v5e:3x77", "v5p:4x4"):
        code, _, errors = run(folder, "train:make", "--topology", name)
        assert code == 2
        assert len(errors.splitlines()) == 1
        assert "v5p:4x4x4" in errors
