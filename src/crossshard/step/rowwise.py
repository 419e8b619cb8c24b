"""rowwise: declares that a function computes each row of its outputs from that row alone."""

import functools
from collections.abc import Callable

import jax

from crossshard import _check
from crossshard._annotations import PyTree
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.jaxprs.kernels import ROWWISE


def rowwise(
    function: Callable[..., PyTree], *, in_axes: PyTree = 0, out_axes: PyTree = 0
) -> Callable[..., PyTree]:
    """Declare that a function computes each row of its outputs from that row of its inputs alone.

    ``make_train_step`` proves that a loss is a mean over rows, and cannot see into every kernel, or
    through rows that are sorted on their way, as those of experts are. It trusts this declaration,
    and tests it by numbers in the first call of the step: it gives the function, and its gradient,
    the same rows in another order, beside other rows, and in halves. The function itself does not
    change: it runs under ``jit``, ``grad``, ``vmap`` and ``jax.checkpoint``, too.

    Args:
      function: takes and returns pytrees of arrays, all of them with equally many rows.
      in_axes: the axis of the rows in each positional argument, as of ``jax.vmap``: one for all, or
        a tuple; ``None`` for what has no rows, such as parameters. Keyword arguments have none.
      out_axes: the axis of the rows in the outputs.

    Returns:
      The function, which raises ``ArgumentError`` where the numbers of rows differ.

    Raises:
      ArgumentTypeError: ``function`` cannot be called.

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

    # Used as a decorator it keeps the function's own name, while the trace shows this one.
    def called(*args: PyTree, **kwargs: PyTree) -> PyTree:
        axes = tuple(in_axes) if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
        out = function(*args, **kwargs)
        nothing = lambda args, out: None
        try:
            # vmap checks that there are as many rows along all of these axes.
            jax.eval_shape(jax.vmap(nothing, (axes, out_axes)), args, out)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ArgumentError(
                f"rowwise({name}) takes and returns arrays with as many rows, along the axes "
                f"in_axes={_check.shown(in_axes)} and out_axes={_check.shown(out_axes)}. Say where "
                f"the rows are: in_axes=(0, None) for a second argument without rows; out_axes=1. "
                f"JAX says: {said:.300}"
            ) from error
        return out

    called.__name__ = called.__qualname__ = f"{ROWWISE}_{name}"
    return functools.wraps(function)(jax.jit(called))
