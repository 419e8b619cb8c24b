"""How gradients are reduced, and whether they are already; no optimizer reduces them again."""

import contextlib
import enum
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard import _check, _flax
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    DoubleReductionError,
    IncomingError,
    NestedReductionError,
    VariableError,
)
from crossshard.shards.axes import Shards


class Reduction(enum.StrEnum):
    """How values are reduced, with TensorFlow's names and string values.

    An optimizer takes SUM and MEAN, also as ``"sum"`` and ``"mean"``.

    >>> Reduction.MEAN == "weighted_mean"
    True
    """

    NONE = "none"
    SUM = "weighted_sum"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"
    MEAN = "weighted_mean"
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"
    SUM_OVER_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"


_ACCEPTED = {
    "weighted_sum": Reduction.SUM,
    "sum": Reduction.SUM,
    "weighted_mean": Reduction.MEAN,
    "mean": Reduction.MEAN,
}


def check_reduction(reduction: object) -> Reduction:
    """Return SUM or MEAN, or raise an ArgumentError that names both and what was received."""
    accepted = _ACCEPTED.get(reduction) if isinstance(reduction, str) else None
    if accepted is None:
        raise ArgumentError(
            f"reduction must be Reduction.SUM ('weighted_sum', or 'sum') or Reduction.MEAN "
            f"('weighted_mean', or 'mean'); received {_check.shown(reduction, 80)}."
        )
    return accepted


class GradientStatus(enum.StrEnum):
    """The status of a gradient when it reaches the optimizer.

    LOCAL: not reduced; the gradient of this shard's own loss.
    SCALED: divided for MEAN but not summed, as ``compute_gradients`` returns it.
    SUMMED: summed over all shards by autodiff, but not divided for MEAN.
    REDUCED: summed and divided; the optimizer only updates.
    """

    LOCAL = "local"
    SCALED = "scaled"
    SUMMED = "summed"
    REDUCED = "reduced"


# One for each leaf; ``None`` for float0.
Statuses = tuple[GradientStatus | None, ...]


def check_incoming(incoming: object) -> GradientStatus | None:
    """Return the checked status, or ``None`` if none is declared."""
    if incoming is None:
        return None
    return _check.choice("incoming", incoming, GradientStatus, "Or leave it out.")


def statuses_of(
    gradients: Any,
    shards: Shards,
    declared: GradientStatus | None,
    *,
    reduction: Reduction,
    grouped: bool,
) -> Statuses:
    """Return the status of each gradient, from the declaration or its type.

    Raises:
      ArgumentTypeError: one is sparse, or neither real nor complex.
      DoubleReductionError: nothing is declared, and one is invariant.
      IncomingError: they are declared summed or reduced, but one is varying.
    """
    found: list[GradientStatus | None] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients, is_leaf=is_sparse):
        name = leaf_name(path, "gradient")
        check_gradient_dtype(name, leaf)
        is_float0 = jnp.result_type(leaf) == jax.dtypes.float0
        known = None if is_float0 else _status(name, leaf, shards, declared, reduction, grouped)
        found.append(known)
    return tuple(found)


def _status(
    name: str,
    gradient: Any,
    shards: Shards,
    declared: GradientStatus | None,
    reduction: Reduction,
    grouped: bool,
) -> GradientStatus:
    if declared is GradientStatus.SUMMED and grouped:
        raise IncomingError(
            f"{name} is declared as summed over all {shards.num_shards} shards, but this optimizer "
            f"reduces over groups, and a group's sum cannot be recovered from the total. "
            f"Differentiate with crossshard.value_and_grad."
        )
    if not shards.has_vma:
        return declared or GradientStatus.LOCAL
    reduced = declared in (GradientStatus.SUMMED, GradientStatus.REDUCED)
    if reduced and not grouped and shards.is_varying(gradient):
        raise IncomingError(
            f"{name} ({_type(gradient)}) is declared as {declared}, but by its type it is "
            f"varying over {_axes(shards.axes)}. If you have summed it with cross_replica_sum, "
            f"whose result is varying, leave that sum out, or write jax.lax.psum, or pmean for "
            f"'reduced', in its place: as 'local' it would be summed again. If it is this shard's "
            f"own gradient, write incoming='local'."
        )
    if declared is not None:
        return declared
    axes = shards.invariant_axes(gradient)
    if not axes:
        return GradientStatus.LOCAL
    if shards.num_shards == 1:
        return GradientStatus.REDUCED
    number = math.prod(map(lax.axis_size, axes))
    mistake = (
        f"averaging it would do nothing and the step would be {number} times too large"
        if reduction is Reduction.MEAN
        else f"summing it again would make the step {number} times too large"
    )
    raise DoubleReductionError(
        f"{name} ({_type(gradient)}) arrived at CrossShardOptimizer.update already invariant over "
        f"{_axes(axes)}. If autodiff has summed it over {number} shards, {mistake}. Differentiate "
        f"with crossshard.value_and_grad, or "
        f'write incoming="summed" ("reduced" if a pmean has averaged it, "local" if it is a local '
        f"gradient that happens to be equal on all shards). If this optimizer stands inside "
        f"optax.MultiSteps, what arrived is no gradient but its sums, which are the same on all "
        f"shards: write CrossShardOptimizer(opt, accumulate_steps=k) in its place, with sums for "
        f"each shard. The grad= of a line search is reduced, too: pass this shard's own."
    )


