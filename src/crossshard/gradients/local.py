"""Local gradients: autodiff that never sums over the shards behind the caller's back."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossshard.errors import ArgumentError
from crossshard.shards.axes import Shards, shards_of_gradient
from crossshard.shards.context import check_axis_name


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad``, but the gradient is always this shard's own.

    Under ``shard_map(check_vma=True)`` JAX's own sums the gradient of a replicated parameter over
    the shards; under every other mode it does not. This one never does, so that a
    ``CrossShardOptimizer`` can reduce it, once. Outside of all shards it is JAX's own.

    Args:
      fun: a function that returns this shard's scalar loss, or ``(loss, aux)``.
      argnums: which positional arguments to differentiate: pytrees of arrays (leaves that are no
        arrays, as Equinox modules have them, get the gradient ``None``) or NNX modules.
      has_aux: whether ``fun`` returns ``(loss, aux)``.
      holomorphic: as for ``jax.grad``.
      allow_int: as for ``jax.grad``.
      axis_name: the axes over which the gradient is to stay local; every bound one if ``None``.

    Returns:
      A function of the same arguments that returns ``(value, gradient)``.

    Raises:
      ArgumentError: ``argnums`` has no such argument; the loss is no scalar.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: w * x
    >>> step = lambda x: value_and_grad(loss)(jnp.float32(2), x)
    >>> jax.vmap(step, axis_name="shards")(jnp.array([1.0, 3.0]))
    (Array([2., 6.], dtype=float32), Array([1., 3.], dtype=float32))
    """
    names = check_axis_name(axis_name)

    @functools.wraps(fun)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        shards = shards_of_gradient(names)
        numbers = _check_argnums(argnums, len(args))

        def local_loss(*args: Any, **kwargs: Any) -> Any:
            out = fun(*args, **kwargs)
            loss, aux = out if has_aux else (out, None)
            if jnp.shape(loss) != ():
                raise ArgumentError(
                    f"A loss must be a scalar; this one has shape {jnp.shape(loss)}. Reduce it "
                    f"first, with jnp.mean for example."
                )
            # Each shard has its own copy of a loss that is equal on all, and differentiates that.
            return shards.as_local(loss), (loss, aux)

        if any(_is_nnx(args[number]) for number in numbers):
            grads, (loss, aux) = _nnx_grad(local_loss, argnums, numbers, shards, args, kwargs)
        else:
            grads, (loss, aux) = _jax_grad(
                local_loss, numbers, shards, args, kwargs, holomorphic, allow_int
            )
            grads = grads[0] if isinstance(argnums, int) else grads
        return ((loss, aux) if has_aux else loss), grads

    return differentiate


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """Like ``jax.grad``, but the gradient is always this shard's own; see ``value_and_grad``.

    >>> import jax, jax.numpy as jnp
    >>> step = lambda x: grad(lambda w: w * x)(jnp.float32(2))
    >>> jax.vmap(step, axis_name="shards")(jnp.array([1.0, 3.0]))
    Array([1., 3.], dtype=float32)
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, axis_name=axis_name)

    @functools.wraps(fun)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiate


def _check_argnums(argnums: int | Sequence[int], number: int) -> tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for n in numbers:
        if not -number <= n < number:
            raise ArgumentError(
                f"argnums names argument {n}, but {number} positional arguments were given."
            )
    return tuple(n % number for n in numbers)


def _is_nnx(tree: Any) -> bool:
    return isinstance(tree, nnx.Pytree | nnx.Variable | nnx.State)


def _nnx_grad(
    loss: Callable[..., Any],
    argnums: Any,
    numbers: tuple[int, ...],
    shards: Shards,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    parameters = {
        id(leaf): leaf
        for number in numbers
        for _, leaf in nnx.iter_graph(args[number])
        if isinstance(leaf, nnx.Param)
    }
    before = {key: leaf.get_value() for key, leaf in parameters.items()}
    try:
        for leaf in parameters.values():
            leaf.set_value(jax.tree.map(shards.as_local, leaf.get_value()))
        return nnx.grad(loss, argnums=argnums, has_aux=True)(*args, **kwargs)
    finally:
        for key, leaf in parameters.items():
            leaf.set_value(before[key])


def _jax_grad(
    loss: Callable[..., Any],
    numbers: tuple[int, ...],
    shards: Shards,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    holomorphic: bool,
    allow_int: bool,
) -> Any:
    leaves, tree = jax.tree.flatten(tuple(args[number] for number in numbers))
    places = [place for place, leaf in enumerate(leaves) if _is_numeric(leaf)]

    def of_arrays(arrays: list[Any]) -> Any:
        whole = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            whole[place] = array
        filled = list(args)
        for number, value in zip(numbers, tree.unflatten(whole), strict=True):
            filled[number] = value
        return loss(*filled, **kwargs)

    gradients, out = jax.grad(
        of_arrays, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
    )([shards.as_local(leaves[place]) for place in places])
    whole: list[Any] = [None] * len(leaves)
    for place, gradient in zip(places, gradients, strict=True):
        whole[place] = gradient
    return tree.unflatten(whole), out


def _is_numeric(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)
