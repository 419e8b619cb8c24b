"""Our part in the benchmark of processes: whole steps in as many processes as PyTorch has ranks.

Each process has one device, as each rank has. What is said to it and what it answers is told in
../peer.py. Model, rows and numbers are those of torch_ddp_peer.py.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

from ranks import serve  # type: ignore[import-not-found]

# The options of each step that is asked for, by its name.
OPTIONS: dict[str, Any] = {
    "replicated": {"weight_update": "replicated"},
    "sharded": {"weight_update": "sharded"},
    **{
        dtype: {"weight_update": "replicated", "reduce_dtype": dtype}
        for dtype in ("bfloat16", "int8", "int4")
    },
}


def run_rank(rank: int, problem: dict, folder: str, asked: Connection) -> None:
    """Be one process: sleep until a question comes, answer it, leave at ``None``."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COORDINATOR_ADDRESS": problem["coordinator"],
        "JAX_NUM_PROCESSES": str(problem["ranks"]),
        "JAX_PROCESS_ID": str(rank),
    }
    import crossshard

    crossshard.distributed.initialize()

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    width, layers, rows = (problem[name] for name in ("width", "layers", "rows"))

    def scattered(first: int, shape: tuple[int, int]) -> Any:
        """Numbers from -1 to 1 that follow from their index alone, float64."""
        index = np.arange(first, first + shape[0] * shape[1], dtype=np.int64)
        return ((index * 2654435761 % 2**32) / 2**31 - 1).reshape(shape)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer, each in enumerate(params):
            x = (jax.nn.relu(x) if layer else x) @ each["kernel"] + each["bias"]
        return jnp.mean((x - batch["y"]) ** 2)

    params = [
        {
            "kernel": np.float32(scattered(layer * width**2, (width, width)) * (6 / width) ** 0.5),
            "bias": np.zeros(width, np.float32),
        }
        for layer in range(layers)
    ]
    own = slice(rank * rows // problem["ranks"], (rank + 1) * rows // problem["ranks"])
    batch = {
        "x": np.float32(scattered(layers * width**2, (rows, width))[own]),
        "y": np.float32(scattered(layers * width**2 + rows * width, (rows, width))[own]),
    }
    optimizer = optax.adamw(
        problem["learning_rate"],
        problem["b1"],
        problem["b2"],
        problem["eps"],
        weight_decay=problem["weight_decay"],
    )

    def make(variant: str) -> tuple[Any, Any]:
        """A step and its first state; or a part of the replicated one, compiled alone."""
        if variant in OPTIONS:
            step = crossshard.make_train_step(loss_fn, optimizer, **OPTIONS[variant])
            return step, step.init(params)
        arrays = jax.tree.map(jnp.array, params)
        if variant == "update":

            def update(state: Any, _: Any) -> tuple[Any, Any]:
                updates, inner = optimizer.update(state[0], state[1], state[0])
                updated = optax.apply_updates(state[0], updates)
                return (updated, inner), {"loss": updated[-1]["bias"][-1]}

            return jax.jit(update, donate_argnums=0), (arrays, optimizer.init(arrays))
        if variant == "gradients":
            return _again(jax.jit(jax.value_and_grad(loss_fn))), (arrays, batch)
        ranks = jax.make_mesh((problem["ranks"],), ("ranks",))
        of_each = NamedSharding(ranks, PartitionSpec("ranks"))
        sums = crossshard.CrossShardOptimizer(optax.identity(), axis_name="ranks")
        total = lambda xs: sums.update(jax.tree.map(lambda x: x[0], xs), sums.init(params))[0]
        stack = lambda x: jax.make_array_from_process_local_data(of_each, x[None])
        run = jax.shard_map(
            total, mesh=ranks, in_specs=of_each.spec, out_specs=PartitionSpec(), check_vma=False
        )
        return _again(jax.jit(run)), (jax.tree.map(stack, params),)

    steps, states = {}, {}
    while (question := asked.recv()) is not None:
        variant = question["variant"]
        if variant not in steps:
            steps[variant], states[variant] = make(variant)
        step, state = steps[variant], states.pop(variant)
        multihost_utils.sync_global_devices(variant)
        began = time.perf_counter()
        for _ in range(question["steps"]):
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics["loss"])
        jax.block_until_ready(state)
        multihost_utils.sync_global_devices(variant)
        seconds = time.perf_counter() - began
        last = lambda x: float(np.asarray(x.addressable_data(0)).ravel()[-1])
        trained = state.params if variant in OPTIONS else []
        sample = [last(each[name]) for name in ("kernel", "bias") for each in trained]
        states[variant] = state
        asked.send({"seconds": seconds, "sample": sample})


def _again(run: Any) -> Any:
    """A step that runs a function on the same arguments each time."""
    return lambda given, _: (given, {"loss": run(*given)})


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    serve(run_rank, asked["ranks"], asked, {"jax": version("jax")})
