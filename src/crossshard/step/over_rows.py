"""Checks that the loss of a step is a mean over rows, so that the shards' mean is the batch's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from crossshard.errors import LossError
from crossshard.jaxprs.mean_over_rows import Finding, OverRows, over_rows
from crossshard.step.weight import SumOf, Weight

_WAYS_ON = (
    "Write loss_over='batch', and the loss is given all rows; or loss_over='shard', if each "
    "shard's own loss is meant."
)


def check_over_rows(
    loss: Callable[..., Any],
    rows: Any,
    *others: Any,
    own: Any,
    weight: Weight | None,
    axes: Sequence[int] | None = None,
) -> Finding:
    """What ``loss(rows, *others, own)`` is in its rows, as ``over_rows`` finds.

    Args:
      weight: the weight function of the step, if it has one.
      axes: for each array of the rows their axis; axis 0 of all if ``None``.

    Raises:
      LossError: the mean over the shards would not be the loss of the whole batch.
    """
    finding = over_rows(loss, rows, *others, own=own, axes=axes)
    where = f" ({finding.source})" if finding.source else ""
    if finding.kind is OverRows.COMPARED:
        raise LossError(
            f"The loss compares rows of the batch: {finding.reason}{where}. Each shard has its own "
            f"rows, so that the mean of the shards' losses is not that of the whole batch. "
            f"{_WAYS_ON}"
        )
    if finding.kind is OverRows.UNDECIDED:
        raise LossError(
            f"Nothing proves that the loss is a mean over the rows of the batch: "
            f"{finding.reason}{where}. {_WAYS_ON}"
        )
    if finding.kind is OverRows.SUM:
        raise LossError(
            "The loss is a sum over the rows of the batch, and the mean of the shards' sums is "
            "smaller than the sum of the whole batch. Write the mean over rows; or pass "
            "CrossShardOptimizer(optimizer, reduction='sum'), which adds up the shards' gradients."
        )
    if finding.kind is OverRows.RATIO:
        _check_weight(finding, where, rows, weight)
    return finding


def _check_weight(finding: Finding, where: str, rows: Any, weight: Weight | None) -> None:
    entry = None
    if isinstance(rows, dict) and finding.entry is not None:
        entry = _name_of(rows, finding.entry)
    if weight is None:
        write = f"weight={entry!r}" if entry else "weight=lambda batch: …, the sum that divides"
        raise LossError(
            f"The loss divides a sum over the rows of the batch by another one{where}, in which "
            f"shards differ, so that the mean of their losses is not that of the whole batch. Pass "
            f"{write}, which is how much a shard counts; or write loss_over='shard', if all shards "
            f"are to count the same."
        )
    if entry and isinstance(weight, SumOf) and weight.key != entry:
        raise LossError(
            f"The loss divides by the sum of batch[{entry!r}]{where}, and weight={weight.key!r} "
            f"counts another entry. Pass weight={entry!r}."
        )


def _name_of(rows: dict[str, Any], place: int) -> str | None:
    """The name of the entry of a batch whose only array is this one of its leaves."""
    path = jax.tree_util.tree_leaves_with_path(rows)[place][0]
    return str(path[0].key) if len(path) == 1 else None
