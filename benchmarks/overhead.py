"""Benchmark of call overhead: a step against its compiled program."""

from collections.abc import Callable, Iterator

import crossshard
from benchmarks.given_gradients import given_gradients
from benchmarks.interleave import interleave
from benchmarks.jax_baselines import JaxCandidate, on_shards
from benchmarks.models import linear_layers
from benchmarks.options import BenchOptions
from benchmarks.problem import Problem, adamw
from benchmarks.progress import Screen
from benchmarks.result import Result

CALLED, BARE = "step(state, batch)", "its compiled program"

# So small that overhead dominates.
_PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "a list of 32 arrays": lambda shards: given_gradients(32, 8, shards),
    "an NNX module of 32 arrays": lambda shards: linear_layers(shards, layers=16),
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
    compiled = step.lower(step.init(problem.model), batch).compile()
    return [
        JaxCandidate(name, call, step.init(problem.model), [batch], lambda state: state.params)
        for name, call in ((CALLED, step), (BARE, compiled))
    ]
