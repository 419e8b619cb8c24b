"""The JAX candidates: crossshard, and the same step written by hand."""

import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import crossshard
from benchmarks.baselines import (
    HAND_WRITTEN,
    OURS_AUTO,
    OURS_REPLICATED,
    OURS_SHARDED,
    Turn,
)
from benchmarks.problem import Problem, adamw

AXIS = "shards"
_NAMES = {"auto": OURS_AUTO, "sharded": OURS_SHARDED, "replicated": OURS_REPLICATED}


class JaxCandidate:
    """A step that takes a state and a batch, returns the next state and donates the old one.

    Args:
      name: the name in tables.
      step: a function of ``(state, batch)`` that returns the next state and other outputs.
      state: the first state.
      batch: the batch of every step, on its devices.
      params_of: returns the parameters of a state.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[Any, Any], tuple[Any, Any]],
        state: Any,
        batch: Any,
        params_of: Callable[[Any], Any],
    ) -> None:
        self.name = name
        self.state = state
        self._step = step
        self._batch = batch
        self._params_of = params_of

    def run(self, steps: int) -> Turn:
        """Take this many steps, blocking after each."""
        state, step, batch = self.state, self._step, self._batch
        began = time.perf_counter()
        for _ in range(steps):
            state, rest = step(state, batch)
            jax.block_until_ready((state, rest))
        seconds = time.perf_counter() - began
        self.state = state
        return Turn(seconds, _sample(self._params_of(state)))


def ours(
    problem: Problem, num_shards: int, weight_update: Literal["auto", "sharded", "replicated"]
) -> JaxCandidate:
    """The step of ``crossshard.make_train_step``."""
    step = crossshard.make_train_step(
        problem.loss_fn, adamw(), num_shards=num_shards, weight_update=weight_update
    )
    state = step.init(problem.model)
    batch = on_shards(problem.batch, num_shards)
    return JaxCandidate(_NAMES[weight_update], step, state, batch, lambda state: state.params)


def hand_written(problem: Problem, num_shards: int) -> JaxCandidate:
    """A step without crossshard: ``shard_map``, ``pmean`` and Optax."""
    mesh, optimizer = _mesh(num_shards), adamw()

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = problem.value_and_grad(params, batch)
        grads = jax.lax.pmean(grads, AXIS)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, AXIS)

    shared, split = PartitionSpec(), PartitionSpec(AXIS)
    compiled = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(shared, shared, split),
            out_specs=(shared, shared, shared),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )

    def next_state(state: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], jax.Array]:
        params, optimizer_state, loss = compiled(*state, batch)
        return (params, optimizer_state), loss

    # Copied, since the first step donates them and other candidates need the originals.
    params = jax.device_put(jax.tree.map(jnp.array, problem.params), NamedSharding(mesh, shared))
    state = params, jax.device_put(optimizer.init(params), NamedSharding(mesh, shared))
    batch = on_shards(problem.batch, num_shards)
    return JaxCandidate(HAND_WRITTEN, next_state, state, batch, lambda state: state[0])


def on_shards(batch: Any, num_shards: int) -> Any:
    """A batch with each shard's part on its device."""
    return jax.device_put(batch, NamedSharding(_mesh(num_shards), PartitionSpec(AXIS)))


def _mesh(num_shards: int) -> Mesh:
    return Mesh(jax.devices()[:num_shards], (AXIS,))


def _sample(params: Any) -> list[float]:
    """The last element of every array, on the last device."""
    copies = [leaf.addressable_shards[-1].data for leaf in jax.tree.leaves(params)]
    return [float(np.asarray(copy).ravel()[-1]) for copy in copies]
