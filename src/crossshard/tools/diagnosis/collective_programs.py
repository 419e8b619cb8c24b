"""The collectives that crossshard uses, each as a program, with the values that numpy has."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# float32 counts to here without a gap, so that sums are exact in any order.
_EXACT = 2**24
_MARKS = 251


@dataclasses.dataclass(frozen=True)
class _Values:
    """What shard i has: the numbers 0, 1, … again and again, plus a mark of the shard.

    A shard that is left out, counted twice or taken for another one shows, and so does a sum that
    was rounded to 16 bits.
    """

    shards: int

    @property
    def marks(self) -> Any:
        return np.arange(self.shards) ** 2 % _MARKS

    def numbers(self, begin: int, end: int) -> Any:
        period = max((_EXACT - int(self.marks.sum())) // self.shards, 1)
        return np.arange(begin, end) % min(period, 65521)

    def of(self, shard: int, length: int) -> Any:
        return self.numbers(0, length) + self.marks[shard]

    def total(self, begin: int, end: int) -> Any:
        return self.shards * self.numbers(begin, end) + self.marks.sum()


@dataclasses.dataclass(frozen=True)
class CollectiveProgram:
    """A collective.

    Attributes:
      kind: its name in HLO.
      run: it, inside of a ``shard_map`` over an axis of a name and a size.
      expected: what it gives to a shard; of the values, the shard, and the length of what the
        shard passes.
      gathers: whether the result is larger than what a shard passes.
    """

    kind: str
    run: Callable[[Any, str, int], Any]
    expected: Callable[[_Values, int, int], Any]
    gathers: bool = False

    def length(self, size: int, shards: int) -> int:
        """How many float32 a shard passes, where the larger of operand and result has a size."""
        part = max(size // 4 // shards, 1)
        return part if self.gathers else part * shards

    def compiled(self, mesh: Mesh, length: int) -> Any:
        """The program over all devices of a mesh of one axis."""
        (axis,), spec = mesh.axis_names, PartitionSpec(mesh.axis_names[0])
        mapped = jax.shard_map(
            lambda x: self.run(x, axis, mesh.size),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        x = jax.ShapeDtypeStruct((mesh.size * length,), np.float32, sharding=_over(mesh))
        with jax.disable_jit(False):
            return jax.jit(mapped).lower(x).compile()

    def operand(self, mesh: Mesh, length: int) -> jax.Array:
        """What the program is called with: each shard's own values."""
        values = _Values(mesh.size)

        def part(index: Any) -> Any:
            return values.of((index[0].start or 0) // length, length).astype(np.float32)

        return jax.make_array_from_callback((mesh.size * length,), _over(mesh), part)

    def wrong(self, result: jax.Array, length: int, shards: int) -> str | None:
        """What a device of this process has that numpy has not; ``None`` if all is right."""
        values = _Values(shards)
        for each in result.addressable_shards:
            got = np.asarray(each.data)
            shard = (each.index[0].start or 0) // got.size
            right = self.expected(values, shard, length)
            differs = np.flatnonzero(got != right)
            if differs.size:
                at = int(differs[0])
                return (
                    f"{differs.size} of {got.size} values on shard {shard} ({each.device}); value "
                    f"{at} is {got[at]:g} and should be {right[at]:g}"
                )
        return None


def _over(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))


def _sum_of_part(values: _Values, shard: int, length: int) -> Any:
    part = length // values.shards
    return values.total(shard * part, (shard + 1) * part)


def _exchanged(values: _Values, shard: int, length: int) -> Any:
    part = length // values.shards
    numbers = values.numbers(shard * part, (shard + 1) * part)
    return np.concatenate([numbers + mark for mark in values.marks])


def _to_all(x: Any, axis: str, shards: int) -> Any:
    return lax.all_to_all(x.reshape(shards, -1), axis, 0, 0).reshape(-1)


def _to_next(x: Any, axis: str, shards: int) -> Any:
    return lax.ppermute(x, axis, [(shard, (shard + 1) % shards) for shard in range(shards)])


PROGRAMS = (
    CollectiveProgram(
        "all-reduce",
        lambda x, axis, _: lax.psum(x, axis),
        lambda values, _, length: values.total(0, length),
    ),
    CollectiveProgram(
        "reduce-scatter",
        lambda x, axis, _: lax.psum_scatter(x, axis, tiled=True),
        _sum_of_part,
    ),
    CollectiveProgram(
        "all-gather",
        lambda x, axis, _: lax.all_gather(x, axis, tiled=True),
        lambda values, _, length: np.concatenate(
            [values.of(shard, length) for shard in range(values.shards)]
        ),
        gathers=True,
    ),
    CollectiveProgram("all-to-all", _to_all, _exchanged),
    CollectiveProgram(
        "collective-permute",
        _to_next,
        lambda values, shard, length: values.of((shard - 1) % values.shards, length),
    ),
)
