"""Faults: lines on what a step has found to be not finite, or to differ between shards."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossshard import Divergence, NonfiniteState

# A fault may be in every array.
_MOST = 3


def of_gradients(found: NonfiniteState, skipped: tuple[float, ...], params: Any) -> str:
    """The shard and the leaf that are not finite; empty if all are."""
    if not _first(found.in_a_row):
        return ""
    then = "the step is skipped" if all(skipped) else "the others make the step"
    return f"{found.describe(params)}; {then}"


def of_copies(found: Divergence, names: Sequence[str], *, repairs: bool) -> str:
    """The shards and the arrays whose copies differ; empty if none do."""
    if not found.diverged:
        return ""
    shards, leaves = np.flatnonzero(found.shards), np.flatnonzero(found.leaves)
    what = ", ".join(names[leaf] for leaf in leaves[:_MOST])
    more = f" and {len(leaves) - _MOST} more" if len(leaves) > _MOST else ""
    who = f"on shard{'s' * (len(shards) > 1)} {', '.join(map(str, shards))}"
    if found.undecided:
        return f"the copies of {what}{more} differ {who}, and nobody can tell which is right"
    then = "; it has been repaired" if repairs else ""
    return f"another copy of {what}{more} than on most shards is {who}{then}"


def _first(x: Any) -> int:
    """A number that all shards have, also where it is stored for each of them."""
    return int(np.asarray(x.addressable_data(0)).ravel()[0])
