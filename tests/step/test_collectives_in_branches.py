"""Collectives in branches and loops: which one a shard takes, all shards that meet agree on.

Each shard has a copy of what is replicated. If a bit of one flips, and the copy decides whether a
shard sends, the others wait for it until XLA ends the process.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from crossshard import _jax
from crossshard.jaxprs.walk import (
    Equations,
    Variance,
    equations_of,
    equations_within,
    follow,
    named_axes,
)
from tests.quick import deep_but

TOOLS = Path(__file__).parents[2] / "tools"
QUICK = {"stateful-quarantine"}


def cases() -> dict[str, Callable[[], Callable[[], Any]]]:
    """The steps whose programs tools/programs.py compares."""
    found = importlib.util.spec_from_file_location("program_cases", TOOLS / "program_cases.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return dict(module.CASES)


CASES = cases()


class Meets(Variance):
    """The branches and loops with collectives that a value of each shard's own decides on."""

    def __init__(self, mesh_axes: frozenset[str]):
        super().__init__(mesh_axes)
        self.found: list[str] = []

    def control(self, equations: Equations, decides: frozenset[str]) -> frozenset[str]:
        (equation,) = equations
        for each in equations_within(equation):
            if each.primitive.name != "axis_index" and decides & named_axes(each):
                line = _jax.source_of(equation)
                self.found.append(f"{each.primitive.name} in a {equation.primitive.name}, {line}")
        return super().control(equations, decides)


def own_decisions(jaxpr: Any) -> list[str]:
    """The collectives in a jaxpr that a value of each shard's own decides on."""
    found = []
    for equation in equations_of(jaxpr):
        if equation.primitive.name == "shard_map":
            params = equation.params
            axes, specs = frozenset(params["mesh"].axis_names), params["in_specs"]
            # What is replicated each shard has a copy of.
            analysis = Meets(axes)
            follow(analysis, [params["jaxpr"]], [axes] * len(specs))
            found += analysis.found
    return sorted(set(found))


@pytest.fixture
def jaxprs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jaxprs of all that is put into a ``shard_map`` while a test runs."""
    found: list[Any] = []
    original = jax.shard_map

    def recording(*args: Any, **kwargs: Any) -> Any:
        mapped = original(*args, **kwargs)

        def run(*given: Any) -> Any:
            found.append(jax.make_jaxpr(mapped)(*given))
            return mapped(*given)

        return run

    monkeypatch.setattr(jax, "shard_map", recording)
    return found


# Every fifth of them meets all kinds.
@pytest.mark.parametrize("name", deep_but(QUICK, sorted({*sorted(CASES)[::5], *QUICK})))
def test_all_shards_that_meet_agree_to(name: str, jaxprs: list[Any]):
    CASES[name]()()
    assert [each for jaxpr in jaxprs for each in own_decisions(jaxpr)] == []


@pytest.mark.parametrize(
    ("predicate", "agreed"),
    [
        (lambda x, count: count % 2 == 0, False),
        (lambda x, count: x.sum() > 0, False),
        (lambda x, count: lax.axis_index("shards") > 0, False),
        (lambda x, count: lax.pmax(x.sum(), "shards") > 0, True),
        (lambda x, count: lax.psum(count, "shards") > 0, True),
    ],
)
def test_a_branch_that_a_copy_decides_on_is_found(predicate: Any, agreed: bool):
    mesh = jax.make_mesh((4,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x: Any, count: Any) -> Any:
        send = lambda x: lax.psum(x, "shards") * 2.0
        return lax.cond(predicate(x, count), send, lambda x: x, x)

    specs: Sequence[Any] = (jax.P("shards"), jax.P())
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    found = own_decisions(jax.make_jaxpr(run)(jnp.ones(4), jnp.int32(1)))
    assert (found == []) == agreed
