"""Benchmark of accumulation: four microbatches and one update, ours against MultiSteps."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.baselines import HAND_WRITTEN_MULTI_STEPS, HAND_WRITTEN_SCAN
from benchmarks.jax_baselines import JaxCandidate, hand_written, ours
from benchmarks.problem import Problem, adamw
from benchmarks.step import compared, sent, sized

MICROBATCHES = 4


def make_candidates(problem: Problem, shards: int) -> list[JaxCandidate]:
    """Steps over all microbatches, with one update each."""
    multi_steps = optax.MultiSteps(adamw(), every_k_schedule=MICROBATCHES)
    return [
        ours(problem, shards, "sharded", accumulate_steps=MICROBATCHES),
        ours(problem, shards, "replicated", accumulate_steps=MICROBATCHES),
        hand_written(scanned(problem), shards, name=HAND_WRITTEN_SCAN),
        hand_written(
            problem,
            shards,
            name=HAND_WRITTEN_MULTI_STEPS,
            optimizer=multi_steps.gradient_transformation(),
            batches=microbatches(problem.batch, shards),
        ),
    ]


def microbatches(batch: Any, shards: int) -> list[Any]:
    """The batches of MultiSteps' calls: a part of every shard's rows in each."""

    def part(rows: Any, index: int) -> Any:
        pieces = rows.reshape(shards, MICROBATCHES, -1, *rows.shape[1:])
        return np.concatenate(pieces[:, index])

    return [
        jax.tree.map(lambda rows, index=index: part(rows, index), batch)
        for index in range(MICROBATCHES)
    ]


def scanned(problem: Problem) -> Problem:
    """The problem with the mean gradient of a shard's microbatches, for one ``pmean``."""

    def value_and_grad(params: Any, batch: Any) -> Any:
        pieces = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), batch)

        def one(sums: Any, piece: Any) -> Any:
            return jax.tree.map(jax.numpy.add, sums, problem.value_and_grad(params, piece)), None

        zeros = optax.tree.zeros_like((jax.numpy.float32(0), params))
        sums, _ = jax.lax.scan(one, zeros, pieces)
        return jax.tree.map(lambda x: x / MICROBATCHES, sums)

    return dataclasses.replace(problem, value_and_grad=value_and_grad)


# Rows for every microbatch of every shard.
measure = compared(
    "accumulation", sized(1_000_000, 10_000_000), make_candidates, sent, parts=MICROBATCHES
)
