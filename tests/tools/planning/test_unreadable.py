"""A program that its compiler cannot read is refused with one line, and quietly."""

import os

import jax
import jax.numpy as jnp
import optax
import pytest

import crossshard
from crossshard.errors import ArgumentError
from crossshard.tools.planning.topology import Topology

# What XLA says of libtpu 0.0.52 and JAX 0.10.2 for v5p:4x4x4, after 30 lines of its stack.
UNREADABLE = "INTERNAL: RET_CHECK failure (xla/hlo_instruction.cc:390) async-update should have 1"


def test_a_program_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def inspect(program: object) -> None:
        os.write(2, b"*** Begin stack trace ***\n")
        raise jax.errors.JaxRuntimeError(f"{UNREADABLE}\n*** Begin stack trace ***")

    # CPU devices in the place of those that only libtpu describes.
    slice_ = Topology("v5p:2x2x2", 2**30, jax.devices()[:8])
    monkeypatch.setattr("crossshard.tools.planning.plan.topology_of", lambda name: slice_)
    monkeypatch.setattr("crossshard.tools.planning.plan.inspect", inspect)
    w, x = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    words = r"replicated cannot be read for v5p:2x2x2: INTERNAL: RET_CHECK"
    with pytest.raises(ArgumentError, match=words) as caught:
        crossshard.plan(loss, w, x, optax.sgd(0.1), topology="v5p:2x2x2")
    assert "stack" not in str(caught.value)
    assert "stack" not in capfd.readouterr().err
