"""A step that finds one device, where it was asked for no number of shards, says so."""

import subprocess
import sys

import jax
import optax
import pytest

import crossshard
from crossshard.shards import devices

ONE = """
import {first}, jax, jax.numpy as jnp, optax
import crossshard

loss = lambda w, x: jnp.mean((x @ w) ** 2)
for optimizer in (optax.sgd(0.1), optax.adam(0.1)):
    step = crossshard.make_train_step(loss, optimizer)
    state, metrics = step(step.init(jnp.ones(3)), jnp.ones((4, 3)))
print(metrics["loss"])
"""


# Orbax loads absl, which may take over what is logged.
@pytest.mark.parametrize(
    "first", ["math", pytest.param("orbax.checkpoint", marks=pytest.mark.deep)]
)
def test_one_device_is_told_in_one_line_and_once(first: str):
    run = [sys.executable, "-W", "error", "-c", ONE.format(first=first)]
    clean = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run(run, env=clean, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "9.0\n")
    (line,) = ended.stderr.splitlines()
    assert "crossshard trains on one shard: JAX found one device (cpu)." in line
    for way in ("crossshard.cpu_devices(8)", "crossshard doctor", "num_shards=1"):
        assert way in line


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """What is said when a step is made with some options; JAX has found so many devices."""
    found = jax.devices()

    def of(number: int, **options) -> str:
        monkeypatch.setattr(jax, "devices", lambda *_: found[:number])
        monkeypatch.setattr(jax, "device_count", lambda *_: number)
        devices.shard_mesh.cache_clear()
        devices._log_one_shard.cache_clear()
        caplog.clear()
        crossshard.make_train_step(lambda w, x: (x @ w).mean(), optax.sgd(0.1), **options)
        return caplog.text

    yield of
    devices.shard_mesh.cache_clear()


def test_one_device_is_told_only_where_no_number_is_asked_for(told):
    (one,) = jax.devices()[:1]
    assert "one shard" in told(1)
    assert not told(1, num_shards=1)
    assert not told(1, mesh=jax.sharding.Mesh([one], ("data",)))
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=[one])):
        assert not told(1)
    assert not told(2)


def test_beside_a_gpu_nothing_is_said_of_virtual_devices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Gpu:
        platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"

    devices._log_one_shard.cache_clear()
    monkeypatch.setattr(jax, "devices", lambda: [Gpu])
    devices._log_one_shard()
    assert "(NVIDIA H100 80GB HBM3). For more: crossshard.distributed.initialize()" in caplog.text
    assert "cpu_devices" not in caplog.text
