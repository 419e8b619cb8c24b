"""A libtpu that is not the one of this JAX is named where it fails, and only there."""

import importlib.metadata
import os

import jax
import jax.numpy as jnp
import optax
import pytest

import crossshard
from crossshard.errors import ArgumentError
from crossshard.tools.planning.topology import Topology, other_libtpu

JAX = ["jaxlib<=0.10.2", 'libtpu==0.0.42.*; extra == "tpu"', 'requests; extra == "tpu"']
# What XLA says of libtpu 0.0.52 and JAX 0.10.2 for v5p:4x4x4, after 30 lines of its stack.
UNREADABLE = "INTERNAL: RET_CHECK failure (xla/hlo_instruction.cc:390) async-update should have 1"


def installed(monkeypatch: pytest.MonkeyPatch, libtpu: str | None, lines: list[str] = JAX) -> None:
    def version(name: str) -> str:
        if libtpu is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return libtpu

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)


def test_another_one_is_named_with_what_to_install_and_the_pinned_one_is_fine(
    monkeypatch: pytest.MonkeyPatch,
):
    pinned = importlib.metadata.requires("jax") or []
    for version in ("0.0.42.1", "0.0.42", None):
        installed(monkeypatch, version)
        assert other_libtpu() is None, version
    for version in ("0.0.52", "0.0.4", "0.0.420"):
        installed(monkeypatch, version)
        words = f"libtpu {version} is installed, and JAX {jax.__version__} is released with"
        assert other_libtpu() == f'{words} 0.0.42: pip install "crossshard[tpu]"'
        installed(monkeypatch, version, ["jaxlib<=0.10.2"])
        assert other_libtpu() is None
    # What this JAX says is understood.
    installed(monkeypatch, "0", pinned)
    assert "0 is installed" in (other_libtpu() or "")


def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def inspect(program: object) -> None:
        os.write(2, b"*** Begin stack trace ***\n")
        raise jax.errors.JaxRuntimeError(f"{UNREADABLE}\n*** Begin stack trace ***")

    # CPU devices in the place of those that only libtpu describes.
    slice_ = Topology("v5p:2x2x2", 2**30, jax.devices()[:8])
    monkeypatch.setattr("crossshard.tools.planning.plan.topology_of", lambda name: slice_)
    monkeypatch.setattr("crossshard.tools.planning.plan.inspect", inspect)
    w, x = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    crossshard.plan(loss, w, x, optax.sgd(0.1), topology="v5p:2x2x2")


def test_a_program_that_cannot_be_read_names_it_quietly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    installed(monkeypatch, "0.0.52")
    words = r"replicated cannot be read for v5p:2x2x2: libtpu 0.0.52 .*\[tpu\].*\(INTERNAL: RET"
    with pytest.raises(ArgumentError, match=words) as caught:
        planned(monkeypatch)
    assert "stack" not in str(caught.value)
    assert "stack" not in capfd.readouterr().err
    # With the pinned one only the reason is said.
    installed(monkeypatch, "0.0.42.1")
    with pytest.raises(ArgumentError, match=r"cannot be read for v5p:2x2x2: INTERNAL: RET_CHECK"):
        planned(monkeypatch)
