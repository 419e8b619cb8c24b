"""The way of a gradient: what is done to it between autodiff and the update, as plain data."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from crossshard.collectives.parts import Cut
from crossshard.collectives.together import sum_together
from crossshard.errors import ArgumentTypeError
from crossshard.gradients.incoming import Incoming, leaf_name, read_incoming
from crossshard.gradients.reduction import Reduction
from crossshard.shards.axes import Shards, current_shards
from crossshard.shards.groups import GroupAssignment


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Local gradient → reduce → update; checked at construction, printable, comparable.

    Attributes:
      reduction: SUM or MEAN.
      groups: the partition of the shards, or ``None`` for all of them together.
      axis_name: the axes over which the shards lie; empty to find them where the step runs.
      incoming: what the gradients already are; ``None`` to read it from their types.
    """

    reduction: Reduction
    groups: GroupAssignment | None = None
    axis_name: tuple[str, ...] = ()
    incoming: Incoming | None = None

    def shards(self, *, warn: bool = True) -> Shards:
        """The shards around this line, with the groups checked against their number."""
        shards = current_shards(self.axis_name, warn=warn)
        if self.groups is not None:
            self.groups.check_covers(shards.number)
        return shards

    @property
    def over_all_shards(self) -> bool:
        """Whether the reduction leaves every shard with the same."""
        return self.groups is None or len(self.groups.groups) == 1

    def divisor(self, shards: Shards) -> int:
        """What MEAN divides by: the shards that reduce together. 1 under SUM."""
        if self.reduction is Reduction.SUM:
            return 1
        return shards.number if self.groups is None else self.groups.size

    def reduce(
        self,
        gradients: Any,
        shards: Shards,
        incoming: Incoming | None = None,
        *,
        weight: jax.Array | None = None,
        cuts: Sequence[Cut] | None = None,
    ) -> Any:
        """The gradients reduced over the shards, leaf by leaf; the same structure and dtypes.

        Args:
          gradients: a pytree of this shard's arrays.
          shards: the shards that reduce.
          incoming: what the gradients are; ``None`` to go by the pipeline's own word or by types.
          weight: float[], what this shard's gradients count in MEAN, which then divides by the sum
            of the weights; a shard of weight 0 may hold anything, NaN too.
          cuts: per leaf how it is cut between the shards, to get this shard's part of it alone;
            every leaf whole if ``None``.

        Raises:
          DoubleReductionError, IncomingError: see ``read_incoming``.
          ArgumentTypeError: a leaf that is sparse, or neither real nor complex.
        """
        said = incoming or self.incoming
        paths, tree = jax.tree_util.tree_flatten_with_path(gradients, is_leaf=_is_sparse)
        leaves = [leaf for _, leaf in paths]
        words = [self._word(leaf_name(path), leaf, shards, said) for path, leaf in paths]
        cuts = [Cut(jnp.shape(leaf), 1) for leaf in leaves] if cuts is None else cuts
        places = [place for place, word in enumerate(words) if word in _TO_SUM]
        wide = [_weighed(_widened(leaves[place]), weight) for place in places]
        apart = [cuts[place] for place in places]
        if weight is not None:
            wide, apart = [*wide, weight], [*apart, Cut((), 1)]
        sums = sum_together(wide, apart, shards, self.groups)
        divisor = self.divisor(shards) if weight is None else sums.pop()
        totals = dict(zip(places, sums, strict=True))
        reduced = []
        for place, (leaf, word) in enumerate(zip(leaves, words, strict=True)):
            if word is None:
                reduced.append(leaf)
                continue
            done = place not in totals
            total = cuts[place].own(_widened(leaf), shards, self.groups) if done else totals[place]
            total = _divided(total, divisor) if word in _TO_DIVIDE else total
            reduced.append(total.astype(jnp.result_type(leaf)))
        return tree.unflatten(reduced)

    def reduce_loss(self, loss: Any, shards: Shards, incoming: Incoming | None = None) -> Any:
        """A shard's own loss reduced as the gradients are; one typed as equal is left alone."""
        said = incoming or self.incoming
        if said in (None, Incoming.SCALED):
            equal = shards.tracked and not shards.differs(loss)
            said = Incoming.REDUCED if equal else Incoming.LOCAL
        return self.reduce({"value": loss}, shards, said)["value"]

    def _word(self, name: str, leaf: Any, shards: Shards, said: Incoming | None) -> Incoming | None:
        """What a leaf is; ``None`` for one without numbers (float0)."""
        check_gradient_dtype(name, leaf)
        if jnp.result_type(leaf) == jax.dtypes.float0:
            return None
        grouped = not self.over_all_shards
        return read_incoming(name, leaf, shards, said, reduction=self.reduction, grouped=grouped)

    def describe(self, *, weighed: bool = False, update: str = "update") -> str:
        """The stages in the order in which they run, one line."""
        what = "mean" if self.reduction is Reduction.MEAN else "sum"
        over = "all shards" if self.groups is None else f"groups {self.groups}"
        axes = f" on {', '.join(self.axis_name)}" if self.axis_name else ""
        said = f"{self.incoming} gradient" if self.incoming else "local gradient"
        stages = [said, *(["weigh"] if weighed else []), f"{what} over {over}{axes}", update]
        return " → ".join(stages)


_TO_SUM = (Incoming.LOCAL, Incoming.SCALED)
_TO_DIVIDE = (Incoming.LOCAL, Incoming.SUMMED)


def _widened(leaf: Any) -> jax.Array:
    # Sixteen bits overflow (f16) or round (bf16) in a sum over shards, so it is taken in f32.
    dtype = jnp.result_type(leaf)
    return jnp.asarray(leaf, jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def _weighed(leaf: jax.Array, weight: jax.Array | None) -> jax.Array:
    if weight is None:
        return leaf
    # Not a product alone: 0 times the NaN of a shard without examples is NaN.
    return jnp.where(weight != 0, leaf * weight.astype(leaf.dtype), 0)


def _divided(total: jax.Array, divisor: Any) -> jax.Array:
    if isinstance(divisor, int):
        return total / divisor if divisor > 1 else total
    # Where no shard has any weight there is no gradient.
    return jnp.where(divisor != 0, total / divisor.astype(total.dtype), 0)


def _is_sparse(leaf: Any) -> bool:
    # Whoever has a sparse array has imported this already; importing it here would bring in SciPy.
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(leaf, sparse.JAXSparse)


def check_gradient_dtype(name: str, gradient: Any) -> None:
    """Raise unless the gradient is a dense array of real or complex numbers (or float0)."""
    if _is_sparse(gradient):
        raise ArgumentTypeError(
            f"{name} is a sparse array ({type(gradient).__name__}); gradients must be dense. "
            f"Write gradient.todense()."
        )
    try:
        dtype = jnp.result_type(gradient)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} must be an array; got {type(gradient).__name__}."
        ) from None
    if not jnp.issubdtype(dtype, jnp.inexact) and dtype != jax.dtypes.float0:
        raise ArgumentTypeError(
            f"{name} has dtype {dtype}; a gradient must be floating, because a mean of {dtype} "
            f"would be rounded."
        )
