"""Local gradients: ``grad`` and ``value_and_grad`` that never sum over the shards.

A loss is checked and scaled, and refused if its gradient would be wrong.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from crossshard import _check, _jax
from crossshard._annotations import PyTree
from crossshard._check import is_inexact, is_number
from crossshard._flax import AnyVariable, describe_variable, nnx, rebound
from crossshard.collectives.sums import widen
from crossshard.errors import ArgumentError, ArgumentTypeError, AxisError, VariableError
from crossshard.gradients.mean import Mean, part_of_shard
from crossshard.jaxprs.walk import (
    Analysis,
    Equations,
    equations_within,
    follow,
    has_own_derivative,
    named_axes,
)
from crossshard.shards.axes import (
    Shards,
    check_axes_unambiguous,
    check_axis_name,
    check_varies_over_shards_only,
    get_shard_context,
    shards_of_gradient,
)


def value_and_grad(
    fun: Callable[..., PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    loss_scale: PyTree = None,
    optimizer: object = None,
) -> Callable[..., PyTree]:
    """Return a function as ``jax.value_and_grad`` does, whose gradient is local to the shard.

    Under ``shard_map(check_vma=True)``, ``jax.grad`` sums the gradient of a replicated parameter
    over the shards; in all other modes it does not. This function never does, so that a
    ``CrossShardOptimizer`` reduces it once. Outside of shards it is ``jax.value_and_grad``.

    Args:
      fun: a function that returns this shard's scalar loss, or ``(loss, aux)``.
      argnums: which positional arguments to differentiate: NNX modules, or pytrees. In a pytree
        with leaves that ``jax.grad`` refuses, such as an Equinox module, only floating arrays are
        differentiated; the other leaves get the gradient ``None``.
      has_aux: whether ``fun`` returns ``(loss, aux)``.
      holomorphic: as for ``jax.grad``.
      allow_int: as for ``jax.grad``.
      axis_name: the axes over which the gradient stays local. If ``None``, the only bound axis; if
        several are bound, those over which no parameter is split by its type. Without such types
        (``check_vma=False``), a ``psum`` over another axis, or an ``all_gather`` of more than
        parameters, is refused, since JAX's own gradient through it is too large by the size of that
        axis, unless it stands in a ``jax.custom_vjp``.
      loss_scale: float[], or the ``loss_scale`` of an optimizer's state: the loss is multiplied by
        it before it is differentiated, and the gradients, in at least 32 bits, are divided by it.
        ``None`` or ``()``, the state of an optimizer without one, changes nothing.
      optimizer: the ``CrossShardOptimizer`` that reduces the gradients; for a loss that returns a
        ``Mean``, which is counted over the shards, or the group, that it reduces over. Of such a
        loss the value is this shard's part: its mean over the shards is the loss of the batch.
        Where no row counts, the gradients are 0; pass ``weight=0`` to ``update`` to skip it.

    Returns:
      A function of the same arguments that returns ``(value, gradient)``.

    Raises:
      ArgumentError: ``argnums`` names a missing argument, the loss is not a scalar, or it is a
        ``Mean`` without the optimizer, or with one that takes none.
      ArgumentTypeError: a loop in the loss has a carry that varies only after its first step.
      AxisError: several axes are bound, none is named, and the loss is reduced over some of them;
        or the loss varies over one that is not named, or without types is reduced over it.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: w * x
    >>> step = lambda x: value_and_grad(loss)(jnp.float32(2), x)
    >>> jax.vmap(step, axis_name="shards")(jnp.array([1.0, 3.0]))
    (Array([2., 6.], dtype=float32), Array([1., 3.], dtype=float32))
    """
    names = check_axis_name(axis_name)
    # The state of a stage that is off is (), so that a loop may always pass it.
    is_off = loss_scale is None or (isinstance(loss_scale, tuple) and not loss_scale)
    scale = None if is_off else _check_scale(getattr(loss_scale, "scale", loss_scale))
    _check.function("fun", fun)
    _check.flag("has_aux", has_aux)
    _check.flag("holomorphic", holomorphic)
    _check.flag("allow_int", allow_int)
    of_mean = getattr(optimizer, "_shards_of_mean", None)
    if optimizer is not None and of_mean is None:
        raise ArgumentTypeError(
            f"optimizer must be the CrossShardOptimizer that reduces the gradients; got "
            f"{_check.described(optimizer)}.{' Pass its .tx.' * hasattr(optimizer, 'tx')}"
        )
    chosen = _check_argnums(argnums)
    of_pytrees = functools.partial(_jax_grad, holomorphic=holomorphic, allow_int=allow_int)

    @functools.wraps(fun)
    def value_and_local_grad(*args: Any, **kwargs: Any) -> Any:
        numbers = _resolve_argnums(chosen, len(args))
        params = list(_arrays(args[number] for number in numbers))
        shards = shards_of_gradient(names, params)

        def local_loss(*args: Any, **kwargs: Any) -> Any:
            loss, aux = split_loss(fun(*args, **kwargs), has_aux, (jnp.inexact,))
            if isinstance(loss, Mean):
                if of_mean is None:
                    raise ArgumentError(
                        "The loss returns a Mean, which is counted over the shards that the "
                        "optimizer reduces over. Pass the CrossShardOptimizer, "
                        "crossshard.value_and_grad(loss, optimizer=opt)."
                    )
                loss, _ = part_of_shard(loss, of_mean())
            check_axes_unambiguous(loss, shards, names)
            check_varies_over_shards_only(loss, shards, params)
            # An invariant loss is cast to varying: each shard differentiates its own copy.
            return shards.as_varying(scaled(loss, scale)), (loss, aux)

        of_modules = any(_is_nnx(args[number]) for number in numbers)
        differentiate: Callable[..., Any] = _nnx_grad if of_modules else of_pytrees
        with explained_types(shards):
            grads, (loss, aux) = differentiate(local_loss, numbers, args, kwargs, shards, names)
        grads = grads[0] if isinstance(chosen, int) else grads
        return ((loss, aux) if has_aux else loss), unscale(grads, scale)

    return value_and_local_grad


def grad(
    fun: Callable[..., PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    optimizer: object = None,
) -> Callable[..., PyTree]:
    """Return a function as ``jax.grad`` does, with a local gradient; see ``value_and_grad``.

    >>> import jax, jax.numpy as jnp
    >>> step = lambda x: grad(lambda w: w * x)(jnp.float32(2))
    >>> jax.vmap(step, axis_name="shards")(jnp.array([1.0, 3.0]))
    Array([1., 3.], dtype=float32)
    """
    named: dict[str, Any] = {"axis_name": axis_name, "optimizer": optimizer}
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, **named)

    @functools.wraps(fun)
    def local_grad(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return local_grad


def _check_scale(given: Any) -> jax.Array:
    scale = _check.as_array("loss_scale", given)
    kinds = jnp.floating, jnp.integer
    if scale.shape or not any(jnp.issubdtype(scale.dtype, kind) for kind in kinds):
        raise ArgumentTypeError(
            f"loss_scale must be float[], such as state.loss_scale of an optimizer; got "
            f"{_check.described(given)}."
        )
    _check.finite("loss_scale", given)
    if not isinstance(given, jax.Array) and given <= 0:
        raise ArgumentError(f"loss_scale must be positive; got {given}.")
    return as_scale(scale)


def _check_argnums(argnums: Any) -> int | tuple[int, ...]:
    if isinstance(argnums, Sequence) and not isinstance(argnums, str | bytes):
        return tuple(_check.whole_number("Each of argnums", each, least=None) for each in argnums)
    return _check.whole_number("argnums", argnums, least=None, hint="It may be a tuple of ints.")


def _resolve_argnums(chosen: int | tuple[int, ...], number: int) -> tuple[int, ...]:
    """Return the places of the arguments to differentiate, among ``number`` of them."""
    numbers = (chosen,) if isinstance(chosen, int) else chosen
    for n in numbers:
        if not -number <= n < number:
            raise ArgumentError(
                f"argnums names argument {n}, but {number} positional arguments were given."
            )
    return tuple(n % number for n in numbers)


def _is_nnx(tree: Any) -> bool:
    return isinstance(tree, nnx.Pytree | nnx.Variable)


def _arrays(args: Iterable[Any]) -> Iterator[Any]:
    """Yield the arrays of some arguments."""
    for arg in args:
        values = [v.get_raw_value() for v in _variables(arg)] if _is_nnx(arg) else arg
        yield from (leaf for leaf in jax.tree.leaves(values) if hasattr(leaf, "dtype"))


def _variables(node: Any) -> list[AnyVariable]:
    """Return the variables below a node of NNX's graph, each once."""
    return [leaf for _, leaf in nnx.iter_graph(node) if isinstance(leaf, nnx.Variable)]


