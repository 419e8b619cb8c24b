"""Runs: a step as its factory builds it, with plain SGD on chosen batches, and what it changes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.shards.batch_axes import take_rows
from crossshard.step.rebuild import draws

# Arrays by their path in a tree.
Snapshot = dict[str, "Copies"]
Factory = Callable[[Any, int], Any]

_ARRAYS = (jax.Array, np.ndarray)
# What is compared: the change of a parameter in the steps with a learning rate, divided by the
# rate; the change of any other real array in the idle step; and the metrics that this step returns.
UPDATE, STATISTICS, METRIC = "update", "statistics", "metric"
# Marks an idle step in place of the learning rate's bits. No learning rate has these bits, and no
# counter of a step has this value.
_IDLE = -1_234_567_891
# A step that has moved no parameter after this many calls never will.
_MOST_CALLS = 64


class ProbeState(NamedTuple):
    """The learning rate as an integer, so that no cast of the state to fewer bits changes it."""

    bits: jax.Array  # int32[], the bits of a float32


def probe() -> optax.GradientTransformationExtraArgs:
    """Return plain SGD that changes no parameter before its state has a learning rate.

    Such an idle step still changes statistics, counters and the like, on which the next step may
    depend. No parameter moves, however often the step updates.
    """

    def init(params: optax.Params) -> ProbeState:
        del params
        return ProbeState(jnp.int32(_IDLE))

    def update(
        updates: optax.Updates, state: ProbeState, params: optax.Params = None, **extra: object
    ) -> tuple[optax.Updates, ProbeState]:
        del params, extra
        rate = jax.lax.bitcast_convert_type(state.bits, jnp.float32)
        is_idle = state.bits == _IDLE
        step = lambda g: jnp.where(is_idle, 0, -rate * g).astype(g.dtype)
        return jax.tree.map(step, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _with_rate(x: Any, rate: float) -> Any:
    """Replace the idle mark of the probe in an array of the state by a positive learning rate."""
    if getattr(x, "dtype", None) != np.int32:
        return x
    where = jnp.where if isinstance(x, jax.Array) else np.where
    return where(x == _IDLE, np.float32(rate).view(np.int32), x)


class Run(NamedTuple):
    """An idle step, and as many steps with a learning rate as it takes to change a parameter."""

    start: Snapshot  # the state before these steps
    # UPDATE: what the steps with a learning rate changed, divided by the rate. STATISTICS: what the
    # idle step changed. METRIC: the real numbers that the idle step returned besides its state.
    seen: dict[str, Snapshot]
    calls: int  # the number of steps after the idle one

    def parameters(self) -> list[str]:
        """Return the names of arrays that the idle step leaves alone and later steps change."""
        idle = self.seen[STATISTICS]
        moved = [name for name, x in self.seen[UPDATE].items() if np.any(x.values)]
        return [name for name in moved if name in idle and not np.any(idle[name].values)]


class BuiltStep:
    """A user's step for a number of shards, with the probe as its optimizer."""

    def __init__(self, make_step: Factory, number: int) -> None:
        returned = make_step(probe(), number)
        if not isinstance(returned, tuple) or len(returned) < 2 or not callable(returned[0]):
            raise ArgumentTypeError(
                "make_step(optimizer, num_shards) must return (step, *state): the step, and the "
                f"arguments that it is called with before the batch; got {_described(returned)}."
            )
        self._step, *self._state = returned

    def run(
        self,
        batch: Sequence[Any],
        key: Any = None,
        rate: float = 1.0,
        calls: int | None = None,
        *,
        skipped: int = 0,
    ) -> Run:
        """Run an idle step, and then ``calls`` steps at a rate.

        Args:
          batch: the arguments after the state.
          key: the last argument, if the step takes one.
          rate: the learning rate.
          calls: how many steps have it; as many as it takes to change a parameter if ``None``.
          skipped: how many idle steps come before, which advance counters and keys.
        """
        state = fresh(self._state)
        for _ in range(skipped):
            state, _ = self._call(state, self._args(batch, key))
        start = snapshot(state)
        state, metrics = self._call(state, self._args(batch, key))
        idle = snapshot(state)
        state = map_arrays(lambda x: _with_rate(x, rate), fresh(state))
        number, run = 0, None
        while number < (calls or _MOST_CALLS) and not (run and run.parameters()):
            state, _ = self._call(state, self._args(batch, key))
            number += 1
            if calls in (None, number):
                updates = _changes(idle, snapshot(state), -rate)
                seen = {UPDATE: updates, STATISTICS: _changes(start, idle), METRIC: metrics}
                run = Run(start, seen, number)
        assert run is not None
        return run

    def draws(self, batch: Sequence[Any], key: Any = None) -> bool | None:
        """Return whether the step draws random numbers in its jaxpr; ``None`` if it has none."""
        state = fresh(self._state)
        graph, arrays = nnx.split(state) if holds_nnx(state) else (None, state)
        leaves, tree = jax.tree.flatten((arrays, self._args(batch, key)))

        def of_arrays(*own: Any) -> Any:
            given = iter(own)
            # Leaves that are no arrays are constants of the trace.
            filled = [next(given) if isinstance(leaf, _ARRAYS) else leaf for leaf in leaves]
            arrays, args = tree.unflatten(filled)
            out = self._step(*(arrays if graph is None else nnx.merge(graph, arrays)), *args)
            return [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]

        try:
            traced = jax.make_jaxpr(of_arrays)(*(x for x in leaves if isinstance(x, _ARRAYS)))
        except Exception:  # not every step can be traced as a whole
            return None
        return draws(traced)

    def _args(self, batch: Sequence[Any], key: Any) -> list[Any]:
        # Copied, since a step may donate them.
        return [*fresh(batch), *fresh([] if key is None else [key])]

    def _call(self, state: tuple[Any, ...], args: list[Any]) -> tuple[tuple[Any, ...], Snapshot]:
        trees = [jax.tree.structure(each) for each in state if not holds_nnx(each)]
        out = self._step(*state, *args)
        if len(trees) == 1 and jax.tree.structure(out) == trees[0]:
            out = (out,)
        outs = list(out) if isinstance(out, tuple) else [out]
        returned, rest = outs[: len(trees)], outs[len(trees) :]
        if list(map(jax.tree.structure, returned)) == trees:
            following = iter(returned)
            state = tuple(each if holds_nnx(each) else next(following) for each in state)
            return state, _scalars(rest)
        if holds_nnx(state):
            return state, _scalars(outs)  # the step changed all of it in place
        raise ArgumentError(
            "The step must return its next state first: a tuple that starts with "
            f"{'trees' if len(trees) > 1 else 'a tree'} of the same structure as the "
            f"{len(trees)} of the state that make_step returned. It returned {_described(out)}."
        )


