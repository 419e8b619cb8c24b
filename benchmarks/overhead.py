"""Benchmark of call overhead: a step against a bare ``jax.jit`` of the same arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

import crossshard
from benchmarks.given_gradients import given_gradients
from benchmarks.interleave import interleave
from benchmarks.jax_baselines import JaxCandidate, on_shards
from benchmarks.models import linear_layers
from benchmarks.options import BenchOptions
from benchmarks.problem import Problem, adamw
from benchmarks.progress import Screen
from benchmarks.result import Result

CALLED, BARE = "step(state, batch)", "a bare jax.jit of its arrays"

# So small that overhead dominates.
_PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "a list of 32 arrays": lambda shards: given_gradients(32, 8, shards),
    "an NNX module of 32 arrays": lambda shards: linear_layers(shards, layers=16),
    "an NNX module of 200 arrays": lambda shards: linear_layers(shards, layers=100),
}


def measure(options: BenchOptions, screen: Screen, versions: dict[str, str]) -> Iterator[Result]:
    """A result for a list of arrays and for an NNX module, with every number of shards."""
    for name, make in _PROBLEMS.items():
        for shards in options.shards_for("overhead"):
            problem = make(shards)
            told = f"calls of a step of {name}, {shards} shard{'s' * (shards > 1)}"
            screen.tell(told)
            timing, differences = interleave(
                _candidates(problem, shards), options.rounds, screen.round
            )
            yield Result(name, problem.parameters, shards, timing, differences)


def _candidates(problem: Problem, shards: int) -> list[JaxCandidate]:
    step = crossshard.make_train_step(
        problem.loss_fn,
        adamw(),
        num_shards=shards,
        weight_update="sharded",
        loss_over=problem.loss_over,
    )
    batch = on_shards(problem.batch, shards)
    state = step.init(problem.model)
    leaves, tree = jax.tree.flatten(state)

    def of_leaves(leaves: list[jax.Array], batch: Any) -> tuple[list[jax.Array], Any]:
        after, metrics = step(tree.unflatten(leaves), batch)
        return jax.tree.leaves(after), metrics

    bare = jax.jit(of_leaves, donate_argnums=0)
    params_of = lambda leaves: tree.unflatten(leaves).params
    return [
        JaxCandidate(CALLED, step, step.init(problem.model), [batch], lambda state: state.params),
        JaxCandidate(BARE, bare, leaves, [batch], params_of),
    ]
