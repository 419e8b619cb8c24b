"""Steps that are right, as users of Optax, Flax, Equinox and Haiku write them, are not accused."""

import pytest

from tests.tools.verification.right import RIGHT
from tests.tools.verification.ways import skip_all_but

# One of each kind; the others with `make soak`.
QUICK = {
    "optax in shard map autodiff sums",
    "jit with split parameters",
    "crossshard stateful idiom",
    "train step with groups",
}
IN_SUITE = QUICK | {
    "optax in bfloat16 with float32 parameters",
    "a contrastive loss over all shards",
    "linen batch norm of each shard in pmap",
    "nnx dropout in nnx jit",
    "equinox filter shard",
    "example linen_batch_norm",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.deep)
        for name in sorted(IN_SUITE)
    ],
)
def test_no_right_step_is_accused(name: str):
    check(name)


@pytest.mark.soak
@pytest.mark.parametrize(("order", "name"), list(enumerate(sorted(set(RIGHT) - IN_SUITE), 1)))
def test_no_other_right_step_is_accused(name: str, order: int, soak_steps: int):
    skip_all_but(soak_steps, order)
    check(name)


def check(name: str) -> None:
    found = RIGHT[name]()
    assert found.ok, found
    assert {leaf.verdict for leaf in found.leaves} <= {"fine", "too small"}
    # A function of crossshard.shard splits its arguments outside of what JAX traces.
    checked = not any("not checked" in note for note in found.notes)
    assert checked or name == "crossshard stateful idiom"
    assert any(leaf.verdict == "fine" for leaf in found.leaves)
