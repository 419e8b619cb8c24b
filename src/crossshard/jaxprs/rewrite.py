"""Rewrites jaxprs: functions that are traced once."""

from collections.abc import Callable
from typing import Any

import jax

from crossshard import _jax


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Python runs once for arguments of the same types.

    After that it is what it was traced as, with the names and the source lines of that.
    """
    known: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple(map(jax.typeof, leaves))
        if key not in known:
            jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
            known[key] = _jax.as_function(jaxpr), jax.tree.structure(out)
        found, out = known[key]
        return jax.tree.unflatten(out, found(*leaves))

    return run
