"""Checks what the package's annotations say of shapes and dtypes, at every call in the tests."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping


def _is_of_shapes(hint: Any) -> bool:
    if any(map(_is_of_shapes, typing.get_args(hint))):
        return True
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises TypeError for an array of another shape or dtype than it says."""
    signature = inspect.signature(function)
    hints = {name: p.annotation for name, p in signature.parameters.items()}
    hints = {name: hint for name, hint in hints.items() if _is_of_shapes(hint)}
    returned = signature.return_annotation
    if not hints and not _is_of_shapes(returned):
        return function

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        out = function(*args, **kwargs)
        pairs = [(name, given[name], hint) for name, hint in hints.items() if name in given]
        if _is_of_shapes(returned):
            pairs.append(("what is returned", out, returned))
        for name, value, hint in pairs:
            if not isinstance(value, hint):
                raise TypeError(f"{function.__qualname__}: {name} is {value!r}, not {hint}")
        return out

    return wrapper