def _nnx_grad(
    loss: Callable[..., Any],
    numbers: tuple[int, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shards: Shards,
    names: tuple[str, ...],
) -> Any:
    nodes = [args[number] for number in numbers if _is_nnx(args[number])]
    parameters = [v for v in _variables(nodes) if isinstance(v, nnx.Param)]
    values = [jax.tree.map(shards.as_varying, v.get_raw_value()) for v in parameters]
    local = [
        jax.tree.map(shards.as_varying, arg) if place in numbers and not _is_nnx(arg) else arg
        for place, arg in enumerate(args)
    ]
    with rebound(parameters, values):
        check_sums(lambda: _jaxpr_of_parameters(loss, numbers, local, kwargs), names)
        found = nnx.grad(loss, argnums=numbers, has_aux=True)(*local, **kwargs)
        after = [v.get_raw_value() for v in parameters]
    for variable, was, new in zip(parameters, values, after, strict=True):
        if new is was:
            continue
        if jax.tree.map(jax.typeof, new) != jax.tree.map(jax.typeof, variable.get_raw_value()):
            raise VariableError(
                f"The loss writes to {describe_variable(variable)}, of which a shard has its own "
                f"under check_vma=True, and so of what is written. Write shard_map(..., "
                f"check_vma=False); or write to a variable that is no nnx.Param."
            )
        variable.set_raw_value(new)
    return found


def _jaxpr_of_parameters(
    loss: Callable[..., Any], numbers: tuple[int, ...], args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the jaxpr of the loss as a function of what ``nnx.grad`` differentiates."""
    is_parameter = lambda path, leaf: path[0] in numbers and isinstance(leaf, nnx.Param)
    split: Any = nnx.split(tuple(args), is_parameter, ...)
    graph, parameters, others = split
    # Copies, so that what the loss writes does not stay.
    of = lambda given: loss(*nnx.merge(graph, given, others, copy=True), **kwargs)[0]
    return jax.make_jaxpr(of)(parameters)


def _jax_grad(
    loss: Callable[..., Any],
    numbers: tuple[int, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shards: Shards,
    names: tuple[str, ...],
    *,
    holomorphic: bool,
    allow_int: bool,
) -> Any:
    leaves, tree = jax.tree.flatten(tuple(args[number] for number in numbers))
    differentiated = [
        flag for number in numbers for flag in _differentiable(number, args[number], allow_int)
    ]
    places = list(itertools.compress(range(len(leaves)), differentiated))

    def of_arrays(arrays: list[Any]) -> Any:
        given = dict(zip(numbers, tree.unflatten(_with(leaves, places, arrays)), strict=True))
        filled = [given.get(number, arg) for number, arg in enumerate(args)]
        return loss(*filled, **kwargs)

    if holomorphic and not all(jnp.iscomplexobj(leaves[place]) for place in places):
        raise ArgumentTypeError("holomorphic=True differentiates complex arrays. Leave it out.")
    arrays = [shards.as_varying(leaves[place]) for place in places]
    check_sums(lambda: jax.make_jaxpr(lambda arrays: of_arrays(arrays)[0])(arrays), names)
    gradients, out = jax.grad(
        of_arrays, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
    )(arrays)
    return tree.unflatten(_with([None] * len(leaves), places, gradients)), out


def _with(leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return the leaves, with these values at their places."""
    found = dict(zip(places, values, strict=True))
    return [found.get(place, leaf) for place, leaf in enumerate(leaves)]


def _differentiable(number: int, arg: Any, allow_int: bool) -> list[bool]:
    """Return which leaves to differentiate: all if ``jax.grad`` takes them, or floating arrays."""
    leaves = jax.tree.leaves(arg)
    if all(is_number(leaf) and (allow_int or is_inexact(leaf)) for leaf in leaves):
        return [True] * len(leaves)
    if len(leaves) == 1 and leaves[0] is arg:
        raise ArgumentTypeError(
            f"Argument {number} cannot be differentiated: it is {_check.described(arg)}. Pass a "
            f"floating array or a pytree of them."
        )
    return [hasattr(leaf, "dtype") and is_inexact(leaf) for leaf in leaves]


# ---- The loss, and what would make its gradient wrong.


def split_loss(
    out: Any, has_aux: bool, kinds: tuple[Any, ...] = (jnp.floating,)
) -> tuple[Any, Any]:
    """Split what a function returned into the loss, a ``Mean`` or a scalar, and ``aux``."""
    is_pair = isinstance(out, tuple | list) and len(out) == 2
    if has_aux and not is_pair:
        raise ArgumentTypeError(
            f"With has_aux=True a function returns (loss, aux); this one returned "
            f"{type(out).__name__}."
        )
    if is_pair and not has_aux:
        raise ArgumentTypeError(
            f"A loss must be a floating scalar; this function returned a {type(out).__name__} of "
            f"two. If it returned (loss, aux), pass has_aux=True."
        )
    loss, aux = out if has_aux else (out, None)
    return loss if isinstance(loss, Mean) else _check.scalar(loss, kinds=kinds), aux


def as_scale(scale: Any) -> jax.Array:
    """Return a scale rounded to 8 bits, which floats of 16 bits hold.

    So a loss in 16 bits is multiplied by what its gradients are divided by.
    """
    wide = scale.astype(jnp.promote_types(scale.dtype, jnp.float32))
    return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)


def scaled(loss: Any, scale: Any) -> Any:
    """Return ``loss * scale`` in the dtype of the loss; the loss if ``scale`` is ``None``."""
    return loss if scale is None else loss * scale.astype(loss.dtype)


def unscale(gradients: Any, scale: Any) -> Any:
    """Return the gradients of a loss, 32 bits or wider, from those of ``scaled(loss, scale)``."""
    if scale is None:
        return gradients

    def one(leaf: Any) -> Any:
        if leaf.dtype == jax.dtypes.float0:
            return leaf
        wide = widen(leaf)
        return wide / scale.astype(wide.dtype)

    return jax.tree.map(one, gradients)


@contextmanager
def explained_types(shards: Shards) -> Iterator[None]:
    """Trace a loss in this context; if JAX finds unequal types, say how to make them equal."""
    try:
        yield
    except TypeError as error:
        if not shards.has_vma or not _jax.is_of_varying_types(error):
            raise
        axes = shards.axes if len(shards.axes) > 1 else shards.axes[0]
        cast = f"jax.lax.pcast(jnp.zeros(()), {axes!r}, to='varying')"
        raise ArgumentTypeError(
            f"A loop or branch in the loss has a value that is equal on all shards, such as "
            f"jnp.zeros(()), where the other is varying over {axes!r}: the first carry and the "
            f"next, or the outputs of two branches. shard_map(check_vma=True) tells them apart. "
            f"Write {cast} for the former, or pass check_vma=False to that shard_map, under which "
            f"the gradients here are the same."
        ) from error


def check_sums(trace: Callable[[], Any], axis_name: tuple[str, ...]) -> None:
    """Raise if JAX's gradient of a loss is too large by the size of a further axis.

    Without types, autodiff turns a ``psum`` into a ``psum``, and an ``all_gather`` into a scatter
    that sums. That is right over shards, whose losses are added, and wrong over an axis along which
    all devices compute the same loss. The loss is traced only if an axis without types is bound
    besides the shard axes. Such a ``psum`` is refused on the way from the parameters to the loss,
    and so is such an ``all_gather`` of more than parameters, unless they are in a function with a
    derivative of its own.

    Args:
      trace: returns the jaxpr of the loss as a function of what is differentiated.
      axis_name: the shard axes; empty if they are not named.
    """
    bound, context = _jax.bound_axes(), get_shard_context()
    # If only one axis is bound, it counts the shards.
    only = tuple(bound) if len(bound) == 1 else ()
    named = axis_name or (context.axis_name if context else ()) or only
    untyped = (axis for axis in bound if axis not in named and not _jax.has_vma(axis))
    further = {axis: bound[axis] for axis in untyped if bound[axis] > 1}
    if not further:
        return
    jaxpr, sums = trace(), _Sums(named, tuple(bound), tuple(further))
    (found,) = follow(sums, [jaxpr], [_Source.PARAMETERS] * len(jaxpr.in_avals))
    if found is None or isinstance(found, _Source):
        return
    over, line = sums.axes_of(found), _jax.source_of(found)
    number = math.prod(further[axis] for axis in over)
    what = "an all_gather" if found.primitive.name == "all_gather" else "a psum or pmean"
    names = ", ".join(map(repr, over))
    shards = named or tuple(axis for axis in bound if axis not in over)
    counted = "is not a shard axis" if named else "is not named as a shard axis"
    raise AxisError(
        f"The loss has {what} over {names}{f' ({line})' if line else ''}, which {counted}. Under "
        f"check_vma=False autodiff sums over {names} again, so that the gradient would be {number} "
        f"times too large. Write jax.shard_map(..., check_vma=True) and {_written(shards)}; or "
        f"{what.split()[1]} in a jax.custom_vjp, whose backward pass does not sum. If each shard "
        f"along {names} has rows of its own, write {_written((*shards, *over))}."
    )


class _Source(enum.Enum):
    """What a value is computed from; a value from literals alone has none of these."""

    DATA = 1
    PARAMETERS = 2
    BOTH = 3


class _Sums(Analysis[Any]):
    """Finds an equation that sums what has a derivative; other facts are a ``_Source`` or none."""

    def __init__(
        self, named: tuple[str, ...], bound: tuple[str, ...], further: tuple[str, ...]
    ) -> None:
        self._named = named  # the axes of the shards; empty if none is named
        self._bound = bound  # all axes
        self._further = further  # the other axes without types

    def axes_of(
        self, equation: Any, names: tuple[str, ...] = ("psum", "all_gather")
    ) -> tuple[str, ...]:
        """Return the axes of a collective that are not shard axes, or not named as such."""
        if equation.primitive.name not in names or equation.params.get("axis_index_groups"):
            return ()
        summed = named_axes(equation)
        # If it sums over all bound axes, all of them may be shard axes.
        if not self._named and summed.issuperset(self._bound):
            return ()
        return tuple(axis for axis in self._further if axis in summed)

    def constant(self, values: Sequence[Any]) -> _Source | None:
        return _Source.DATA if any(np.ndim(value) for value in values) else None

    def join(self, facts: Sequence[Any]) -> Any:
        some = {fact for fact in facts if isinstance(fact, _Source)}
        summed = (fact for fact in facts if fact is not None and not isinstance(fact, _Source))
        alone = some.pop() if len(some) == 1 else (_Source.BOTH if some else None)
        return next(summed, alone)

    def control(self, equations: Equations, decides: Any) -> None:
        """Return ``None``: a choice has no derivative."""
        del equations, decides

    def enters(self, equations: Equations, inputs: Sequence[Any]) -> bool:
        del inputs
        return not has_own_derivative(equations[0])

    def transfer(self, equations: Equations, inputs: Sequence[Any]) -> Sequence[Any]:
        (equation,) = equations
        fact = self.join(inputs)
        if fact in (_Source.PARAMETERS, _Source.BOTH) and self.enters(equations, inputs):
            # A gather of parameters alone puts together what each shard with its own rows needs.
            names = ("psum",) if fact is _Source.PARAMETERS else ("psum", "all_gather")
            run = (equation, *equations_within(equation))
            fact = next((each for each in run if self.axes_of(each, names)), fact)
        still = None if fact in (None, _Source.PARAMETERS) else _Source.DATA
        stops = equation.primitive.name == "stop_gradient"
        floating = [jnp.issubdtype(out.aval.dtype, jnp.inexact) for out in equation.outvars]
        return [fact if each and not stops else still for each in floating]


def _written(names: tuple[str, ...]) -> str:
    return f"axis_name={names if len(names) > 1 else names[0]!r}"
