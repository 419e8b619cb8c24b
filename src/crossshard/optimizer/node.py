"""OptimizerNode: an Optax transformation that is a node of NNX's graph, with slot variables."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import cloudpickle
import jax
import optax
from flax import nnx

from crossshard import _flax
from crossshard.optimizer.slot_variables import SlotVariables
from crossshard.variables.discovery import VariableContainer


class OptimizerNode(optax.GradientTransformationExtraArgs, VariableContainer):
    """An Optax transformation that JAX, NNX and pickle take apart and rebuild.

    Its children are its slot variables, so that NNX finds, splits, traces and saves them like those
    of ``nnx.Optimizer``. A rebuilt copy matches its variables by key on first use.
    """

    _inner: optax.GradientTransformation
    _name: str
    _slots: SlotVariables
    # The trace in which it was created; None if NNX or JAX rebuilt it from its leaves.
    _made_in: Any
    _of_one_object: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        _register(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # A subclass may take other arguments and call __init__ with ours, so the two functions of
        # the tuple are created here and filled in later.
        del args, kwargs
        functions = _Functions()
        self = super().__new__(cls, functions.init, functions.update)
        self._functions = functions
        return self

    def _construct(self, functions: Any, inner: optax.GradientTransformation, name: str) -> None:
        """Set ``init`` and ``update``, and the inner optimizer."""
        self._name = name
        self._inner = inner
        self._functions.become(functions, OptimizerNode.__repr__(self))
        self._slots = SlotVariables()
        self._made_in = _flax.current_trace()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @property
    def inner(self) -> optax.GradientTransformation:
        """The wrapped transformation."""
        return self._inner

    def get_name(self) -> str:
        """The name given at construction."""
        return self._name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_optimizer(self._inner)}, name={self._name!r})"

    def _attributes(self) -> dict[str, Any]:
        own = ("_slots", "_made_in", "_functions", *self._of_one_object)
        return {name: value for name, value in vars(self).items() if name not in own}

    @classmethod
    def _rebuilt(cls, functions: Any, attributes: Mapping[str, Any], slots: SlotVariables) -> Self:
        new = cls.__new__(cls)
        new.__dict__.update(attributes)
        new._functions.become(functions, OptimizerNode.__repr__(new))
        new._slots = slots
        new._made_in = None
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = self._rebuilt(self._functions.given, self._attributes(), self._slots.copied(memo))
        memo[id(self)] = new
        return new

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        # For copies in a process pool: unpickling executes what it is given, so a file is no place
        # for it. Optax's transformations are closures, which cloudpickle supports.
        made = cloudpickle.dumps((self._functions.given, self._attributes()))
        return _unpickled, (type(self), made, self._slots)


class _Functions:
    """The functions of an optimizer, which its ``__init__`` sets."""

    given: Any = None
    text = "Optimizer"

    def become(self, given: Any, text: str) -> None:
        self.given = given
        self.text = text

    def __repr__(self) -> str:
        # NNX prints an optimizer, which is a tuple, as its two functions.
        return self.text

    def init(self, params: Any) -> Any:
        return self.given.init(params)

    def update(self, updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return self.given.update(updates, state, params, **extra_args)


@dataclasses.dataclass(frozen=True, repr=False)
class _Static:
    """All of an optimizer but its slot variables; equal for an optimizer and its rebuilt copies."""

    functions: Any
    attributes: Mapping[str, Any] = dataclasses.field(compare=False)
    keys: tuple[str, ...]
    built: frozenset[str]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self.functions is not other.functions:
            return False
        return (self.keys, self.built) == (other.keys, other.built)

    def __hash__(self) -> int:
        return hash((id(self.functions), self.keys, self.built))

    def __repr__(self) -> str:
        return f"slots of {', '.join(self.keys) or 'nothing'}"


def _flatten(optimizer: OptimizerNode) -> tuple[Any, _Static]:
    slots = optimizer._slots
    static = _Static(
        optimizer._functions.given, optimizer._attributes(), slots.known_keys(), slots.built
    )
    return ((jax.tree_util.GetAttrKey("state"), slots.tree),), static


def _register(cls: type[OptimizerNode]) -> None:
    """Make a class of optimizers a node of JAX's trees and of NNX's graphs."""

    def unflatten(static: _Static, children: Any) -> OptimizerNode:
        slots = SlotVariables(dict.fromkeys(static.keys), static.built, *children)
        return cls._rebuilt(static.functions, static.attributes, slots)

    jax.tree_util.register_pytree_with_keys(cls, _flatten, unflatten)
    nnx.register_data_type(cls)


def _unpickled(cls: type[OptimizerNode], made: bytes, slots: SlotVariables) -> OptimizerNode:
    functions, attributes = cloudpickle.loads(made)
    return cls._rebuilt(functions, attributes, slots)


def describe_optimizer(inner: optax.GradientTransformation) -> str:
    """The name of an inner optimizer: its repr, or its factory function."""
    if isinstance(inner, OptimizerNode):
        return repr(inner)
    function = getattr(inner.update, "__qualname__", type(inner).__name__)
    return "optax " + function.split(".")[0]
