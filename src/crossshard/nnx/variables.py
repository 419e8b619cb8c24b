"""The variables that an optimizer updates: their names, their gradients, and where slots last."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _check, _flax, _jax
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard.collectives.sums import widen
from crossshard.errors import ArgumentError, VariableError, VariableTypeError
from crossshard.gradients.autodiff import check_sums, explained_types, scaled, unscale
from crossshard.gradients.mean import Mean, part_of_shard
from crossshard.gradients.scalars import check_scalar
from crossshard.nnx.program import Reached, bound, check_writable, same_arrays
from crossshard.nnx.slots import HasSlots, Named
from crossshard.shards.axes import Shards, check_no_further


def named_variables(var_list: Any) -> Named:
    """The variables of a module, a variable or a list of both, with a name for each, by id.

    The variables of a module are its ``nnx.Param``s, named by their paths. A variable in a list is
    named by its metadata, else by its path in a module that was given to the step, else by its
    index: ``#0``. ``None`` means every ``nnx.Param`` that was given to the step.

    Raises:
      ArgumentError: there are no variables.
      VariableTypeError: an item is not a variable.
      VariableError: a variable that is not floating, or a duplicate.
    """
    if var_list is None:
        around = bound()
        if around is None:
            raise ArgumentError(
                "Outside of a step of crossshard.shard there is no list of all parameters. Pass "
                "the module whose parameters to train, var_list=model."
            )
        var_list = [variable for variable in around.variables if isinstance(variable, nnx.Param)]
    items = list(var_list) if isinstance(var_list, list | tuple) else [var_list]
    found: Named = {}
    alone: list[AnyVariable] = []
    for index, item in enumerate(items):
        if isinstance(item, nnx.Variable):
            if id(item) in found:
                raise VariableError(f"{describe_variable(item)} is in var_list twice.")
            alone.append(item)
            named = [(f"#{index}", item)]
        elif isinstance(item, nnx.Pytree):
            prefix = f"{index}/" if len(items) > 1 else ""
            named = [(prefix + name, variable) for name, variable in _paths(item, nnx.Param)]
        else:
            raise VariableTypeError(
                f"var_list must be an nnx.Module or a list of nnx variables; item {index} is "
                f"{type(item).__name__} ({_check.shown(item)})."
            )
        for name, variable in named:
            dtype = getattr(variable.get_raw_value(), "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise VariableError(
                    f"{describe_variable(variable)} cannot be optimized: its dtype must be "
                    f"floating."
                )
            found[id(variable)] = (variable, name)
    if not found:
        raise ArgumentError("No variables to optimize.")
    return found | _known_names(alone)


def _known_names(variables: Iterable[AnyVariable]) -> Named:
    """Names of those variables that have one: their own, or a path in a module of the step."""
    found: Named = {}
    unnamed: set[int] = set()
    for variable in variables:
        own = variable.get_metadata("name", None)
        if own:
            found[id(variable)] = (variable, str(own))
        else:
            unnamed.add(id(variable))
    around = bound()
    in_roots: list[list[tuple[str, AnyVariable]]] = []
    for root in [] if around is None else around.reached.roots:
        if unnamed and isinstance(root, nnx.Pytree):
            named = [(name, v) for name, v in _paths(root, nnx.Variable) if id(v) in unnamed]
            unnamed -= {id(variable) for _, variable in named}
            in_roots += [named] if named else []
    for index, named in enumerate(in_roots):
        prefix = f"{index}/" if len(in_roots) > 1 else ""
        found |= {id(variable): (variable, prefix + name) for name, variable in named}
    return found


def _paths(module: nnx.Pytree, kind: type[AnyVariable]) -> list[tuple[str, AnyVariable]]:
    return [
        ("/".join(map(str, path)), leaf)
        for path, leaf in nnx.iter_graph(module)
        if isinstance(leaf, kind)
    ]


def keyed_variables(
    optimizer: HasSlots,
    variables: Sequence[AnyVariable],
    order: Sequence[AnyVariable] | None = None,
) -> dict[str, AnyVariable]:
    """Variables by their keys; one without a name is called by its place in ``order``."""
    names = optimizer.computed.names
    names.update(_known_names(v for v in variables if id(v) not in names))
    return optimizer.slots.keyed(variables, variables if order is None else order, names)


def make_missing_slots(
    optimizer: HasSlots,
    keyed: Mapping[str, AnyVariable],
    make: Callable[[Mapping[str, AnyVariable]], None],
    made_in: Any,
) -> None:
    """Make the slots of those variables that have none, where they last.

    Args:
      optimizer: the optimizer.
      keyed: the variables by their keys.
      make: makes the slots of some of these.
      made_in: the trace in which the optimizer was created; ``None`` if it was rebuilt.

    Raises:
      VariableError: the slots would be lost with the trace, or the step was given the variables
        and not the optimizer, or the reverse.
    """
    missing = optimizer.slots.bind(keyed)
    if not missing:
        return
    around = bound()
    all_of_them: list[AnyVariable | HasSlots] = [*missing.values(), optimizer]
    given = [around is not None and around.has(each) for each in all_of_them]
    if around is not None and all(given):
        # This trace goes on with slots of its own; those that last are made after it.
        around.lacks(optimizer, functools.partial(make, missing))
    elif any(given):
        words = ["given to it" if each else "not given to it" for each in given]
        raise VariableError(
            f"An optimizer and its variables must be either both passed to a step or both "
            f"created in it: {optimizer!r} was {words[-1]}, and "
            f"{describe_variable(next(iter(missing.values())))} was {words[0]}. Pass both as "
            f"arguments."
        )
    elif not (_jax.at_top_level() if made_in is None else made_in == _flax.current_trace()):
        raise VariableError(
            f"The slots of {optimizer!r} would be created inside a trace, of jax.jit, nnx.jit, "
            f"nnx.cond, nnx.scan or the like, and be lost when it ends. Create them before "
            f"it with optimizer.build(model), for example in the first line of a step under "
            f"crossshard.shard."
        )
    make(missing)


def differentiate(
    loss: Callable[[], Any],
    variables: Sequence[AnyVariable],
    shards: Shards,
    divisor: int,
    grad_loss: Any = None,
    given: Any = None,
    loss_scale: jax.Array | None = None,
    axis_name: tuple[str, ...] = (),
    shards_of_mean: Callable[[], Shards] | None = None,
) -> tuple[jax.Array, list[jax.Array | None], jax.Array | None]:
    """The loss, and the gradient of ``loss / divisor * grad_loss`` per variable.

    The third result is whether a ``Mean`` counts no row at all; ``None`` if some always count.

    ``given`` holds modules whose variables the loss may write, besides those of the step, and
    ``axis_name`` the shard axes, if they are named. ``shards_of_mean`` returns the shards
    over which a ``Mean`` is counted, or raises.

    The loss is multiplied by ``loss_scale`` before it is differentiated, and the gradients are
    divided by it. The gradients are local; a variable that the loss does not depend on gets
    ``None``. Those of 16-bit variables have 32 bits if they are divided.
    Writes of the loss to other variables (batch statistics, counters) are kept.
    """
    around = bound()
    below = Reached([[] if around is None else around.reached.roots, given])
    differentiated = {id(variable) for variable in variables}
    others = [v for v in below.variables if id(v) not in differentiated]
    known = differentiated | {id(other) for other in others}
    reached: set[int] = set()
    written: list[AnyVariable] = []

    def of_values(values: list[Any], rest: list[Any]) -> Any:
        marked = [_mark(value, place, reached) for place, value in enumerate(values)]
        with _flax.rebound([*variables, *others], [*marked, *rest], below.modules):
            out = _called(loss)
            after = [other.get_raw_value() for other in others]
            made = [v for v in Reached(below.roots).variables if id(v) not in known]
        empty = None
        if isinstance(out, Mean) and shards_of_mean is not None:
            out, empty = part_of_shard(out, shards_of_mean())
        value = jnp.asarray(check_scalar(out))
        check_no_further(value, shards, values)
        changed = [not same_arrays(a, b) for a, b in zip(after, rest, strict=True)]
        written[:] = [*itertools.compress(others, changed), *made]
        kept = [*itertools.compress(after, changed), *(v.get_raw_value() for v in made)]
        divided = value if divisor == 1 or divide_after else value / divisor
        return shards.as_varying(scaled(divided, loss_scale)), (value, kept, empty)

    values = [shards.as_varying(variable.get_raw_value()) for variable in variables]
    # Divided in 16 bits, a small gradient could underflow before it is summed.
    divide_after = divisor > 1 and any(jnp.finfo(value.dtype).bits < 32 for value in values)
    rest = [other.get_raw_value() for other in others]
    check_sums(lambda: jax.make_jaxpr(lambda values: of_values(values, rest)[0])(values), axis_name)
    with explained_types(shards):
        gradients, (value, kept, empty) = jax.grad(of_values, has_aux=True)(values, rest)
    gradients = unscale(gradients, loss_scale)
    if divide_after:
        gradients = [widen(gradient) / divisor for gradient in gradients]
    for other, after in zip(written, kept, strict=True):
        if id(other) in known:
            check_writable(other)
            other.set_raw_value(after)
        else:
            _flax.bring_out(other, after)
    if grad_loss is not None:
        # grad_loss may be an int; a loss may not.
        seed = jnp.asarray(check_scalar(grad_loss, "grad_loss", (jnp.floating, jnp.integer)))
        _check.finite("grad_loss", grad_loss)
        gradients = [gradient * seed.astype(gradient.dtype) for gradient in gradients]
    return value, [g if place in reached else None for place, g in enumerate(gradients)], empty


def _called(loss: Callable[[], Any]) -> Any:
    from flax.errors import TraceContextError

    try:
        return loss()
    except TraceContextError as error:
        raise VariableError(
            f"The loss writes to a module that was not given here ({error}). Pass the module, "
            f"var_list=model; and pass it to the step function as an argument."
        ) from error


def _mark(value: jax.Array, place: int, reached: set[int]) -> jax.Array:
    """The identity, which adds ``place`` to ``reached`` when a gradient flows back."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        # Autodiff calls this only if the loss depends on the value; else zeros stay symbolic.
        reached.add(place)
        return (gradient,)

    identity.defvjp(lambda x: (x, None), backward)
    return identity(value)
