"""Faults of a device's memory: other bits in one device's copy of one array of a state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

FLOATING = (np.floating, ml_dtypes.bfloat16)


def one_bit(x: np.ndarray, rng: np.random.Generator) -> None:
    """Flip a bit of an element."""
    bits = x.reshape(-1).view(np.uint8)
    bits[rng.integers(bits.size)] ^= np.uint8(1 << rng.integers(8))


def many_bits(x: np.ndarray, rng: np.random.Generator) -> None:
    """Overwrite up to 64 bytes that follow each other, and change the first for certain."""
    bits = x.reshape(-1).view(np.uint8)
    start = rng.integers(bits.size)
    part = bits[start : start + 64]
    first = part[0]
    part[:] = rng.integers(256, size=part.size)
    part[0] = first ^ np.uint8(rng.integers(1, 256))


def two_signs(x: np.ndarray, rng: np.random.Generator) -> None:
    """Flip the highest bit of two elements; of one if there is one."""
    bits = x.reshape(-1).view(np.uint8).reshape(x.size, -1)
    bits[rng.choice(x.size, min(2, x.size), replace=False), -1] ^= 0x80


def not_finite(x: np.ndarray, rng: np.random.Generator) -> None:
    """Make an element NaN or infinite."""
    if not any(np.issubdtype(x.dtype, kind) for kind in FLOATING):
        return one_bit(x, rng)
    x.reshape(-1)[rng.integers(x.size)] = rng.choice([np.nan, np.inf])
    return None


KINDS: tuple[Callable[..., None], ...] = (one_bit, many_bits, two_signs, not_finite)


def names_of(state: Any) -> list[str]:
    """The names of a state's leaves, as a step tells them."""
    paths = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(path).removeprefix(".") for path, _ in paths]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state, from which many can be made, faulty or not.

    Attributes:
      state: types with shardings, in place of the arrays.
      copies: for each leaf, the contents of each device's block.
    """

    state: Any
    copies: list[dict[Any, np.ndarray]]

    @classmethod
    def of(cls, state: Any) -> "Snapshot":
        """That of a state of this process's devices."""
        leaves, tree = jax.tree.flatten(state)
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
        copies = [{s.device: np.array(s.data) for s in x.addressable_shards} for x in leaves]
        return cls(tree.unflatten(types), copies)

    def restored(self, leaf: int = -1, device: Any = None, fault: Any = None) -> Any:
        """The state, with a fault in a device's copy of a leaf if one is given."""

        def one(index: int, kind: Any) -> jax.Array:
            blocks = {device: x.copy() for device, x in self.copies[index].items()}
            if index == leaf:
                fault(blocks[device])
                assert blocks[device].tobytes() != self.copies[index][device].tobytes()
            arrays = [jax.device_put(x, device) for device, x in blocks.items()]
            return jax.make_array_from_single_device_arrays(kind.shape, kind.sharding, arrays)

        leaves, tree = jax.tree.flatten(self.state)
        return tree.unflatten([one(index, kind) for index, kind in enumerate(leaves)])

    def has_same_bits(self, other: "Snapshot") -> bool:
        """Whether every copy of every leaf has the same bits in both."""
        return all(
            one[device].tobytes() == two[device].tobytes()
            for one, two in zip(self.copies, other.copies, strict=True)
            for device in one
        )