def _changes(before: Snapshot, after: Snapshot, over: float = 1.0) -> Snapshot:
    """Return the changes of all arrays of real numbers, divided by a number."""
    return {
        name: now.real(before[name].values, over)
        for name, now in after.items()
        if now.is_float and name in before
        if now.values.shape[1:] == before[name].values.shape[1:]
    }


def rows_of(batch: Any, axes: Sequence[int | None]) -> int:
    """Return the number of rows of a batch, given the axis of each of its arrays."""
    for leaf, axis in zip(jax.tree.leaves(batch), axes, strict=True):
        if np.ndim(leaf) and axis is not None:
            return int(np.shape(leaf)[axis])
    raise ArgumentError(
        "The batch has no array with rows. Pass it after make_step: verify(make_step, x, y)."
    )


def rows_taken(batch: Any, axes: Sequence[int | None], rows: np.ndarray) -> Any:
    """Return these rows of a batch; arrays with another number of rows stay as they are."""
    number = rows_of(batch, axes)
    leaves, tree = jax.tree.flatten(batch)
    return tree.unflatten(
        x
        if axis is None or not np.ndim(x) or np.shape(x)[axis] != number
        else take_rows(x, axis, rows)
        for x, axis in zip(leaves, axes, strict=True)
    )


def _scalars(outs: Sequence[Any]) -> Snapshot:
    found = {}
    tree = outs[0] if len(outs) == 1 else tuple(outs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | float):
            copies = copies_of(leaf)
            if copies.is_float and np.size(leaf) <= np.shape(copies.values)[0] * 4096:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                found[name or "the value"] = copies.real(np.zeros(1))
    return found


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: {', '.join(type(each).__name__ for each in value)}"
    return type(value).__name__


