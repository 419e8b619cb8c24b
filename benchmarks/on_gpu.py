"""What `benchmarks.gpu` runs in processes of their own: each prints a line of JSON."""

import functools
import hashlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import crossshard
from benchmarks import by_hand, gpus, saves
from benchmarks.problem import adamw
from benchmarks.shapes import Shapes, transformer

# Dense products of bfloat16 in a second, by how the name of a device begins.
_PEAKS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12, "NVIDIA L4": 121e12}
_GUARDS: Any = {
    "nonfinite": "quarantine",
    "check_divergence": 100,
    "metrics": ("grad_norm", "update_norm", "param_norm"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, guards": _GUARDS,
    "ours, virtual_shards=4": {"virtual_shards": 4},
    "ours, accumulate_steps=4": {"accumulate_steps": 4},
}


def _is_gpu() -> bool:
    return jax.default_backend() == "gpu"


def model_of(name: str, *, quick: bool) -> Shapes:
    """A model in bfloat16, with cuDNN's attention where there is a GPU."""
    if quick:
        return transformer(2, 512, 64, rows=4, heads=2)
    attention = "cudnn" if _is_gpu() else None
    if name == "GPT-2 124M":
        return transformer(12, context=1024, rows=16, heads=6, attention=attention)
    return transformer(scan=True, checkpoint=True, rows=4, attention=attention)


def pair(name: str, other: str, optimizer: str, quick: bool) -> dict[str, Any]:
    """Time a bare `jax.jit` and a step of ours in turn, and return milliseconds and their ratio."""
    model = model_of(name, quick=quick)
    opt = optax.contrib.muon(1e-3) if optimizer == "Muon" else adamw()
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.float32(0.02 * random.standard_normal(x.shape, np.float32)), model.params
    )
    rows = model.batch(1)
    tokens = jnp.asarray(random.integers(0, 512, rows.shape, np.int32))

    def bare(params: Any, state: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(model.loss_fn)(params, tokens)
        updates, state = opt.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    by_jit, own = jax.jit(bare, donate_argnums=(0, 1)), jax.tree.map(jnp.asarray, params)
    kept: dict[str, Any] = {"jit": (own, opt.init(own))}
    step = crossshard.make_train_step(model.loss_fn, opt, num_shards=1, **OPTIONS[other])
    kept["ours"] = step.init(params)

    def take(who: str) -> Any:
        if who == "jit":
            *kept["jit"], loss = by_jit(*kept["jit"], tokens)
            return loss
        kept["ours"], metrics = step(kept["ours"], tokens)
        return metrics["loss"]

    losses = {who: [float(take(who)) for _ in range(3)] for who in kept}
    ways: dict[str, Callable[[], Any]] = {who: functools.partial(take, who) for who in kept}
    times = _in_turn(ways, rounds=3 if quick else 9)
    ratio = statistics.median(b / a for a, b in zip(times["jit"], times["ours"], strict=True))
    seconds = statistics.median(times["ours"])
    length = rows.shape[1] - 1
    # Kaplan et al. 2020: six for each parameter, and the products of attention.
    layers, width = _layers_and_width(model)
    per_token = 6 * model.parameters + 12 * layers * width * length
    kind = jax.devices()[0].device_kind
    peak = next((peak for start, peak in _PEAKS.items() if kind.startswith(start)), None)
    return {
        "device": kind,
        "ms": 1e3 * seconds,
        "ratio": ratio,
        "tokens_per_second": rows.shape[0] * length / seconds,
        "mfu": peak and rows.shape[0] * length / seconds * per_token / peak,
        # The same numbers, but for the order of additions.
        "losses_off": max(map(abs, np.subtract(losses["jit"], losses["ours"]))),
    }


def _layers_and_width(model: Shapes) -> tuple[int, int]:
    layers, width = model.params["layers"], model.params["words"].shape[1]
    return (len(layers) if isinstance(layers, list) else layers["out"].shape[0]), width


def _in_turn(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, take in ways.items():
            jax.block_until_ready(take())
            began = time.perf_counter()
            for _ in range(3):
                found = take()
            jax.block_until_ready(found)
            times[name].append((time.perf_counter() - began) / 3)
    return times


def cluster(number: int, name: str, quick: bool) -> dict[str, Any]:
    """Compile a program of so many GPUs, and run it on one, with ``JAX_MOCK_GPU_TOPOLOGY``.

    Collectives return at once, so the time is that of the kernels alone. Without a GPU it is only
    compiled, for H100s.
    """
    model = transformer(2, 512, 64, rows=2, heads=2) if quick else None
    model = model or transformer(scan=True, checkpoint=True)
    runs = _is_gpu()
    mesh = Mesh(np.array(jax.devices()), (by_hand.AXIS,)) if runs else gpus.cluster(number // 8)
    lowered = gpus.STEPS[name](mesh, model)
    compiled = lowered.compile()
    report = crossshard.inspect(compiled, parameters=model.params)
    assert report.memory is not None
    found = {"temporary_gb": report.memory.temp / 1e9, "kernels_gb": report.kernel_bytes / 1e9}
    if not runs:
        return found
    infos, tree = jax.tree.flatten(lowered.args_info[0])
    shardings, times = jax.tree.leaves(compiled.input_shardings[0]), []
    for turn in range(6):
        keys = jax.random.split(jax.random.key(turn), len(infos))
        given = tree.unflatten(list(map(_own_part, infos, shardings, keys)))
        jax.block_until_ready(given)
        began = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        times.append(time.perf_counter() - began)
    return {"ms": 1e3 * statistics.median(times[1:]), **found}


def _own_part(info: Any, sharding: Any, key: jax.Array) -> jax.Array:
    """Return this process's part of an array of all processes."""
    shape = sharding.shard_shape(info.shape)
    if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        x: Any = jax.random.key(0)
    elif jnp.issubdtype(info.dtype, jnp.floating):
        x = (jax.random.normal(key, shape) * 0.02).astype(info.dtype)
    elif len(shape) == 2:
        x = jax.random.randint(key, shape, 0, 512)
    else:
        x = jnp.ones(shape, info.dtype)
    parts = [jax.device_put(x, jax.local_devices()[0])]
    return jax.make_array_from_single_device_arrays(info.shape, sharding, parts)


def rank(update: str, steps: int, kill_at: int) -> dict[str, Any]:
    """Train a small transformer in one of several processes; return its losses and a hash.

    Args:
      update: ``replicated``, ``sharded`` or ``params``.
      steps: the number of steps.
      kill_at: the step before which the last process ends itself; -1 for never.
    """
    crossshard.distributed.initialize()
    model = transformer(2, 512, 64, rows=1, heads=2)
    place: Any = {"params": "sharded"} if update == "params" else {"weight_update": update}
    step = crossshard.make_train_step(
        model.loss_fn, adamw(), virtual_shards=4, **place, nonfinite="skip"
    )
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.float32(0.02 * random.standard_normal(x.shape, np.float32)), model.params
    )
    state, losses = step.init(params), []
    number, at = jax.process_count(), jax.process_index()
    for turn in range(steps):
        if turn == kill_at and at == number - 1 and number > 1:
            print(json.dumps({"died": time.time()}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        rows = np.random.default_rng(turn).integers(0, 512, (4, 65), np.int32)
        state, metrics = step(state, np.split(rows, number)[at])
        losses.append(float(metrics["loss"]))
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(step.model(state)):
        found.update(np.asarray(leaf).tobytes())
    return {"losses": losses, "sha256": found.hexdigest()}


def save(quick: bool) -> dict[str, Any]:
    """Return how long a save keeps the loop waiting, ours and Orbax's, in milliseconds."""
    # 17 matrices, with Adam's moments 1.5 GB.
    cells = saves.measured(1, "replicated", 64 if quick else 2720, 3 if quick else 8)
    return dict(zip(("mb", "ours_ms", "ours_most", "orbax_ms", "orbax_most"), cells, strict=False))


def main() -> None:
    """Run what the command line says, and print what was found."""
    what, *given = sys.argv[1:]
    ways: dict[str, Callable[..., dict[str, Any]]] = {
        "pair": lambda model, other, optimizer, quick: pair(model, other, optimizer, quick == "1"),
        "cluster": lambda number, name, quick: cluster(int(number), name, quick == "1"),
        "rank": lambda update, steps, kill_at: rank(update, int(steps), int(kill_at)),
        "kind": lambda: {"kind": jax.devices()[0].device_kind, "is_gpu": _is_gpu()},
        "save": lambda quick: save(quick == "1"),
    }
    print(json.dumps(ways[what](*given)), flush=True)


if __name__ == "__main__":
    main()
