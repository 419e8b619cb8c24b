"""A save keeps the loop waiting neither for a copy of the state nor for its _hash."""

import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from crossshard import Checkpoints, _hash
from crossshard.checkpoints.storage import leaves_of, to_disk
from crossshard.step.train_step import layout_of
from tests.checkpoints.common import PARAMS, XS, arrays, check_same_bits, step_on, trained


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_what_is_on_disk_as_it_lies_is_not_copied(update: str):
    step = step_on(4, update)
    state = trained(step, 1)
    layout = layout_of(step, state)
    pointers = lambda x: {part.data.unsafe_buffer_pointer() for part in x.addressable_shards}
    copied = [
        leaf.path
        for leaf, x in zip(leaves_of(layout, state, 4), jax.tree.leaves(state), strict=True)
        if not pointers(to_disk(leaf, x)) <= pointers(x)
    ]
    # Only what is padded in the state.
    odd = [".opt_state.inner_state[0].trace['odd']"]
    assert copied == (odd if update == "sharded" else [])


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_the_next_steps_do_not_wait_for_the_hashes_nor_change_what_is_written(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    step, own, go = step_on(4, update), _hash._on_host, threading.Event()

    def slow(*args: Any) -> Any:
        assert go.wait(60)
        return own(*args)

    monkeypatch.setattr(_hash, "_on_host", slow)
    state = trained(step, 1)
    expected = arrays(step, state)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state)
        for x in XS[1:4]:
            state, _ = step(state, x)
        jax.block_until_ready(state)
        assert checkpoints.steps() == []
        go.set()
        checkpoints.wait()
    found, _ = Checkpoints(tmp_path, step).restore_latest(step.abstract_init(PARAMS))
    check_same_bits(arrays(step, found), expected)


def test_the_first_save_finds_compiled_what_copies_the_state(tmp_path: Path):
    # A number of shards with which no other test saves, so that nothing is compiled before.
    step, compiled = step_on(7), list[str]()

    def listen(event: str, _: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(threading.current_thread().name)

    with Checkpoints(tmp_path, step) as checkpoints:
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            assert checkpoints.restore_latest(step.abstract_init(PARAMS)) is None
            for thread in threading.enumerate():
                if thread.name == "crossshard":
                    thread.join()
            assert "crossshard" in compiled
            state, _ = step(step.init(PARAMS), XS[0][:14])
            compiled.clear()
            checkpoints.save(state)
            assert compiled == []
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("spec", [(), ("data",), (None, "model"), ("model", "data")], ids=str)
def test_devices_are_asked_for_the_same_hash_whatever_mesh_the_user_has_set(
    spec: Any, monkeypatch: pytest.MonkeyPatch
):
    # The way of accelerators.
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    x = jax.device_put(XS[0], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    expected = _hash.hash_of(x)
    monkeypatch.setattr(_hash, "_is_on_host", lambda x: False)
    with jax.set_mesh(jax.make_mesh((8,), ("other",))):
        assert _hash.hash_of(x) == expected
