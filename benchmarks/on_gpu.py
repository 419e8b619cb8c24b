"""What `benchmarks.gpu` runs in processes of their own: each prints a line of JSON."""

import hashlib
import json
import os
import signal
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import crossshard
from benchmarks import by_hand, gpus, saves
from benchmarks.interleave import interleave
from benchmarks.jax_baselines import JaxCandidate
from benchmarks.problem import adamw
from benchmarks.shapes import Shapes, transformer

JIT = "a bare jax.jit"
_STEPS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, guards": gpus.GUARDS,
    "ours, virtual_shards=4": {"virtual_shards": 4},
}


def model_of(name: str, *, quick: bool) -> Shapes:
    """Return a model in bfloat16, with cuDNN's attention where there is a GPU."""
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    if quick:
        return transformer(2, 512, 64, rows=4, heads=1, attention=attention)
    if name == "GPT-2 124M":
        return transformer(12, context=1024, rows=16, heads=6, attention=attention)
    return transformer(scan=True, checkpoint=True, rows=4, attention=attention)


def pair(name: str, reference: str, other: str, optimizer: str, quick: bool) -> dict[str, Any]:
    """Time two steps in turn; return the milliseconds of the other one, and its ratio."""
    model = model_of(name, quick=quick)
    opt = optax.contrib.muon(1e-3) if optimizer == "Muon" else adamw()
    params, rows = _random(model.params), model.batch(1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 512, rows.shape, np.int32))
    made = [_candidate(step, model, opt, params, tokens) for step in (reference, other)]
    candidates, losses = zip(*made, strict=True)
    timing, _ = interleave(candidates, 3 if quick else 9, lambda number: None)
    seconds, ratio = timing.spread(other).median, timing.ratio(other, reference)
    length = rows.shape[1] - 1
    # Kaplan et al. 2020: six for each parameter, and 12 for each of a layer's width and each token
    # of a row, in attention; a layer has 12 width² parameters.
    embedding = model.params["words"]
    of_layers = model.parameters - embedding.size
    per_token = 6 * model.parameters + of_layers * length / embedding.shape[1]
    peak = crossshard.tools.peak_flops(jax.devices()[0])
    speed = rows.shape[0] * length / seconds
    return {
        "ms": 1e3 * seconds,
        "ratio": ratio.median,
        "from": ratio.low,
        "to": ratio.high,
        "tokens/s": speed,
        "MFU": peak and speed * per_token / peak,
        # The same numbers, but for the order of additions.
        "losses differ by": float(max(map(abs, np.subtract(*losses)))),
    }


def _random(params: Any) -> Any:
    normal = np.random.default_rng(0).standard_normal
    return jax.tree.map(lambda x: np.float32(0.02 * normal(x.shape, np.float32)), params)


def _candidate(
    name: str, model: Shapes, opt: Any, params: Any, tokens: Any
) -> tuple[JaxCandidate, list[float]]:
    """Return a step to time, and the losses of its first three steps."""

    def by_jit(kept: Any, tokens: Any) -> Any:
        params, state = kept
        loss, gradients = jax.value_and_grad(model.loss_fn)(params, tokens)
        updates, state = opt.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), {"loss": loss}

    if name == JIT:
        step: Any = jax.jit(by_jit, donate_argnums=0)
        state: Any = jax.jit(lambda params: (params, opt.init(params)))(params)
    else:
        step = crossshard.make_train_step(model.loss_fn, opt, num_shards=1, **_STEPS[name])
        state = step.init(params)
    losses = []
    for _ in range(3):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    params_of = lambda state: state[0] if name == JIT else state.params
    return JaxCandidate(name, step, state, [tokens], params_of), losses


def cluster(number: int, name: str, quick: bool, runs: bool) -> dict[str, Any]:
    """Compile a program of so many GPUs, and run it on one, whose peers are imagined.

    Collectives return at once, so the time is that of the kernels alone. Where it does not run it
    is compiled for H100s that need not be there.
    """
    if runs:
        # So many hosts of one GPU. It is not read from the environment.
        jax.config.update("jax_mock_gpu_topology", f"1x{number}x1")
    mesh = Mesh(np.array(jax.devices()), (by_hand.AXIS,)) if runs else gpus.cluster(number // 8)
    assert mesh.size == number, f"The program is of {mesh.size} GPUs."
    small: dict[str, Any] = {"layers": 2, "words": 512, "context": 64, "heads": 2} if quick else {}
    model = transformer(scan=True, checkpoint=True, **small)
    lowered = gpus.STEPS[name](mesh, model)
    compiled = lowered.compile()
    report = crossshard.inspect(compiled, parameters=model.params)
    assert report.memory is not None
    found = {
        "GB temporary": report.memory.temp / 1e9,
        "GB of kernels": report.kernel_bytes / 1e9,
    }
    if not runs:
        return {"ms": "by compilation", **found}
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
    """Train in one of several processes, the last of which may end; return losses and a hash."""
    crossshard.distributed.initialize()
    model = transformer(2, 512, 64, rows=1, heads=1)
    place: Any = {"params": "sharded"} if update == "params" else {"weight_update": update}
    step = crossshard.make_train_step(
        model.loss_fn, adamw(), virtual_shards=4, **place, nonfinite="skip"
    )
    state, losses = step.init(_random(model.params)), []
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
    cells = saves.measured(1, "replicated", 64 if quick else 2720, 2 if quick else 8)
    keys = ("MB", "ours, ms", "longest", "Orbax, ms", "its longest")
    found = dict(zip(keys, (float(cell.replace(",", "")) for cell in cells), strict=False))
    return {**found, "ratio": found["ours, ms"] / found["Orbax, ms"]}


def kind() -> dict[str, Any]:
    """Return the name of the first device, and whether it is a GPU."""
    return {"kind": jax.devices()[0].device_kind, "is_gpu": jax.default_backend() == "gpu"}


def main() -> None:
    """Call the function with the arguments that the command line has as JSON; print its answer."""
    name, arguments = sys.argv[1:]
    ways = {each.__name__: each for each in (kind, pair, cluster, rank, save)}
    print("\n" + json.dumps(ways[name](*json.loads(arguments))), flush=True)


if __name__ == "__main__":
    main()
