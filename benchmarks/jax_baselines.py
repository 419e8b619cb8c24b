"""The JAX candidates: crossshard, and the same step written by hand."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import crossshard
from benchmarks.baselines import (
    GSPMD,
    HAND_WRITTEN,
    OURS_AUTO,
    OURS_PARAMS_SHARDED,
    OURS_REPLICATED,
    OURS_SHARDED,
    Turn,
)
from benchmarks.by_hand import spec
from benchmarks.problem import Problem

AXIS = "shards"
_NAMES = {"auto": OURS_AUTO, "sharded": OURS_SHARDED, "replicated": OURS_REPLICATED}


class JaxCandidate:
    """A step that takes a state and a batch, returns the next state and donates the old one.

    Args:
      name: the name in tables.
      step: a jitted function of ``(state, batch)`` that returns the next state and other outputs.
      state: the first state.
      batches: the batches of every step, on their devices: one call for each.
      params_of: returns the parameters of a state.
    """

    def __init__(
        self,
        name: str,
        step: Any,
        state: Any,
        batches: Sequence[Any],
        params_of: Callable[[Any], Any],
    ) -> None:
        self.name = name
        self.clock = time.perf_counter
        self.state = jax.block_until_ready(state)
        self._step = step
        self._batches = batches
        self._params_of = params_of

    def run(self, steps: int) -> Turn:
        """Take this many steps, blocking after each."""
        state, step, batches = self.state, self._step, self._batches
        began = self.clock()
        for _ in range(steps):
            for batch in batches:
                state, rest = step(state, batch)
            # What a loop waits for: the metrics. They are there when all of the program has run.
            jax.block_until_ready(rest if jax.tree.leaves(rest) else state)
        seconds = self.clock() - began
        self.state = state
        return Turn(seconds, _sample(self._params_of(state)))

    def lower(self) -> jax.stages.Lowered:
        """The program of one call."""
        return self._step.lower(self.state, self._batches[0])

    def seconds_to_compile(self) -> float:
        """How long it takes to trace, lower and compile one call anew."""
        jax.clear_caches()
        began = self.clock()
        self.lower().compile()
        return self.clock() - began

    def communication(self) -> crossshard.tools.Communication:
        """What one call sends, read from its compiled program."""
        return crossshard.inspect(self.lower(), parameters=self._params_of(self.state))

    def bytes_sent(self) -> float:
        """The bytes that one shard sends in all calls of a step, without scalars."""
        return len(self._batches) * self.communication().bytes_sent

    def bytes_held(self) -> int:
        """The bytes on one shard of its state besides the parameters."""
        return bytes_on_one_shard(self.state) - self.bytes_of_parameters()

    def bytes_of_parameters(self) -> int:
        """The bytes on one shard of the parameters."""
        return bytes_on_one_shard(self._params_of(self.state))


def ours(
    problem: Problem,
    num_shards: int,
    weight_update: Literal["auto", "sharded", "replicated"],
    **options: Any,
) -> JaxCandidate:
    """The step of ``crossshard.make_train_step``, which takes the further options."""
    step = crossshard.make_train_step(
        problem.loss_fn,
        problem.optimizer,
        num_shards=num_shards,
        weight_update=weight_update,
        loss_over=problem.loss_over,
        **options,
    )
    state = step.init(problem.model)
    batch = on_shards(problem.batch, num_shards)
    name = OURS_PARAMS_SHARDED if options.get("params") == "sharded" else _NAMES[weight_update]
    return JaxCandidate(name, step, state, [batch], lambda state: state.params)


def hand_written(
    problem: Problem,
    num_shards: int,
    *,
    name: str = HAND_WRITTEN,
    optimizer: optax.GradientTransformation | None = None,
    batches: Sequence[Any] = (),
    ema: float | None = None,
) -> JaxCandidate:
    """A step without crossshard: ``shard_map``, ``pmean`` and Optax.

    Args:
      problem: the problem.
      num_shards: the number of shards.
      name: the name in tables.
      optimizer: the optimizer; the problem's if ``None``.
      batches: the batches of the calls of a step; one call with the problem's if empty.
      ema: the decay of the moving average of the parameters; ``None`` without one.
    """
    mesh, optimizer = _mesh(num_shards), optimizer or problem.optimizer

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, inner, average = state
        loss, grads = problem.value_and_grad(params, batch)
        grads = jax.lax.pmean(grads, AXIS)
        updates, inner = optimizer.update(grads, inner, params)
        params = optax.apply_updates(params, updates)
        if ema is not None:
            average = optax.incremental_update(params, average, 1 - ema)
        return (params, inner, average), jax.lax.pmean(loss, AXIS)

    shared, split = PartitionSpec(), PartitionSpec(AXIS)
    compiled = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(shared, split), out_specs=(shared, shared), check_vma=False
        ),
        donate_argnums=0,
    )

    def init(params: Any) -> Any:
        # Copied, since the first step donates them and other candidates need the originals.
        copied = lambda: jax.tree.map(jnp.copy, params)
        return copied(), optimizer.init(params), () if ema is None else copied()

    state = jax.jit(init, out_shardings=NamedSharding(mesh, shared))(problem.params)
    on_devices = [on_shards(batch, num_shards) for batch in batches or [problem.batch]]
    return JaxCandidate(name, compiled, state, on_devices, lambda state: state[0])


def gspmd(problem: Problem, num_shards: int) -> JaxCandidate:
    """A ``jax.jit`` of the whole batch's step, whose parameters and state are split (FSDP)."""
    mesh, optimizer = _mesh(num_shards), problem.optimizer

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, inner = state
        loss, grads = problem.value_and_grad(params, batch)
        updates, inner = optimizer.update(grads, inner, params)
        return (optax.apply_updates(params, updates), inner), loss

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.copy, params), optimizer.init(params)

    split = jax.tree.map(
        lambda x: NamedSharding(mesh, spec(x, num_shards)), jax.eval_shape(init, problem.params)
    )
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (AXIS,)))
    compiled = jax.jit(
        step, in_shardings=(split, rows), out_shardings=(split, whole), donate_argnums=0
    )
    state = jax.jit(init, out_shardings=split)(problem.params)
    batch = on_shards(problem.batch, num_shards)
    return JaxCandidate(GSPMD, compiled, state, [batch], lambda state: state[0])


def on_shards(batch: Any, num_shards: int) -> Any:
    """A batch with each shard's part on its device."""
    return jax.device_put(batch, NamedSharding(_mesh(num_shards), PartitionSpec(AXIS)))


def bytes_on_one_shard(tree: Any) -> int:
    """The bytes of its arrays on the first device."""
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))


def _mesh(num_shards: int) -> Mesh:
    return Mesh(jax.devices()[:num_shards], (AXIS,))


def _sample(params: Any) -> list[float]:
    """The last element of every array, on the last device."""
    copies = [leaf.addressable_shards[-1].data for leaf in jax.tree.leaves(params)]
    return [float(np.asarray(copy).ravel()[-1]) for copy in copies]
