"""Donation: a step overwrites the buffers of its state, so no batch may hold one of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from crossshard.errors import ArgumentError
from crossshard.model.state import TrainState, names_of


class Donation:
    """Refuses a batch with a buffer of the state, which would end the interpreter.

    It runs before every step, so the arrays of the state are compared only with those of the batch
    that have the same type on a device.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._skeleton: Any = None
        self._alike: dict[Any, list[int]] = {}

    def check(self, state: TrainState, batch: Any) -> None:
        """Raise if an array of a batch is, or shares its buffer with, an array of a state.

        Raises:
          ArgumentError: one does.
        """
        pointers: dict[Any, dict[int | None, int]] = {}
        for place, leaf in enumerate(jax.tree.leaves(batch)):
            if not isinstance(leaf, jax.Array) or leaf.is_deleted():
                continue
            piece = leaf.addressable_data(0)
            if self._skeleton is not state.skeleton:
                self._note(state)
            kind = piece.shape, piece.dtype
            if kind not in self._alike or not piece.devices() <= self._device_numbers.keys():
                continue
            (device,) = piece.devices()
            key = kind, self._device_numbers[device]
            if key not in pointers:
                pointers[key] = self._pointers(state, *key)
            other = pointers[key].get(piece.unsafe_buffer_pointer())
            if other is not None:
                path, _ = jax.tree_util.tree_leaves_with_path(batch)[place]
                raise ArgumentError(
                    f"batch{jax.tree_util.keystr(path)} shares its buffer with "
                    f"state.{names_of(state)[other]}, and the step donates the state: it would "
                    f"overwrite what it reads. Pass jnp.copy(...) of it, or write "
                    f"make_train_step(..., donate=False), with memory for two states."
                )

    def _note(self, state: TrainState) -> None:
        """Remember which leaves of such states have which type on a device."""
        own = jax.process_index()
        devices = [device for device in self._mesh.devices.flat if device.process_index == own]
        self._device_numbers = {device: number for number, device in enumerate(devices)}
        self._alike = {}
        for place, leaf in enumerate(jax.tree.leaves(state)):
            if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                kind = leaf.sharding.shard_shape(leaf.shape), leaf.dtype
                self._alike.setdefault(kind, []).append(place)
        self._skeleton = state.skeleton

    def _pointers(self, state: TrainState, kind: Any, number: int) -> dict[int | None, int]:
        """The addresses of the leaves of a type on a device, with their places."""
        leaves = jax.tree.leaves(state)
        return {_pointer(leaves[place], number): place for place in self._alike[kind]}


def _pointer(leaf: Any, number: int) -> int | None:
    """The address of an array's buffer on one of its devices; ``None`` if it has none there."""
    if not isinstance(leaf, jax.Array) or number >= len(leaf.sharding.addressable_devices):
        return None
    return int(leaf.addressable_data(number).unsafe_buffer_pointer())
