"""TrainState: the state of a step between batches."""

import contextlib
import dataclasses
import operator
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, UInt32

from crossshard import _check
from crossshard._annotations import PyTree
from crossshard.errors import ArgumentError, ArgumentTypeError, CrossshardError
from crossshard.model.models import Skeleton
from crossshard.pipeline.stage import CrossShardState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, step count and random key: a pytree of arrays on the mesh.

    A step takes a state and returns the next. The state is donated: do not read it afterwards.

    Attributes:
      step: int32[], the number of steps taken.
      params: the parameters, replicated; ``[shards, …]`` with groups; with ``params="sharded"``
        split over the shards, in their own shapes.
      opt_state: a ``CrossShardState``: the states of the stages and, as ``inner_state``, that of
        the inner optimizer; partitioned over the shards if the weight update is sharded, and
        ``[shards, …]`` with groups.
      frozen: the arrays of the model that stay unchanged: the parameters that ``wrt`` leaves out,
        and the arrays of a pytree that are not floating; replicated, except for large parameters
        with ``params="sharded"``.
      model_state: the other state of the model: the variables of an NNX module, ``[shards, …]``,
        since each shard keeps its own statistics and random streams; or the state that the loss
        returns.
      rng: uint32[…], the data of the key from which each step and shard derives its own: raw, since
        typed keys slow down every call.
      skeleton: the static part of the model.
      rng_impl: the implementation of the key.
      grouped: whether each group has its own parameters.
      other_axes: the spec on the other axes of the mesh of each array of ``params``, ``frozen`` and
        ``model_state``, in this order; empty if none is split over these axes.
      per_shard: whether each shard has its own ``model_state``.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
    >>> state = step.init(jnp.float32(3))
    >>> int(state.step), float(state.params)
    (0, 3.0)
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: CrossShardState
    frozen: PyTree
    model_state: PyTree
    rng: UInt32[Array, " ..."]
    skeleton: Skeleton = dataclasses.field(metadata={"static": True})
    rng_impl: Hashable = dataclasses.field(metadata={"static": True})
    grouped: bool = dataclasses.field(metadata={"static": True})
    other_axes: tuple[PartitionSpec, ...] = dataclasses.field(default=(), metadata={"static": True})
    per_shard: bool = dataclasses.field(default=False, metadata={"static": True})

    # A step returns its state as leaves, and they become trees only when somebody reads one.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            flat = self.__dict__.get("_flat")
            if flat is None or name not in _TREES:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            self.__dict__.update(flat.structure.tree.unflatten(flat.leaves).__dict__)
            # The trees may be written to from now on, as NNX variables are.
            self.__dict__["_returned"] = self.__dict__.pop("_flat", flat)
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


_FIELDS = dataclasses.fields(TrainState)
_STATIC = [field.name for field in _FIELDS if field.metadata.get("static")]
_TREES = {field.name for field in _FIELDS} - {"step", *_STATIC}


class StateStructure:
    """The structure of a state; equal ones are one object, so that they compare at once.

    To compare those of 200 NNX variables takes a millisecond, which JAX would do at every step.
    """

    _known: ClassVar[weakref.WeakValueDictionary[Any, "StateStructure"]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, tree: Any, state: TrainState):
        self.tree = tree
        self.static = {name: getattr(state, name) for name in _STATIC}

    @classmethod
    def of(cls, tree: Any, state: TrainState) -> "StateStructure":
        """Return the structure of a state, given its treedef."""
        return cls._known.get(tree) or cls._known.setdefault(tree, cls(tree, state))


