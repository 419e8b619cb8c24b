"""Guards: compare the shards' copies of arrays every few steps, and repair those that differ."""

import dataclasses
import enum
import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int

from crossshard import _check, _jax
from crossshard._hash import from_words, to_words, word_of
from crossshard._text import listed
from crossshard.collectives.sums import sum_over_shards
from crossshard.errors import ArgumentError, DivergenceError, DivergenceWarning
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState, names_of
from crossshard.shards.axes import Shards
from crossshard.shards.devices import number_of_shards

__all__ = ["Divergence"]


class OnDivergence(enum.StrEnum):
    """What happens when copies differ.

    RAISE: the host raises a ``DivergenceError``; the state is not touched.
    REPAIR: the value of the majority is copied to all before the step is taken. Without a majority
      it is as for RAISE.
    """

    RAISE = "raise"
    REPAIR = "repair"


class Divergence(NamedTuple):
    """What a comparison of the shards' copies found, as ``metrics["divergence"]``.

    The state is compared before the step is taken. ``TrainStep.compared`` names the leaves.

    Attributes:
      step: int32[], the step count of the state; -1 if it was not compared at this step.
      diverged: bool[], whether any copies differ.
      undecided: bool[], whether no majority has the same copy of some leaf, so that nobody can tell
        which is right; then all of its shards are in ``shards``.
      shards: bool[shards], those with a copy that differs from that of the majority.
      leaves: bool[leaves], those of which copies differ.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> loss_fn = lambda w, x: (w * x).mean()
    >>> step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1, check_divergence=100)
    >>> state, metrics = step(step.init(jnp.float32(3)), jnp.ones(1))
    >>> int(metrics["divergence"].step), bool(metrics["divergence"].diverged)
    (0, False)
    """

    step: Int[Array, ""]
    diverged: Bool[Array, ""]
    undecided: Bool[Array, ""]
    shards: Bool[Array, " shards"]
    leaves: Bool[Array, " leaves"]


# The scope of comparisons; and of those that come in few steps.
SCOPE, SELDOM = "check_divergence", "if_due"


def check_divergence_options(every: Any, on_divergence: Any) -> "Sentinel | None":
    """Check ``check_divergence`` and ``on_divergence``; return a sentinel if there is to be one."""
    action = _check.choice("on_divergence", on_divergence, OnDivergence)
    if every is None:
        if action is not OnDivergence.RAISE:
            raise ArgumentError(
                f"on_divergence={str(action)!r} needs comparisons that find something: write "
                f"check_divergence=100, to compare every 100 steps."
            )
        return None
    number = _check.whole_number("check_divergence", every, hint="It counts steps, such as 100.")
    return Sentinel(number, action)


def _compared_places(layout: StateLayout, state: TrainState) -> tuple[list[int], list[int]]:
    """Return the places of the leaves that all shards have a copy of, and of those of a group."""
    placements = layout.placements(state)
    of_all = jax.tree.map(lambda x: not (x.per_shard or x.is_split), placements)
    of_group = jax.tree.map(lambda _: False, placements)
    # A group of one shard has no other copy to compare with.
    if layout.groups is not None and layout.groups.size > 1:
        # Stored one for each shard, but equal within a group.
        unsplit = functools.partial(jax.tree.map, lambda x: not x.is_split)
        inner = placements.opt_state
        of_group = dataclasses.replace(
            of_group,
            params=unsplit(placements.params),
            opt_state=of_group.opt_state._replace(
                metrics=unsplit(inner.metrics), inner_state=unsplit(inner.inner_state)
            ),
        )
    in_groups = np.array(jax.tree.leaves(of_group))
    everywhere = np.array(jax.tree.leaves(of_all)) & ~in_groups
    return np.flatnonzero(everywhere).tolist(), np.flatnonzero(in_groups).tolist()


def names_of_compared(layout: StateLayout, state: TrainState) -> tuple[str, ...]:
    """Return the names of the leaves that are compared, in their order."""
    names = names_of(state)
    places = itertools.chain(*_compared_places(layout, state))
    return tuple(names[place] for place in sorted(places))


class Majority(NamedTuple):
    """How this shard's copies of some leaves compare with those of other shards."""

    common: jax.Array  # uint32[leaves], the word of the majority
    healthy: jax.Array  # bool[leaves], whether this shard has that word
    equal: jax.Array  # bool[leaves], whether all shards have it
    decided: jax.Array  # bool[leaves], whether more than half of them have it


