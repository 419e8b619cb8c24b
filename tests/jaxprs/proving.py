"""Proves what a loss is in the rows of a batch, from its traces with some rows and with more."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from crossshard.jaxprs.mean_over_rows import Finding, found
from crossshard.jaxprs.proof import Proof, facts_of_inputs, prove, types_with
from crossshard.shards.axes import as_one_shard


def proof_of(
    loss: Callable[..., Any],
    batch: Any,
    *others: Any,
    own: Any = (),
    axes: Sequence[int] | None = None,
    times: int = 2,
    shards: Sequence[str] | None = None,
) -> Proof:
    """What each output of ``loss(batch, *others, own)`` is in the rows of the batch."""
    leaves = jax.tree.leaves(batch)
    axes = [0] * len(leaves) if axes is None else axes
    rows = leaves[0].shape[axes[0]]

    def trace(number: int, alone: Sequence[str]) -> Any:
        with as_one_shard(alone) if alone else contextlib.nullcontext():
            return jax.make_jaxpr(loss)(types_with(batch, axes, number), *others, own)

    return prove(trace, facts_of_inputs(leaves, axes, others, own), rows, times, shards)


def over_rows(loss: Callable[..., Any], batch: Any, *others: Any, **how: Any) -> Finding:
    """What a loss is in the rows of the batch; see ``proof_of``."""
    proof = proof_of(loss, batch, *others, **how)
    (fact,) = proof.facts
    return proof.concluded(found(fact))