@jax.tree_util.register_pytree_with_keys_class
class FlatState:
    """A state as the leaves of its trees: what a compiled step takes and returns.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
    >>> flat = FlatState.of(step.init(jnp.float32(3)))
    >>> len(flat.leaves), float(flat.state().params)
    (3, 3.0)
    """

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: Iterable[Any], structure: StateStructure):
        self.leaves = tuple(leaves)
        self.structure = structure

    @classmethod
    def of(cls, state: TrainState) -> "FlatState":
        """Return the leaves of a state; those of a state that a step has returned are kept."""
        kept: FlatState | None = state.__dict__.get("_flat")
        if kept is not None:
            return kept
        leaves, tree = jax.tree.flatten(state)
        return cls(leaves, StateStructure.of(tree, state))

    def state(self) -> TrainState:
        """Return the state, whose trees are made when they are read."""
        state = object.__new__(TrainState)
        state.__dict__.update(self.structure.static, step=self.leaves[0], _flat=self)
        return state

    def tree_flatten(self) -> tuple[tuple[Any, ...], StateStructure]:
        """Return the leaves and the structure, as JAX asks for them."""
        return self.leaves, self.structure

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], StateStructure]:
        """Return the leaves with the names that they have in a state, for programs and errors."""
        paths = jax.tree_util.tree_leaves_with_path(self.structure.tree.unflatten(self.leaves))
        keys = [jax.tree_util.GetAttrKey(jax.tree_util.keystr(path)[1:]) for path, _ in paths]
        return list(zip(keys, self.leaves, strict=True)), self.structure

    @classmethod
    def tree_unflatten(cls, structure: StateStructure, leaves: Iterable[Any]) -> "FlatState":
        """Return the state of these leaves."""
        return cls(leaves, structure)


def is_unread(state: TrainState) -> bool:
    """Return whether nobody has read the trees of a state since a step returned it."""
    return "_flat" in state.__dict__


def put_into(state: TrainState, flat: FlatState) -> dict[str, Any]:
    """Return the arrays, by name, that somebody has put into a state since a step returned it.

    ``flat`` is the state as its leaves. Of a state that no step has returned, such as a copy, these
    are the arrays of this process alone: all have computed those that lie on devices of several.
    """
    if is_unread(state):
        return {}
    leaves, returned = flat.leaves, state.__dict__.pop("_returned", None)
    if returned is None or len(returned.leaves) != len(leaves):
        is_new = [getattr(x, "is_fully_addressable", True) for x in leaves]
    else:
        is_new = list(map(operator.is_not, leaves, returned.leaves))
    if not any(is_new):
        return {}
    each = zip(names_of(state), leaves, is_new, strict=True)
    return {name: x for name, x, new in each if new and _check.is_number(x)}


def names_of(state: TrainState) -> tuple[str, ...]:
    """Return the name of each array of a state, such as ``"opt_state.inner_state[0].mu"``."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return tuple(
        jax.tree_util.keystr(path).removeprefix(".").removesuffix(".value") for path in paths
    )


def check_state(state: Any, *, or_types: bool = True) -> None:
    """Raise unless ``state`` is a state, of arrays that JAX can hold.

    Args:
      state: the argument to check.
      or_types: whether it may be the types of a state, to compile for.

    Raises:
      ArgumentError: it was donated.
      ArgumentTypeError: it is something else.
    """
    check_is_state(state)
    _check.arrays("state", state, or_types=or_types)


def check_devices(state: TrainState, mesh: Mesh) -> None:
    """Raise ArgumentError unless a state is on the devices of a mesh, and not of another one."""
    ids = lambda devices: sorted(device.id for device in devices)
    own = set(mesh.devices.flat)
    for x in jax.tree.leaves(state):
        if isinstance(x, jax.Array) and x.committed and x.sharding.device_set != own:
            raise ArgumentError(
                f"The state is on devices {ids(x.sharding.device_set)}, and the mesh of this step "
                f"has {ids(own)}. Take it there with step.reshard(other.unshard(state))."
            )


@contextlib.contextmanager
def on_devices(state: TrainState, mesh: Mesh) -> Iterator[None]:
    """Raise what ``check_devices`` does in place of an error of JAX."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error, CrossshardError):
            check_devices(state, mesh)
        raise


def check_is_state(state: Any) -> None:
    """Raise unless ``state`` is a state that has not been donated; takes about a microsecond.

    Raises: as ``check_state``.
    """
    if not isinstance(state, TrainState):
        raise ArgumentTypeError(
            f"A step takes the state that init(params) or the step before returned; got "
            f"{type(state).__name__}."
        )
    # Types and traced values have no buffers.
    count = state.step
    is_int = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not is_int and (getattr(count, "shape", None) != () or count.dtype != np.int32):
        raise ArgumentTypeError(
            f"state.step is the number of steps, int32[]; got {_check.described(count)}. A state "
            f"is what init(params) or a step returned, with arrays of the same types."
        )
    has_buffer = isinstance(count, jax.Array) and not isinstance(count, jax.core.Tracer)
    if has_buffer and count.is_deleted():
        raise ArgumentError(
            "This state has been used: it was donated to a step. Use the state that the step "
            "returned: state, metrics = step(state, batch)."
        )