def find_majority(words: jax.Array, shards: Shards) -> Majority:
    """Find the majority's word for each leaf, given this shard's words, uint32[leaves]."""
    places = jnp.arange(32, dtype=jnp.uint32)
    bits = (words[:, None] >> places) & 1
    # If more than half have the same word, each of its bits is that of the majority. So the bytes
    # to send do not depend on the number of shards.
    counts = sum_over_shards(bits.astype(jnp.int32), shards)
    common = jnp.sum(
        (2 * counts > shards.group_size).astype(jnp.uint32) << places, axis=1, dtype=jnp.uint32
    )
    healthy = words == common
    number = sum_over_shards(healthy.astype(jnp.int32), shards)
    return Majority(common, healthy, number == shards.group_size, 2 * number > shards.group_size)


@dataclasses.dataclass(frozen=True)
class Sentinel:
    """Compares the copies of a state before each step whose count is a multiple of ``every``."""

    every: int  # the number of steps from one comparison to the next
    on_divergence: OnDivergence  # what happens when copies differ

    @property
    def repairs(self) -> bool:
        """Whether the value of the majority is copied to all."""
        return self.on_divergence is OnDivergence.REPAIR

    def describe(self) -> str:
        """Describe how often copies are compared, and what happens if they differ."""
        return f"copies compared every {self.every} steps: {self.on_divergence} if they differ"

    def __call__(self, layout: StateLayout, state: TrainState) -> tuple[TrainState, Divergence]:
        """Return the state, repaired if this is asked for and possible, and what was found."""
        mesh = layout.mesh
        leaves, tree = jax.tree.flatten(state)
        specs = [sharding.spec for sharding in jax.tree.leaves(layout.shardings(state))]
        # Those of all shards come first, so that each kind is one block.
        of_all, of_group = _compared_places(layout, state)
        chosen = of_all + of_group
        own_specs = [specs[index] for index in chosen]
        # Copies may differ here, so nothing may assume that they are equal.
        run = _jax.shard_map(
            functools.partial(self._of_one_device, layout, len(of_all), np.argsort(chosen)),
            mesh=mesh,
            in_specs=(PartitionSpec(), own_specs),
            out_specs=(PartitionSpec(), own_specs),
        )
        found, repaired = run(state.step, [leaves[index] for index in chosen])
        for index, leaf in zip(chosen, repaired, strict=True):
            leaves[index] = leaf
        return tree.unflatten(leaves), found

    def _of_one_device(
        self, layout: StateLayout, of_all: int, rank: Any, step: jax.Array, leaves: list[Any]
    ) -> tuple[Divergence, Any]:
        """Compare, and maybe repair, one device's leaves, the first ``of_all`` with all shards."""
        mesh, names = layout.mesh, layout.axes
        shards = Shards(layout.number_of_shards, names, manual=True, groups=layout.groups)
        on_any = lambda flags: lax.pmax(flags.astype(jnp.int32), mesh.axis_names) > 0

        # All agree on this, since shards whose counts differ would hang in collectives.
        due = on_any(step % self.every == 0)
        # Each in a branch of its own, though all are taken, so that XLA for CPUs hashes one after
        # the other: a step would take memory for all at once, even if it compares nothing.
        hashed = lambda x: lax.cond(due, word_of, lambda _: jnp.uint32(0), x)

        def compare(leaves: list[Any]) -> tuple[Divergence, list[Any]]:
            words = jnp.stack([to_words(step), *map(hashed, leaves)])
            majority = find_majority(words[: 1 + of_all], shards.all)
            # The step count itself, to report it; its hash is among those of the leaves.
            count = lax.bitcast_convert_type(majority.common[0], jnp.int32)
            majority = Majority(*(x[1:] for x in majority))
            if len(words) > 1 + of_all:
                of_group = find_majority(words[1 + of_all :], shards)
                pairs = zip(majority, of_group, strict=True)
                majority = Majority(*map(jnp.concatenate, pairs))
            suspect = jnp.any(~(majority.healthy & majority.decided))
            own = jnp.arange(shards.num_shards) == shards.index()
            undecided = jnp.any(~majority.decided)[None]
            flags = on_any(jnp.concatenate([~majority.equal, own & suspect, undecided]))
            differ, suspects = flags[: len(leaves)], flags[len(leaves) : -1]
            found = Divergence(count, jnp.any(differ), flags[-1], suspects, differ[rank])
            if not self.repairs:
                return found, leaves

            def repair(leaves: list[Any]) -> list[Any]:
                repaired = []
                for index, x in enumerate(leaves):
                    own = majority.healthy[index], majority.decided[index]
                    those = shards.all if index < of_all else shards
                    mend = functools.partial(_repaired, *own, those)
                    # One by one, so that only those that differ are sent, one at a time.
                    repaired.append(lax.cond(differ[index], mend, lambda x: x, x))
                return repaired

            return found, lax.cond(found.diverged, repair, lambda leaves: leaves, leaves)

        def turn(carry: tuple[jax.Array, Divergence, Any]) -> tuple[jax.Array, Divergence, Any]:
            found, given = compare(carry[2])
            return jnp.bool_(False), found, lax.optimization_barrier(given)

        none = lambda number: jnp.zeros(number, bool)
        clean = jnp.bool_(False)
        nothing = Divergence(
            jnp.int32(-1), clean, clean, none(shards.num_shards), none(len(leaves))
        )
        if self.every == 1:
            return compare(leaves)
        # The results of a loop overwrite its inputs, which XLA may copy in a conditional.
        with jax.named_scope(SELDOM):
            return lax.while_loop(lambda carry: carry[0], turn, (due, nothing, leaves))[1:]


