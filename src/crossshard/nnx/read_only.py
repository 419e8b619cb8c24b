"""ReadOnly: the hyperparameters in what ``opt.state`` returns, which is a copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import jax

from crossshard import _flax
from crossshard.errors import ArgumentTypeError


@jax.tree_util.register_pytree_with_keys_class
class ReadOnly(dict[Any, Any]):
    """A dict that refuses to be written to; ``jax.tree.map`` makes a plain one of it."""

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """The values with their keys, as of a dict."""
        keys = tuple(sorted(self))
        return [(jax.tree_util.DictKey(key), self[key]) for key in keys], keys

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], values: Iterable[Any]) -> dict[Any, Any]:
        """A plain dict."""
        return dict(zip(keys, values, strict=True))

    def __reduce__(self) -> tuple[type, tuple[dict[Any, Any]]]:
        return dict, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentTypeError(
            "opt.state is a copy, and to write to it changes nothing. Assign it: opt.state = "
            "optax.tree.set(opt.state, learning_rate=0.01), or make dicts of it that can be "
            "written to: state = jax.tree.map(lambda x: x, opt.state)."
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def read_only(tree: Any) -> Any:
    """A pytree whose hyperparameters, as of ``optax.inject_hyperparams``, are ``ReadOnly``.

    All other dicts stay what they are, since a pytree of another type fits no tree of dicts.
    """

    def frozen(path: Any, node: Any) -> Any:
        if type(node) is not dict:
            return node
        if path and getattr(path[-1], "name", "") == "hyperparams":
            return ReadOnly(node)
        return {key: read_only(value) for key, value in node.items()}

    is_dict = lambda node: type(node) is dict
    return jax.tree_util.tree_map_with_path(frozen, tree, is_leaf=is_dict)


def _register() -> None:
    from flax import serialization as flax

    flax.register_serialization_state(
        ReadOnly,
        lambda node: flax.to_state_dict(dict(node)),
        lambda node, saved: flax.from_state_dict(dict(node), saved),
    )


_flax.when_loaded(_register)