# Snapshots: each array of a state by name, as numpy arrays, one for each copy of it.

_NUMBERS = jax.Array | np.ndarray | np.generic | float | int


@dataclasses.dataclass(frozen=True)
class Copies:
    """An array of a state, as its devices have it; or the change of it in a step."""

    values: np.ndarray  # [copies, …], one copy if all are equal; of a PRNG key, its data
    dtype: Any  # the dtype of the array
    rounding: float = 0.0  # the norm of the array's rounding errors

    @property
    def is_float(self) -> bool:
        """Whether it has real numbers."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    def real(self, less: np.ndarray, over: float = 1.0) -> "Copies":
        """Subtract an array and divide by a number, in float64."""
        values = self.values.astype(np.float64)
        rounding = float(jnp.finfo(self.dtype).eps * np.linalg.norm(values[0]))
        return Copies((values - less.astype(np.float64)) / over, self.dtype, rounding)

    def of_shape(self, shape: tuple[int, ...], number: int) -> np.ndarray | None:
        """Return float64[copies, size] if the array is of this shape on one device, else ``None``.

        If it is stacked, ``[shards, …]``, the slice of each shard is a copy.
        """
        own, values = self.values.shape[1:], self.values.astype(np.float64)
        if own == shape:
            return values.reshape(len(values), -1)
        if own == (number, *shape) or (shape[:1] == (1,) and own == (number, *shape[1:])):
            return values[0].reshape(number, -1)
        return None


def holds_nnx(tree: Any) -> bool:
    """Return whether a tree has NNX modules or optimizers, which a step may change in place."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_nnx)
    return any(map(_is_nnx, leaves))


def snapshot(state: Sequence[Any]) -> Snapshot:
    """Copy every array of the arguments of a step, by its path.

    All processes that have a part of an array must call this.
    """
    tree: Any = tuple(state)
    if holds_nnx(tree):
        tree = nnx.state(tree)
    elif len(tree) == 1:
        (tree,) = tree
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, _NUMBERS):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found[name.removesuffix("/value").removesuffix("/array") or "params"] = copies_of(leaf)
    return found


def copies_of(x: Any) -> Copies:
    """Copy an array as each device of this process has it."""
    if not isinstance(x, jax.Array):
        value = np.asarray(x)
        return Copies(value[None], value.dtype)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return Copies(np.asarray(jax.random.key_data(x))[None], x.dtype)
    if not (x.is_fully_addressable or x.is_fully_replicated):
        # Other processes have a part of it.
        everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
        x = jax.jit(lambda x: x, out_shardings=everywhere)(x)
    by_index: dict[Any, list[Any]] = {}
    # These are in the order of the mesh's devices.
    for shard in x.addressable_shards:
        by_index.setdefault(str(shard.index), []).append(shard)
    number = min(map(len, by_index.values()))
    whole = np.empty((number, *x.shape), x.dtype)
    for pieces in by_index.values():
        for copy, shard in enumerate(pieces[:number]):
            whole[(copy, *shard.index)] = np.asarray(shard.data)
    same = all(piece.tobytes() == whole[0].tobytes() for piece in whole[1:])
    return Copies(whole[:1] if same else whole, x.dtype)


def fresh(state: Sequence[Any]) -> tuple[Any, ...]:
    """Copy the arguments of a step."""
    copy = lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x.copy()
    return map_arrays(lambda x: copy(x) if isinstance(x, _ARRAYS) else x, tuple(state))


def map_arrays(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Map a function over the arrays of a tree; NNX modules in it are copied."""
    if not holds_nnx(tree):
        return jax.tree.map(function, tree, *others)
    (graph, arrays), *of_others = map(nnx.split, (tree, *others))
    return nnx.merge(graph, jax.tree.map(function, arrays, *(own for _, own in of_others)))


def _is_nnx(x: Any) -> bool:
    return isinstance(x, nnx.Pytree)
