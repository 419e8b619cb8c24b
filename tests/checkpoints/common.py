"""A model, its steps and its batches, which the tests of checkpoints share."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from crossshard import Checkpoints, TrainStep, make_train_step
from crossshard._hash import sha256

_rng = np.random.default_rng(0)
# Split along an axis, padded for any number of shards, and not split at all.
PARAMS = {
    "even": np.float32(_rng.normal(size=(64, 24)) / 8),
    "odd": np.float32(_rng.normal(size=(37, 29)) / 8),
    "bias": np.zeros(3, np.float32),
}
XS = np.float32(_rng.normal(size=(6, 16, 64)))


def loss_fn(params: Any, batch: Any) -> jax.Array:
    error = (jnp.tanh(batch @ params["even"]) - 1) ** 2
    return error.mean() + (params["odd"] ** 2).sum() + ((params["bias"] - 1) ** 2).sum()


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(0.01, eps=1e-4),
}


@functools.cache
def step_on(shards: int, update: str = "sharded", optimizer: str = "sgd") -> TrainStep:
    """One step object for all tests, since compiling takes longer than they do."""
    how = {"params": "sharded"} if update == "parts" else {"weight_update": update}
    return make_train_step(loss_fn, OPTIMIZERS[optimizer](), num_shards=shards, **how)


def trained(step: TrainStep, steps: int = 2, params: Any = PARAMS) -> Any:
    state = step.init(params)
    for x in XS[:steps]:
        state, _ = step(state, x)
    return state


def arrays(step: TrainStep, state: Any) -> list[np.ndarray]:
    """The arrays of a state in the optimizer's own shapes."""
    leaves = jax.tree.leaves(step.unshard(state))
    raw = (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    )
    return [np.asarray(x) for x in raw]


def check_same_bits(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


def write(folder: Path, number: int) -> dict[int, list[np.ndarray]]:
    """Save after each of so many steps; the arrays of each checkpoint."""
    step, found = step_on(2), {}
    state = step.init(PARAMS)
    with Checkpoints(folder, step) as checkpoints:
        for at, x in enumerate(XS[:number], 1):
            state, _ = step(state, x)
            found[at] = arrays(step, state)
            checkpoints.save(state, {"at": at})
    return found


def edit(manifest: Path, change: Any) -> None:
    """Change a manifest as a forger would, with its checksum."""
    body = json.loads(manifest.read_text())
    del body["sha256"]
    change(body)
    manifest.write_text(json.dumps({**body, "sha256": sha256(body)}))


ROOT = Path(__file__).parents[2]


def program(code: str, *args: object) -> subprocess.Popen[str]:
    """A process that runs code, and finds these tests."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_of(running: subprocess.Popen[str]) -> str:
    """The next line that a process prints, or what it died of."""
    assert running.stdout is not None
    assert running.stderr is not None
    return running.stdout.readline() or running.stderr.read()[-3000:]
