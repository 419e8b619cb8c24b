"""Steps that are right, as users of Optax, Flax, Equinox and Haiku write them, are not accused."""

import pytest

# The former two add to the table.
from tests.tools.verification import counting, programs  # noqa: F401
from tests.tools.verification.right import RIGHT

# One of each kind; the others are deep.
QUICK = {
    "optax in shard map autodiff sums",
    "jit with split parameters",
    "crossshard stateful idiom",
    "train step with groups",
    "dropout with a legacy key in the state",
    "a temperature by a step counter",
    "gradients accumulated by optax",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.deep) for name in RIGHT],
)
def test_no_right_step_is_accused(name: str):
    check(name)


def check(name: str) -> None:
    found = RIGHT[name]()
    assert found.ok, found
    assert {leaf.verdict for leaf in found.leaves} <= {"fine", "too small"}
    assert any(leaf.verdict == "fine" for leaf in found.leaves)