def _type(x: Any) -> str:
    """Return the type of an array as in ``f32[3,4]``, with the axes it is varying over."""
    return str(jax.typeof(x).str_short(short_dtypes=True))


def _axes(names: tuple[str, ...]) -> str:
    return ("axis " if len(names) == 1 else "axes ") + ", ".join(map(repr, names))


def leaf_name(path: tuple[Any, ...], bare: str = "params") -> str:
    """Return the path of a leaf, as in ``layers/0/kernel``, or what a tree of one array is."""
    return f"`{jax.tree_util.keystr(path, simple=True, separator='/') or bare}`"


def is_sparse(leaf: Any) -> bool:
    """Return whether a leaf is one of JAX's sparse arrays."""
    # A sparse array implies that this is imported already; importing it here would import SciPy.
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(leaf, sparse.JAXSparse)


def check_gradient_dtype(name: str, gradient: Any) -> None:
    """Raise unless the gradient is a dense array of real or complex numbers (or float0)."""
    if is_sparse(gradient):
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


def check_shapes(gradients: Any, like: Any, what: str = "its parameter") -> None:
    """Raise unless gradients have the shapes of their parameters, or of their updates.

    Per-example gradients have other shapes.
    """
    given, expected = (
        jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse) for tree in (gradients, like)
    )
    if len(given) != len(expected):
        return
    for (path, gradient), (_, other) in zip(given, expected, strict=True):
        if jnp.shape(gradient) != jnp.shape(other):
            raise ArgumentError(
                f"{leaf_name(path, 'gradient')} has shape {jnp.shape(gradient)} and {what} "
                f"{jnp.shape(other)}. Gradients are averaged over the shards one by one, so "
                f"per-example gradients, as optax.contrib.dpsgd takes them, cannot be reduced. "
                f"Aggregate them on each shard first, with preprocess="
                f"optax.contrib.differentially_private_aggregate(...) for example; its noise "
                f"belongs in the wrapped optimizer, as optax.add_noise: each shard would add "
                f"its own."
            )


# What an inner optimizer may not do: reduce again, or read variables from outside of a trace.

_thread = threading.local()


@contextlib.contextmanager
def inside_optimizer() -> Iterator[None]:
    """Mark the code inside as part of an inner optimizer."""
    outer = getattr(_thread, "inside", False)
    _thread.inside = True
    try:
        with _flax.watching_reads(_refuse_variable):
            yield
    finally:
        _thread.inside = outer


def refuse_nesting() -> None:
    """Raise NestedReductionError inside of an inner optimizer."""
    if getattr(_thread, "inside", False):
        raise NestedReductionError(
            "A CrossShardOptimizer was updated inside another one's update: the gradients would be "
            "reduced twice. Keep the outer one and take the inner one's .inner."
        )


def _refuse_variable(variable: _flax.AnyVariable) -> None:
    raise VariableError(
        f"The optimizer reads {_flax.describe_variable(variable)}, which it closes over: a "
        f"compiled step would keep its current value. Pass it to a step of crossshard.shard as an "
        f"argument; or let a schedule read the count that Optax passes to it, or keep values that "
        f"change in the optimizer's state, with optax.inject_hyperparams."
    )
