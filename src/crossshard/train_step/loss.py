"""Loss: the arguments that a loss function takes, with and without a random key."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from crossshard.errors import ArgumentTypeError


def with_rng(
    loss_fn: Callable[..., Any], takes: tuple[str, ...] = ("params", "batch")
) -> tuple[Callable[..., Any], bool]:
    """The loss as a function of these arguments and optionally a key; and whether it takes one.

    Raises:
      ArgumentTypeError: the loss has other parameters.
    """
    try:
        parameters = inspect.signature(loss_fn).parameters
    except ValueError:
        return loss_fn, False
    if _needs_rng(parameters.values(), takes):
        return loss_fn, True
    given = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    # Pass an optional key too: without it, dropout would be off.
    optional = [
        name
        for name, parameter in parameters.items()
        if parameter.default is None
        and name not in given
        and name.split("_")[-1].removesuffix("s") in _KEYS
    ]
    if not optional:
        return loss_fn, False
    (name, *others) = optional
    if others or name.endswith("s") or parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
        raise ArgumentTypeError(
            f"loss_fn takes {optional}, but a step has one key for each call. Write "
            f"loss_fn({', '.join(takes)}, rng), and derive the others from rng inside."
        )

    @functools.wraps(loss_fn)
    def wrapped(*args: Any) -> Any:
        *others, rng = args
        return loss_fn(*others, **{name: rng})

    return wrapped, True


# The last word of the name of a parameter that takes a key.
_KEYS = ("key", "prng", "rng")


def _needs_rng(parameters: Iterable[inspect.Parameter], takes: tuple[str, ...]) -> bool:
    """Whether a loss has one required parameter more than these.

    Raises:
      ArgumentTypeError: the loss has fewer, or more than one more.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty]
    given = [p for p in needed if p.kind in positional]
    if not any(p.kind is p.VAR_POSITIONAL for p in needed) and (
        len(given) - len(takes) not in (0, 1) or any(p.kind is p.KEYWORD_ONLY for p in needed)
    ):
        raise ArgumentTypeError(
            f"loss_fn takes ({', '.join(takes)}) or ({', '.join(takes)}, rng); this one takes "
            f"{[p.name for p in needed]}."
        )
    return len(given) > len(takes)
