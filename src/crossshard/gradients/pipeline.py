"""The way of a gradient: what is done to it between autodiff and the update, as plain data."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import JAXSparse

from crossshard.collectives.sums import sum_over_shards
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

    def reduce(self, gradients: Any, shards: Shards, incoming: Incoming | None = None) -> Any:
        """The gradients reduced over the shards, leaf by leaf; the same structure and dtypes.

        Raises:
          DoubleReductionError, IncomingError: see ``read_incoming``.
          ArgumentTypeError: a leaf that is sparse, or neither real nor complex.
        """
        said = incoming or self.incoming
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._reduce_leaf(leaf_name(path), leaf, shards, said),
            gradients,
            is_leaf=lambda leaf: isinstance(leaf, JAXSparse),
        )

    def reduce_loss(self, loss: Any, shards: Shards, incoming: Incoming | None = None) -> Any:
        """A shard's own loss reduced as the gradients are; one typed as equal is left alone."""
        said = incoming or self.incoming
        if said in (None, Incoming.SCALED):
            equal = shards.tracked and not shards.differs(loss)
            said = Incoming.REDUCED if equal else Incoming.LOCAL
        return self._reduce_leaf("`value`", loss, shards, said)

    def _reduce_leaf(self, name: str, leaf: Any, shards: Shards, said: Incoming | None) -> Any:
        check_gradient_dtype(name, leaf)
        if jnp.result_type(leaf) == jax.dtypes.float0:
            return leaf
        incoming = read_incoming(
            name, leaf, shards, said, reduction=self.reduction, grouped=not self.over_all_shards
        )
        divisor = self.divisor(shards)
        if incoming is Incoming.REDUCED:
            return leaf
        # Sixteen bits overflow (f16) or round (bf16) in a sum over shards, so it is taken in f32.
        dtype = jnp.result_type(leaf)
        wide = jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype
        total = jnp.asarray(leaf, wide)
        if incoming is not Incoming.SUMMED:
            total = sum_over_shards(total, shards, self.groups)
        if incoming is not Incoming.SCALED and divisor > 1:
            total = total / divisor
        return total.astype(dtype)

    def describe(self) -> str:
        """The stages in the order in which they run, one line."""
        what = "mean" if self.reduction is Reduction.MEAN else "sum"
        over = "all shards" if self.groups is None else f"groups {self.groups}"
        axes = f" on {', '.join(self.axis_name)}" if self.axis_name else ""
        said = f"{self.incoming} gradient" if self.incoming else "local gradient"
        return f"{said} → {what} over {over}{axes} → update"


def check_gradient_dtype(name: str, gradient: Any) -> None:
    """Raise unless the gradient is a dense array of real or complex numbers (or float0)."""
    if isinstance(gradient, JAXSparse):
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
