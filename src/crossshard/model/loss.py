"""Loss: the arguments that a loss function takes, with and without a random key."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
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


def is_named_as_key(name: str) -> bool:
    """Whether a name is that of a random key or a seed.

    >>> [is_named_as_key(name) for name in ("rngs", "PRNGKey", "key_2", "seed")]
    [True, True, True, True]
    >>> [is_named_as_key(name) for name in ("y", "keypoints", "key_points")]
    [False, False, False]
    """
    words = _words(name)
    return words[-1:] in (["key"], ["seed"]) or is_named_as_rng(name)


def is_named_as_rng(name: str) -> bool:
    """Whether a name is that of what only random numbers come from."""
    return not {"rng", "prng"}.isdisjoint(_words(name))


def _words(name: str) -> list[str]:
    words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return [word.lower().removesuffix("s") for word in words]


def _needs_rng(parameters: Iterable[inspect.Parameter], takes: tuple[str, ...]) -> bool:
    """Whether a loss has one required parameter more than these.

    Raises:
      ArgumentTypeError: the loss has fewer, or more than one more, or one that is no key.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty]
    given = [p for p in needed if p.kind in positional]
    if not any(p.kind is p.VAR_POSITIONAL for p in needed) and (
        len(given) - len(takes) not in (0, 1) or any(p.kind is p.KEYWORD_ONLY for p in needed)
    ):
        raise ArgumentTypeError(
            f"loss_fn takes ({', '.join(takes)}) or ({', '.join(takes)}, rng); this one takes "
            f"{[p.name for p in needed]}.{_in_one_batch(given, takes)}"
        )
    unread = given[-1].name.strip("_") == "" if given else False
    if len(given) > len(takes) and not unread and not is_named_as_key(given[-1].name):
        raise ArgumentTypeError(
            f"loss_fn takes {[p.name for p in given]}, but a step passes ({', '.join(takes)}, "
            f"rng), and {given[-1].name!r} is not named like a key.{_in_one_batch(given, takes)} "
            f"If it is the key, call it rng."
        )
    return len(given) > len(takes)


def _in_one_batch(given: Sequence[inspect.Parameter], takes: Sequence[str]) -> str:
    """How to pass to a loss what it takes in several arguments."""
    arrays = [p.name for p in given[len(takes) - 1 :] if not is_named_as_key(p.name)]
    if len(arrays) < 2:
        return ""
    batch = ", ".join(f"{name!r}: {name}" for name in arrays)
    reads = ", ".join(f"batch[{name!r}]" for name in arrays)
    return (
        f" Pass all arrays as one batch, step(state, {{{batch}}}), to "
        f"loss_fn({', '.join(takes)}), which reads {reads}."
    )