def _repaired(healthy: jax.Array, decided: jax.Array, shards: Shards, x: Any) -> jax.Array:
    """Replace a bad copy by the first healthy one, if it is known which are healthy."""
    place, places = shards.index_in_group(), jnp.arange(shards.group_size)
    counts = sum_over_shards(((places == place) & healthy).astype(jnp.int32), shards)
    words = to_words(x)
    of_first = jnp.where(place == jnp.argmax(counts), words, 0)
    given = sum_over_shards(of_first, shards)
    return from_words(jnp.where(decided & ~healthy, given, words), x)


# How many names a message lists: a fault may be in every array of a shard.
_MOST_NAMED = 3


def report_divergence(
    found: Divergence, sentinel: Sentinel, names: Sequence[str], mesh: Mesh, axes: tuple[str, ...]
) -> None:
    """Raise an error for copies that differ, or warn of those that have been repaired.

    Args:
      found: the result of the comparison.
      sentinel: the sentinel that compared.
      names: the names of the leaves that were compared.
      mesh: the mesh of the step.
      axes: its shard axes.

    Raises:
      DivergenceError: copies still differ.
    """
    places = lambda flags: np.flatnonzero(flags).tolist()
    what = listed([names[index] for index in places(found.leaves)], _MOST_NAMED)
    where = listed([_shard(index, mesh, axes) for index in places(found.shards)], _MOST_NAMED)
    step, fault = int(found.step), "Memory or arithmetic of a device is at fault"
    differ = f"Before step {step} another copy of {what} than on most shards was on {where}."
    if found.undecided:
        differ = (
            f"Before step {step} the copies of {what} differ between {where}. No majority of the "
            f"shards has the same, so nobody can tell which copy is right."
        )
    elif sentinel.repairs:
        warnings.warn(
            f"{differ} All shards were given the copy of the majority. {fault}: replace it if this "
            f"comes again.",
            DivergenceWarning,
            stacklevel=4,
        )
        return
    raise DivergenceError(
        f"{differ} They have not been changed. {fault}. Go on without it, from a checkpoint of "
        f"step {max(0, step - sentinel.every)} or before: checkpoints.restore(state, step) reads "
        f"one."
    )


def _shard(index: int, mesh: Mesh, axes: tuple[str, ...]) -> str:
    """Describe a shard, as ``shard 3 (device 3 of process 0)``."""
    ranks = [mesh.axis_names.index(axis) for axis in axes]
    by_shard = np.moveaxis(mesh.devices, ranks, range(len(ranks)))
    devices = by_shard.reshape(number_of_shards(mesh, axes), -1)[index]
    processes = sorted({device.process_index for device in devices})
    named = lambda numbers: listed(list(map(str, numbers)), _MOST_NAMED)
    device = f"device{'s' * (len(devices) > 1)} {named(each.id for each in devices)}"
    process = f"process{'es' * (len(processes) > 1)} {named(processes)}"
    return f"shard {index} ({device} of {process})"


def copy_state(state: TrainState) -> TrainState:
    """Copy a state, to donate the copy."""
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings)(state)


def differing(
    layout: StateLayout, state: TrainState, again: TrainState
) -> dict[str, tuple[int, ...]]:
    """Return the names of the arrays whose bits differ, and the shards on which they do."""
    number = layout.number_of_shards
    specs = jax.tree.map(lambda sharding: sharding.spec, layout.shardings(state))
    differ = lambda one, other: jnp.any(to_words(one) != to_words(other))

    def on_one_device(state: Any, again: Any) -> jax.Array:
        """Return which leaves differ on any device of each shard, bool[shards, leaves]."""
        leaves = jnp.stack(jax.tree.leaves(jax.tree.map(differ, state, again)))
        own = jnp.arange(number) == Shards(number, layout.axes, manual=True).index()
        flags = (own[:, None] & leaves).astype(jnp.int32)
        return lax.pmax(flags, layout.mesh.axis_names) > 0

    run = _jax.shard_map(
        on_one_device, mesh=layout.mesh, in_specs=(specs, specs), out_specs=PartitionSpec()
    )
    found = jax.device_get(jax.jit(run)(state, again))
    return {
        name: tuple(np.flatnonzero(on_shards).tolist())
        for name, on_shards in zip(names_of(state), found.T, strict=True)
        if on_shards.any()
    }
