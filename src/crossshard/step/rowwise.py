"""rowwise: the user's word that a function computes each row by itself."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from crossshard import _check
from crossshard._annotations import PyTree
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.jaxprs.kernels import ROWWISE


def rowwise(
    function: Callable[..., PyTree], *, in_axes: PyTree = 0, out_axes: PyTree = 0
) -> Callable[..., PyTree]:
    """Says that a function computes each row of its outputs from the same row of its inputs alone.

    ``make_train_step`` proves that a loss is a mean over rows, and cannot see into every kernel, or
    through rows that are sorted on their way, as those of experts are. It believes this word, and
    tries the function by numbers in the first call of the step: with the same rows in another
    order, beside other rows, and in halves; and so its gradient. The function runs as it would
    without: under ``jit``, ``grad``, ``vmap`` and ``jax.checkpoint``, too.

    Args:
      function: takes and returns pytrees of arrays, all of them with as many rows.
      in_axes: the axis of the rows in each positional argument, as of ``jax.vmap``: one for all, or
        a tuple; ``None`` for what has no rows, such as parameters. Keyword arguments have none.
      out_axes: the axis of the rows in the outputs.

    Returns:
      the function, which raises ``ArgumentError`` where the numbers of rows differ.

    Raises:
      ArgumentTypeError: it is no function.

    >>> import jax.numpy as jnp
    >>> def experts(x, weights):  # x[rows, features], weights[experts, features]
    ...     chosen = jnp.argmax(x @ weights.T, -1)
    ...     order = jnp.argsort(chosen)
    ...     of_each = jax.lax.ragged_dot(
    ...         x[order], weights[:, :, None], jnp.bincount(chosen, length=len(weights))
    ...     )
    ...     return jnp.zeros((len(x), 1)).at[order].set(of_each)
    >>> rowwise(experts, in_axes=(0, None))(jnp.ones((4, 3)), jnp.ones((2, 3))).shape
    (4, 1)
    """
    if not callable(function):
        raise ArgumentTypeError(
            f"rowwise takes a function; got {type(function).__name__}. Write "
            f"rowwise(function)(x), or @rowwise above it."
        )
    name = getattr(function, "__name__", type(function).__name__)

    # As a decorator it keeps the function's own name; the call has this one in the trace.
    def called(*args: PyTree, **kwargs: PyTree) -> PyTree:
        axes = in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
        if len(axes) != len(args):
            raise ArgumentError(
                f"in_axes has {len(axes)} entries, and {name} got {len(args)} positional arguments."
            )
        rows = _lengths("in_axes", tuple(axes), args)
        out = function(*args, **kwargs)
        numbers = {*rows, *_lengths("out_axes", out_axes, out)}
        if len(numbers) != 1 or not rows:
            raise ArgumentError(
                f"rowwise({name}) takes and returns arrays with as many rows; got "
                f"{sorted(rows)} rows, and returned {sorted(numbers)}. Say where the rows are: "
                f"in_axes=(0, None) for a second argument without rows; out_axes=1."
            )
        return out

    called.__name__ = called.__qualname__ = f"{ROWWISE}_{name}"
    return functools.wraps(function)(jax.jit(called))


def _lengths(what: str, axes: PyTree, tree: PyTree) -> set[int]:
    """The numbers of rows of the arrays that have some."""
    try:
        each = jax.tree.broadcast(axes, tree, is_leaf=lambda x: x is None)
        pairs = zip(
            jax.tree.leaves(each, is_leaf=lambda x: x is None), jax.tree.leaves(tree), strict=True
        )
        return {int(jnp.shape(x)[axis]) for axis, x in pairs if axis is not None}
    except (IndexError, TypeError, ValueError) as error:
        types = jax.tree.map(lambda x: jnp.shape(x), tree)
        raise ArgumentError(
            f"{what}={_check.shown(axes)} does not fit arrays of shapes "
            f"{_check.shown(types, 200)}: {error!s:.200}"
        ) from error
