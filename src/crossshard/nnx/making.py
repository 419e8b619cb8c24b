"""Making slots: the keys of variables, where slots can be made, and what fails on variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from crossshard import _flax, _jax
from crossshard._flax import AnyVariable, describe_variable
from crossshard.errors import ArgumentError, CrossshardError, VariableError
from crossshard.nnx.binding import bound
from crossshard.nnx.graph import HasSlots
from crossshard.nnx.names import known_names


def keyed_variables(
    optimizer: HasSlots,
    variables: Sequence[AnyVariable],
    order: Sequence[AnyVariable] | None = None,
) -> dict[str, AnyVariable]:
    """Variables by their keys; one without a name is called by its place in ``order``."""
    names = optimizer.computed.names
    names.update(known_names(v for v in variables if id(v) not in names))
    keys = optimizer.slots.keys(variables, variables if order is None else order, names)
    return dict(zip(keys, variables, strict=True))


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
    # New slots beside those of a copy would start its moments again, silently.
    optimizer.slots.check_all_bound(missing)
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


@contextlib.contextmanager
def explained(of_optax: str, *, when_made: bool = False) -> Iterator[None]:
    """Say what parameters are here if an optimizer fails on a dict of them.

    Any usual failure means that where slots are made, for there is no gradient yet.
    """
    kinds = (AttributeError, KeyError, TypeError, ValueError) if when_made else ()
    try:
        yield
    except CrossshardError:
        raise
    except Exception as error:
        of_dict = isinstance(error, AttributeError) and type(error.obj) is dict
        if not of_dict and not isinstance(error, kinds):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(
            f"{of_optax} cannot update variables: here parameters are a dict from name to array, "
            f"such as 'dense/kernel', and it failed on that ({reason}). Write masks and labels as "
            f"functions of the parameters; optimizers with their own parameter type, such as "
            f"lookahead, need the Optax idiom (init and update)."
        ) from error


def check_structure(of_optax: str, before: Any, after: Any) -> None:
    """Raise ArgumentError if a step has changed the structure of the state."""
    if jax.tree.structure(after) != jax.tree.structure(before):
        raise ArgumentError(
            f"The state of {of_optax} changed its structure in a step, from "
            f"{jax.tree.structure(before)} to {jax.tree.structure(after)}. Slots are created once "
            f"and keep their structure; use the Optax idiom (init and update)."
        )
