"""Owners: an update leaf by leaf, in which one shard owns each leaf that cannot be cut.

A leaf that is updated element by element is cut into slices. Any other leaf, such as a matrix that
Muon updates, is a block, or each of its layers is one. The shard that updates a block is its owner,
and only the owner keeps the state of the block. Gradients travel to the owners, and new values
back, in one of two ways: all shards sum a whole gradient into the row of its owner, and gather
all rows; or each shard sends its slice of the gradient, and gets its slice of the new value.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from crossshard._check import is_inexact
from crossshard.collectives.in_order import sum_of_nodes
from crossshard.collectives.sums import bucketed_gather, bucketed_sum, resplit, widen
from crossshard.jaxprs.leafwise import Leafwise
from crossshard.jaxprs.rewrite import Pieces, in_loop
from crossshard.pipeline.update.arrays import Arrays, Update, squared_norm_of_slices
from crossshard.shards.axes import Shards
from crossshard.shards.cut import ANY, Partition, TileShape, partition_along_axis

# An array, by its place in a list, or one of its layers along the first axis.
Block = tuple[int, int | None]
# Arrays by their places among the inputs, or the outputs, of the jaxpr of an update.
Values = Mapping[int, Any]

# Rows of more bytes take too much memory at once.
_WINDOW = 1 << 26


# ---- Blocks in the rows of their owners.


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of one dtype in a matrix; each shard has the row with the blocks that it owns."""

    dtype: Any  # their dtype
    shapes: Mapping[Block, tuple[int, ...]]  # the shape of each block
    of_shard: tuple[tuple[Block, ...], ...]  # for each shard its blocks, in their order
    tile: TileShape  # the smallest slice that the platform scatters efficiently

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """The places of the arrays in a list; the matrix is at the first of them."""
        return tuple(sorted({place for place, _ in self.shapes}))

    @functools.cached_property
    def width(self) -> int:
        """The elements of a row, with its padding."""
        widest = max(sum(math.prod(self.shapes[block]) for block in own) for own in self.of_shard)
        return widest + self.tile.padding(widest)

    @property
    def partition(self) -> Partition:
        """How the matrix is split into the rows."""
        # XLA for TPUs scatters a matrix only if it has many short rows.
        lanes = self.tile.lanes if self.tile.size > 1 else self.width
        number = len(self.of_shard)
        return Partition((number * (self.width // lanes), lanes), number, 0, self.tile)

    def row(self, shard: int, blocks: Mapping[Block, Any], dtype: Any = None) -> jax.Array:
        """Return the row of a shard from its blocks; in ``dtype``, if all of them have it."""
        parts = [jnp.ravel(blocks[block]) for block in self.of_shard[shard]]
        padding = self.width - sum(part.size for part in parts)
        flat = jnp.concatenate([*parts, jnp.zeros(padding, dtype or self.dtype)])
        return flat.reshape(self.partition.local_shape)

    def within(self, shard: int, row: jax.Array) -> dict[Block, jax.Array]:
        """Return the blocks of a shard from its row."""
        found, start, flat = {}, 0, row.ravel()
        for block in self.of_shard[shard]:
            end = start + math.prod(self.shapes[block])
            found[block] = flat[start:end].reshape(self.shapes[block])
            start = end
        return found

    def put(self, arrays: Sequence[Any], matrix: Any) -> list[Any]:
        """Return a list with the matrix, or a row of it, in place of its arrays, and empty ones."""
        found = list(arrays)
        for place in self.places:
            found[place] = jnp.zeros(0, matrix.dtype)
        found[self.places[0]] = matrix
        return found


def blocks_of(
    types: Mapping[Block, Any],
    owners: Mapping[Block, int],
    number: int,
    tile: TileShape,
    most: float = math.inf,
) -> tuple[Blocks, ...]:
    """Return blocks of these types with their owners among ``number`` shards, a matrix per dtype.

    A row of more than ``most`` bytes begins another matrix.
    """
    found = []
    for dtype in sorted({x.dtype for x in types.values()}, key=str):
        left = sorted(block for block, x in types.items() if x.dtype == dtype)
        while left:
            bytes_of, taken = [0] * number, list[list[Block]]([] for _ in range(number))
            # An array stays in one matrix with all of its layers.
            for _, own in itertools.groupby(list(left), lambda block: block[0]):
                more, blocks = list(bytes_of), list(own)
                for block in blocks:
                    more[owners[block]] += bytes_of_type(types[block])
                if any(bytes_of) and max(more) > most:
                    continue
                bytes_of = more
                for block in blocks:
                    taken[owners[block]].append(block)
                    left.remove(block)
            shapes = {block: tuple(types[block].shape) for own in taken for block in own}
            found.append(Blocks(dtype, shapes, tuple(map(tuple, taken)), tile))
    return tuple(found)


def owners_of(costs: Mapping[Block, float], number: int) -> dict[Block, int]:
    """Deal blocks to ``number`` shards: by falling cost, each to the least loaded shard.

    >>> owners_of({(0, None): 5, (1, 0): 3, (1, 1): 3, (2, None): 1}, 2)
    {(0, None): 0, (1, 0): 1, (1, 1): 1, (2, None): 0}
    """
    loads, owners = [0.0] * number, {}
    for block in sorted(costs, key=lambda block: (-costs[block], block)):
        owners[block] = loads.index(min(loads))
        loads[owners[block]] += costs[block]
    return owners


def take(arrays: Sequence[Any] | Mapping[int, Any], block: Block) -> Any:
    """Return a block of these arrays."""
    place, layer = block
    return arrays[place] if layer is None else arrays[place][layer : layer + 1]


def bytes_of_type(x: Any) -> int:
    """Return the number of bytes of an array, from its type."""
    return math.prod(x.shape) * int(x.dtype.itemsize)


def pack(every: Iterable[Blocks], arrays: Sequence[Any]) -> list[Any]:
    """Return a list of whole arrays, with each matrix in the place of the first of its arrays."""
    found = list(arrays)
    for each in every:
        given = {block: take(arrays, block) for block in each.shapes}
        dtype = jnp.result_type(*(arrays[place] for place in each.places))
        own = [each.row(shard, given, dtype) for shard in range(len(each.of_shard))]
        found = each.put(found, jnp.concatenate(own))
    return found


def pack_own(every: Iterable[Blocks], arrays: Sequence[Any], index: jax.Array) -> list[Any]:
    """Return the list of ``pack`` with only the row of the shard at ``index`` of each matrix."""
    found = list(arrays)
    for each in every:
        most = max(map(len, each.of_shard))
        table = np.zeros((len(each.of_shard), most), np.int32)
        for shard, own in enumerate(each.of_shard):
            table[shard, : len(own)] = [layer or 0 for _, layer in own]
        which = jnp.asarray(table)[index]

        def row(shard: int, each: Blocks = each, which: jax.Array = which) -> jax.Array:
            own = {}
            for nth, block in enumerate(each.of_shard[shard]):
                x = arrays[block[0]]
                layer = functools.partial(lax.dynamic_slice_in_dim, x, which[nth], 1)
                own[block] = x if block[1] is None else layer()
            return each.row(shard, own)

        found = each.put(found, _on_owner(_places_of(each.of_shard), index, row))
    return found


def unpack(every: Iterable[Blocks], arrays: Sequence[Any]) -> list[Any]:
    """Undo ``pack``."""
    found = list(arrays)
    for each in every:
        blocks: dict[Block, Any] = {}
        for shard, row in enumerate(jnp.split(arrays[each.places[0]], len(each.of_shard))):
            blocks |= each.within(shard, row)
        for place, x in _joined(blocks).items():
            found[place] = x
    return found


def packed_partitions(
    every: Iterable[Blocks], partitions: Sequence[Partition]
) -> tuple[Partition, ...]:
    """Return the partitions of what ``pack`` returns."""
    found = list(partitions)
    for each in every:
        for place in each.places:
            found[place] = Partition((0,))
        found[each.places[0]] = each.partition
    return tuple(found)


def _joined(blocks: Mapping[Block, Any]) -> dict[int, Any]:
    """Join blocks into the arrays of which all blocks are given."""
    found = {}
    for place, own in itertools.groupby(sorted(blocks), lambda block: block[0]):
        parts = [blocks[block] for block in own]
        found[place] = parts[0] if (place, None) in blocks else jnp.concatenate(parts)
    return found


def _of_block(partitions: Sequence[Partition], block: Block) -> Partition:
    """Return the partition of a block, whose array is split along another axis than the first."""
    place, layer = block
    whole = partitions[place]
    return whole if layer is None else dataclasses.replace(whole, shape=(1, *whole.shape[1:]))


def _types_of(
    blocks: Iterable[Block], partitions: Sequence[Partition], like: Sequence[Any]
) -> dict[Block, jax.ShapeDtypeStruct]:
    """Return the types of blocks of arrays with these partitions, and the dtypes of ``like``."""
    shape = lambda block: _of_block(partitions, block).local_shape
    return {block: jax.ShapeDtypeStruct(shape(block), like[block[0]].dtype) for block in blocks}


def _places_of(of_shard: Sequence[Sequence[Block]]) -> list[tuple[int, ...]]:
    """Return for each shard the arrays of which it owns blocks."""
    return [tuple(place for place, _ in own) for own in of_shard]


def _on_owner(kinds: Sequence[Hashable], index: jax.Array, function: Callable[[int], Any]) -> Any:
    """Return ``function(index)`` of a shard, compiled once for all shards of a kind."""
    first = {kind: shard for shard, kind in reversed(list(enumerate(kinds)))}
    branches = [functools.partial(function, shard) for shard in first.values()]
    branch_of = [list(first).index(kind) for kind in kinds]
    return lax.switch(jnp.asarray(branch_of)[index], branches)


# ---- Blocks in slices, to and from their owners.


def _slices_to_owners(
    blocks: Blocks, partitions: Sequence[Partition], slices: Values, shards: Shards
) -> Callable[[int], dict[Block, jax.Array]]:
    """Send this shard's slices; return a function that returns an owner's whole blocks on it."""
    given = {block: take(slices, block) for block in blocks.shapes}
    sent = [blocks.row(owner, given).ravel() for owner in range(shards.num_shards)]
    received = resplit(jnp.stack(sent), 0, 0, shards)

    def at_owner(owner: int) -> dict[Block, jax.Array]:
        of_shards = [blocks.within(owner, row) for row in received]
        found = {}
        for block in blocks.of_shard[owner]:
            own = _of_block(partitions, block)
            parts = [each[block] for each in of_shards]
            whole = parts[0] if own.number == 1 else jnp.concatenate(parts, own.axis or 0)
            found[block] = own.unpack(whole)
        return found

    return at_owner


def _by_owner(
    blocks: Blocks, partitions: Sequence[Partition], owner: int, whole: Mapping[Block, Any]
) -> jax.Array:
    """Return what an owner sends to each shard: its slices of the blocks, ``[shards, width]``."""
    number, split = len(blocks.of_shard), {}
    for block in blocks.of_shard[owner]:
        own = _of_block(partitions, block)
        x = own.pack(whole[block])
        split[block] = [x] * number if own.number == 1 else jnp.split(x, number, own.axis or 0)
    of_shard = lambda to: {block: each[to] for block, each in split.items()}
    return jnp.stack([blocks.row(owner, of_shard(to)).ravel() for to in range(number)])


def _slices_from_owners(blocks: Blocks, sent: jax.Array, shards: Shards) -> dict[int, jax.Array]:
    """Return this shard's slices of all arrays, from what each owner sends."""
    received = resplit(sent, 0, 0, shards)
    found: dict[Block, jax.Array] = {}
    for owner in range(shards.num_shards):
        found |= blocks.within(owner, received[owner])
    return _joined(found)


# ---- The plan of an update, which says which shard owns which block.


@dataclasses.dataclass(frozen=True, eq=False)
class Owners(Arrays):
    """An update leaf by leaf: some leaves are cut, and the blocks of the others have owners.

    Attributes:
      params, unread, params_sharded: see ``Arrays``. A block that is not sliced has a partition
        that splits nothing.
      leafwise: how the update runs leaf by leaf.
      owners: the shard that owns each block.
      types: the types of the parameters, and of the arrays of the optimizer's state.
      shards: the shards.
      tile: the smallest slice that the platform scatters efficiently.
      pieces: for leaves that are computed piece by piece, or layer by layer, so that each piece is
        the same for any number of shards: along which axis, and the length of a piece.
    """

    params: tuple[Partition, ...]
    leafwise: Leafwise
    owners: Mapping[Block, int]
    types: tuple[Sequence[Any], Sequence[Any]]
    shards: Shards
    tile: TileShape
    pieces: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    unread: tuple[bool, ...] = ()
    params_sharded: bool = False

    where = "sharded, leaf by leaf"
    steps = ("sharded update, leaf by leaf", "gather")

    @functools.cached_property
    def owned(self) -> frozenset[int]:
        """The leaves that have owners."""
        return frozenset(leaf for leaf, _ in self.owners)

    @functools.cached_property
    def of_shard(self) -> tuple[tuple[Block, ...], ...]:
        """What each shard owns."""
        owned = sorted(self.owners.items())
        return tuple(
            tuple(block for block, owner in owned if owner == shard)
            for shard in range(self.shards.num_shards)
        )

    def resplit_axis(self, leaf: int) -> int:
        """Return the axis along which slices of a leaf arrive that are updated along axis 0; or 0.

        Gradients of stacked layers are summed layer by layer, and updated layer by layer.
        """
        stacked = leaf in self.leafwise.stacked and leaf not in self.owned
        return (self.params[leaf].axis or 0) if stacked else 0

    # Parameters and gradients.

    @functools.cached_property
    def blocks(self) -> tuple[Blocks, ...]:
        """The blocks of parameters that travel whole, to and from their owners."""
        whole = (block for block in self.owners if self.params[block[0]].number == 1)
        types = _types_of(whole, self.params, self.types[0])
        return blocks_of(types, self.owners, self.shards.num_shards, self.tile, _WINDOW)

    @functools.cached_property
    def exchanged(self) -> frozenset[int]:
        """The leaves of which each shard sends its slice to the owners."""
        return frozenset(leaf for leaf in self.owned if self.params[leaf].number > 1)

    def in_slices(self, like: Sequence[Any], *, of_state: bool = False) -> tuple[Blocks, ...]:
        """Return the blocks in which a shard sends slices of arrays like these: a row per owner."""
        partitions = self.state_in_slices if of_state else self.params
        owners = self.owners_of_state if of_state else self.owners
        # Of the state also arrays that are not cut, which each shard then has in full.
        sent = [each for each in owners if of_state or partitions[each[0]].number > 1]
        types = _types_of(sent, partitions, like)
        return blocks_of(types, owners, self.shards.num_shards, ANY)

    def partitions_of(self, gradients: Any) -> Sequence[Partition]:
        """Return the partitions of the slices and rows."""
        del gradients
        return packed_partitions(self.blocks, self.params)

    def squared_norm(self, tree: Any) -> Float[Array, ""]:
        """Return the squared norm of the arrays of which this shard has slices and rows."""
        return squared_norm_of_slices(tree, self.partitions_of(tree), self.shards)

    def to_owners(self, gradients: Any) -> Any:
        """Put the gradients that travel whole into the rows of their owners."""
        leaves, tree = jax.tree.flatten(gradients)
        return tree.unflatten(pack(self.blocks, leaves))

    def from_owners(self, gradients: Any) -> Any:
        """Return the gradients in their own shapes."""
        leaves, tree = jax.tree.flatten(gradients)
        return tree.unflatten(unpack(self.blocks, leaves))

    def split(self, tree: Any) -> Any:
        """Return this shard's slices, and its rows."""
        if self.params_sharded:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        index = self.shards.index_in_group()
        pairs = zip(self.params, leaves, strict=True)
        slices = [partition.local_slice(x, index) for partition, x in pairs]
        return structure.unflatten(pack_own(self.blocks, slices, index))

    def gather(self, tree: Any) -> Any:
        """Gather full arrays from all shards' slices and rows; sharded parameters stay split."""
        if self.params_sharded:
            return tree
        parts, structure = jax.tree.flatten(tree)
        leaves = bucketed_gather(parts, self.partitions_of(tree), self.shards)
        return structure.unflatten(unpack(self.blocks, leaves))

    def run(
        self, update: Update, gradients: Any, state: Any, params: Any, loss: Any, opaque_false: Any
    ) -> tuple[Any, Any]:
        """Return the optimizer's updates, computed leaf by leaf, and its next state."""
        del update
        (reduced, tree), (arrays, structure) = map(jax.tree.flatten, (gradients, state))
        own = jax.tree.leaves(params)
        updates, after = _Run(self, reduced, arrays, own, loss, opaque_false).compute()
        return tree.unflatten(updates), structure.unflatten(after)

    # The state.

    @functools.cached_property
    def owners_of_state(self) -> dict[Block, int]:
        """The shard that owns each block of the state."""
        of_state = self.leafwise.of_state
        places = {leaf: [j for j, own in enumerate(of_state) if own == leaf] for leaf in self.owned}
        return {
            (place, block[1]): owner
            for block, owner in sorted(self.owners.items())
            for place in places[block[0]]
        }

    @functools.cached_property
    def state_blocks(self) -> tuple[Blocks, ...]:
        """The blocks of the state, as their owners keep them."""
        wholes = [Partition(x.shape) for x in self.types[1]]
        types = _types_of(self.owners_of_state, wholes, self.types[1])
        return blocks_of(types, self.owners_of_state, self.shards.num_shards, self.tile)

    @functools.cached_property
    def state(self) -> tuple[Partition, ...]:  # type: ignore[override]
        """The partition of each array of the state, as it is kept."""
        whole = [Partition(x.shape) for x in self.types[1]]
        return packed_partitions(self.state_blocks, self._of_state(whole))

    @functools.cached_property
    def state_in_slices(self) -> tuple[Partition, ...]:
        """The partition of each array of the state, with those of owners in their own shapes."""
        slices = lambda x: partition_along_axis(x.shape, self.shards.num_shards, self.tile)
        return self._of_state(list(map(slices, self.types[1])))

    def _of_state(self, of_owners: Sequence[Partition]) -> tuple[Partition, ...]:
        def one(place: int, leaf: int | None) -> Partition:
            shape = self.types[1][place].shape
            if leaf in self.owned:
                return of_owners[place]
            if leaf is None or self.params[leaf].number == 1:
                return Partition(shape)
            if leaf in self.leafwise.stacked:
                return Partition(shape, self.shards.num_shards, 0, self.tile)
            return self.params[leaf]

        return tuple(one(*each) for each in enumerate(self.leafwise.of_state))

    def state_from_owners(self, state: Sequence[jax.Array]) -> list[jax.Array]:
        """Return this shard's slices of the arrays of a state, from what owners keep."""
        slices = self.in_slices(self.types[1], of_state=True)

        def own(shard: int) -> list[jax.Array]:
            kept: dict[Block, jax.Array] = {}
            for each in self.state_blocks:
                kept |= each.within(shard, state[each.places[0]])
            return [_by_owner(each, self.state_in_slices, shard, kept) for each in slices]

        shards = self.shards
        found, sent = list(state), _on_owner(range(shards.num_shards), shards.index(), own)
        for blocks, each in zip(slices, sent, strict=True):
            for place, x in _slices_from_owners(blocks, each, self.shards).items():
                found[place] = x
        return found

    def state_to_owners(self, state: Sequence[jax.Array]) -> list[jax.Array]:
        """Undo ``state_from_owners``."""
        slices = self.in_slices(self.types[1], of_state=True)
        given = self.state_in_slices, dict(enumerate(state)), self.shards
        received = [_slices_to_owners(each, *given) for each in slices]

        def own(shard: int) -> list[jax.Array]:
            kept: dict[Block, jax.Array] = {}
            for at_owner in received:
                kept |= at_owner(shard)
            return [each.row(shard, kept) for each in self.state_blocks]

        shards = self.shards
        found, rows = list(state), _on_owner(range(shards.num_shards), shards.index(), own)
        for each, row in zip(self.state_blocks, rows, strict=True):
            found = each.put(found, row)
        return found


def cost_of(shape: Sequence[int]) -> float:
    """Estimate the work on a leaf: products of a matrix with itself, or reading it."""
    long = sorted(shape, reverse=True)
    return math.prod(shape) * (long[1] if len(long) > 1 else 1)


# ---- One update, on one shard.


class _Run:
    """One update on one shard, from its slices and rows of gradients, state and parameters."""

    def __init__(
        self,
        plan: Owners,
        gradients: Sequence[Any],
        state: Sequence[Any],
        params: Sequence[Any],
        loss: Any,
        opaque_false: jax.Array | None,
    ):
        self._plan, self._shards, self._leafwise = plan, plan.shards, plan.leafwise
        self._jaxpr, self._index = plan.leafwise.jaxpr, plan.shards.index()
        self._pieces, self._opaque_false = Pieces(self._jaxpr), opaque_false
        self._params, self._state = params, state
        # The places of the state, and of what comes after it.
        self._of_state, self._after = len(params), len(params) + len(state)
        self._common = [i for i in range(len(params)) if i not in plan.owned]
        self._common_state = [
            j for j, leaf in enumerate(self._leafwise.of_state) if leaf not in plan.owned
        ]
        # The inputs that every shard has; and those that owners have, as functions of a shard, with
        # the leaf of each array, and the place of the first array.
        self._inputs: dict[int, Any] = {}
        self._of_owners: list[
            tuple[Callable[[int], Mapping[Block, Any]], Sequence[int | None], int]
        ] = []
        self._take(params, 0)
        self._take(gradients, self._after)
        for j in self._common_state:
            self._inputs[self._of_state + j] = state[j]
        for blocks in plan.state_blocks:
            own = functools.partial(blocks.within, row=state[blocks.places[0]])
            self._of_owners.append((own, self._leafwise.of_state, self._of_state))
        place = self._after + len(params)
        self._inputs[place] = self._typed(place, loss)
        # Masks that tell the elements of this shard's slices from their padding.
        masks = self._leafwise.masks
        for place, leaf in enumerate(masks, len(self._jaxpr.in_avals) - len(masks)):
            shape, partition = self._jaxpr.in_avals[place].shape, plan.params[leaf]
            size = math.prod(partition.local_shape)
            left = math.prod(partition.shape) - self._index * size
            self._inputs[place] = (jnp.arange(size) < left).reshape(shape)

    def _take(self, arrays: Sequence[Any], start: int) -> None:
        """Take arrays like the parameters as inputs: slices of leaves, and the blocks of owners."""
        plan = self._plan
        for i in self._common:
            x, axis = arrays[i], plan.resplit_axis(i)
            x = resplit(x, 0, axis, self._shards) if axis else x
            self._inputs[start + i] = self._typed(start + i, x)
        own: Callable[[int], Mapping[Block, Any]]
        for blocks in plan.blocks:
            own = functools.partial(blocks.within, row=arrays[blocks.places[0]])
            self._of_owners.append((own, range(len(arrays)), start))
        # Leaves that travel in slices are sent only if their updates read these arrays.
        outputs = [place for leaf in plan.exchanged for place in self._outputs_of(leaf)]
        scalars = enumerate(self._leafwise.scalars, self._after)
        outputs += [place for place, each in scalars if each.leaf in plan.exchanged]
        taken = self._pieces.of(outputs).taken if outputs else ()
        if not any(start + leaf in taken for leaf in plan.exchanged):
            return
        for blocks in plan.in_slices(arrays):
            given = {i: arrays[i] for i in blocks.places}
            own = _slices_to_owners(blocks, plan.params, given, self._shards)
            self._of_owners.append((own, range(len(arrays)), start))

    def _typed(self, place: int, x: Any) -> jax.Array:
        return jnp.asarray(x, self._jaxpr.in_avals[place].dtype)

    def compute(self) -> tuple[list[Any], list[Any]]:
        """Return the updates, and the next state."""
        for level in sorted({each.level for each in self._leafwise.scalars}):
            self._sum_scalars(level)
        updates, after = list(self._params), list(self._state)
        found = self._of_common()
        for i in self._common:
            axis = self._plan.resplit_axis(i)
            updates[i] = resplit(found[i], axis, 0, self._shards) if axis else found[i]
        for j in self._common_state:
            after[j] = found[self._of_state + j]
        return self._of_owned(updates, after) if self._plan.owned else (updates, after)

    def _of_common(self) -> dict[int, Any]:
        """Compute the leaves that have no owner: all at once, or leaf by leaf."""
        if self._opaque_false is None:
            every = [*self._common, *(self._of_state + j for j in self._common_state)]
            return self._computed(every, self._inputs)
        of_none = [j for j in self._common_state if self._leafwise.of_state[j] is None]
        found = self._computed([self._of_state + j for j in of_none], self._inputs)
        for leaf in self._common:
            outputs = self._outputs_of(leaf)
            if leaf not in self._plan.pieces:
                found |= self._computed(outputs, self._inputs)
                continue
            axis, _ = self._plan.pieces[leaf]
            for place, x in self._in_pieces(leaf, outputs).items():
                x = jnp.moveaxis(x, 0, axis)
                found[place] = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return found

    def _in_pieces(self, leaf: int, outputs: Sequence[int]) -> dict[int, Any]:
        """Compute outputs of each piece that this shard has of a leaf, ``[pieces, …]``."""
        axis, length = self._plan.pieces[leaf]

        def cut(x: jax.Array) -> jax.Array:
            shape = x.shape[:axis], (x.shape[axis] // length, length), x.shape[axis + 1 :]
            return jnp.moveaxis(x.reshape(sum(shape, ())), axis, 0)

        own = [*self._outputs_of(leaf), self._after + leaf]
        pieces = {place: cut(self._inputs[place]) for place in own}

        def one(_: None, piece: dict[int, Any]) -> tuple[None, dict[int, Any]]:
            return None, self._computed(outputs, {**self._inputs, **piece})

        return dict(lax.scan(one, None, pieces)[1])

    def _of_owned(
        self, updates: Sequence[Any], after: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the updates and the state, with what owners compute filled in."""
        plan, types = self._plan, self._jaxpr.out_avals
        slices = plan.in_slices(types)

        def own(shard: int) -> tuple[list[Any], list[Any], list[Any]]:
            found: dict[Block, Any] = {}
            kept: dict[Block, Any] = {}
            for (leaf, layer), inputs in self._owned_by(shard).items():
                new = self._computed(self._outputs_of(leaf), inputs)
                found[leaf, layer] = new.pop(leaf)
                kept |= {(place - self._of_state, layer): x for place, x in new.items()}
            return (
                [each.row(shard, found, types[each.places[0]].dtype) for each in plan.blocks],
                [_by_owner(each, plan.params, shard, found) for each in slices],
                [each.row(shard, kept) for each in plan.state_blocks],
            )

        kinds = [self._kind(shard, slices) for shard in range(self._shards.num_shards)]
        whole, sent, kept = _on_owner(kinds, self._index, own)
        updates, after = list(updates), list(after)
        for blocks, row in zip(plan.blocks, whole, strict=True):
            updates = blocks.put(updates, row)
        for blocks, each in zip(slices, sent, strict=True):
            for i, x in _slices_from_owners(blocks, each, self._shards).items():
                updates[i] = x
        for blocks, row in zip(plan.state_blocks, kept, strict=True):
            after = blocks.put(after, row)
        return updates, after

    def _outputs_of(self, leaf: int) -> list[int]:
        """Return the places of a leaf's update, and of its state."""
        of_state = [j for j, own in enumerate(self._leafwise.of_state) if own == leaf]
        return [leaf, *(self._of_state + j for j in of_state)]

    def _kind(self, shard: int, slices: Sequence[Blocks]) -> Hashable:
        """Return a key that is equal for owners that can share one program."""
        own, leaf_of = self._plan.of_shard[shard], self._leafwise.of_state
        number = {block: nth for nth, block in enumerate(own)}

        def computed(block: Block) -> Hashable:
            leaf = block[0]
            piece = self._pieces.of(self._outputs_of(leaf))
            mine = {leaf: "param", self._after + leaf: "gradient"} | {
                place: nth for nth, place in enumerate(self._outputs_of(leaf)[1:])
            }
            inputs = tuple(mine.get(place, (place,)) for place in piece.taken)
            return piece.text, inputs, _of_block(self._plan.params, block)

        of_params = [
            [(number[block], each.shapes[block]) for block in each.of_shard[shard]]
            for each in (*self._plan.blocks, *slices)
        ]
        of_state = []
        for each in self._plan.state_blocks:
            for block in each.of_shard[shard]:
                leaf = leaf_of[block[0]]
                assert leaf is not None
                nth = self._outputs_of(leaf).index(self._of_state + block[0])
                of_state.append((each.places[0], number[leaf, block[1]], nth, each.shapes[block]))
        return tuple(map(computed, own)), str(of_params), tuple(of_state)

    def _owned_by(self, shard: int) -> dict[Block, dict[int, Any]]:
        """Return all inputs for each block that a shard owns."""
        found = {block: dict(self._inputs) for block in self._plan.of_shard[shard]}
        for blocks_at, leaf_of, start in self._of_owners:
            for (place, layer), x in blocks_at(shard).items():
                leaf = leaf_of[place]
                assert leaf is not None
                found[leaf, layer][start + place] = self._typed(start + place, x)
        return found

    def _sum_scalars(self, level: int) -> None:
        """Compute what leaves have in common at this level, and give it to all shards."""
        plan, scalars = self._plan, self._leafwise.scalars
        first = len(self._jaxpr.in_avals) - len(self._leafwise.masks) - len(scalars)
        now = [k for k, each in enumerate(scalars) if each.level == level]
        of_owners = [k for k in now if scalars[k].leaf in plan.owned]
        of_all = [k for k in now if scalars[k].leaf not in plan.owned]
        types = {k: self._jaxpr.out_avals[self._after + k] for k in now}

        def own(shard: int) -> list[Any]:
            found = {k: _summand(self._no_parts(k, types[k])) for k in of_owners}
            for (leaf, layer), inputs in self._owned_by(shard).items():
                mine = [k for k in of_owners if scalars[k].leaf == leaf]
                new = self._computed([self._after + k for k in mine], inputs)
                for k in mine:
                    part = _summand(new[self._after + k], scalars[k].reduced)
                    if self._opaque_false is None:
                        found[k] += part
                    else:
                        found[k] = found[k].at[layer or 0].set(part)
            return list(found.values())

        summed, whole = of_all, dict[int, Any]()
        if self._opaque_false is None:
            parts = self._computed([self._after + k for k in of_all], self._inputs)
            summands = [_summand(parts[self._after + k], scalars[k].reduced) for k in of_all]
        else:
            summed, summands, whole = [], [], self._parts_of_all(of_all)
        if of_owners:
            summands += _on_owner(_places_of(plan.of_shard), self._index, own)
        sums = bucketed_sum(summands, [Partition(x.shape) for x in summands], self._shards)
        whole |= dict(zip([*summed, *of_owners], sums, strict=True))
        for k, total in whole.items():
            # In the order of one tree, whatever shards the parts come from.
            total = total if self._opaque_false is None else sum_of_nodes(total)
            is_and = scalars[k].reduced == "reduce_and"
            self._inputs[first + k] = total == 0 if is_and else total.astype(types[k].dtype)

    def _no_parts(self, scalar: int, like: Any) -> jax.Array:
        """Return zero; or ``[layers]``, or ``[1]``, for what each layer gives to the scalar."""
        leaf = self._leafwise.scalars[scalar].leaf
        layers = self._plan.types[0][leaf].shape[0] if leaf in self._leafwise.stacked else 1
        shape = like.shape if self._opaque_false is None else (layers, *like.shape)
        return jnp.zeros(shape, like.dtype)

    def _parts_of_all(self, scalars: Sequence[int]) -> dict[int, Any]:
        """Return what each piece of leaves without owners gives to each scalar, ``[pieces, …]``."""
        found: dict[int, Any] = {}
        for leaf in self._common:
            mine = [k for k in scalars if self._leafwise.scalars[k].leaf == leaf]
            outputs = [self._after + k for k in mine]
            if mine and leaf in self._plan.pieces:
                assert all(self._leafwise.scalars[k].reduced for k in mine)
                new = self._in_pieces(leaf, outputs)
            else:
                new = {k: x[None] for k, x in self._computed(outputs, self._inputs).items()}
            for k in mine:
                found[k] = _summand(new[self._after + k], self._leafwise.scalars[k].reduced)

        def partition(k: int) -> Partition:
            leaf, x = self._leafwise.scalars[k].leaf, found[k]
            number = self._plan.params[leaf].number
            return Partition((number * len(x), *x.shape[1:]), number)

        whole = bucketed_gather(list(found.values()), list(map(partition, found)), self._shards)
        return dict(zip(found, whole, strict=True))

    def _computed(self, outputs: Sequence[int], inputs: Values) -> dict[int, Any]:
        """Compute some outputs of the update, by their places."""
        if not outputs:
            return {}
        piece = self._pieces.of(outputs)
        given = [inputs[i] for i in piece.taken]
        if self._opaque_false is None:
            return dict(zip(outputs, piece.run(*given), strict=True))
        # In a loop, for the same bits whatever else is computed.
        apart = lambda _, given: ((), piece.run(*given))
        _, found = in_loop(apart, (), given, skip=self._opaque_false)
        return dict(zip(outputs, found, strict=True))


def _summand(x: jax.Array, reduced: str = "") -> jax.Array:
    """Return a scalar as it is summed; of a flag that must hold on all, whether it does not."""
    if is_inexact(x):
        return widen(x)
    x = ~x if reduced == "reduce_and" else x
    return x.astype(jnp.int32) if x.dtype == bool else x
