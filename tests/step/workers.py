"""Workers that synchronise rarely: their steps and batches, and optimizers in numpy and float64."""

from typing import Any

import jax
import numpy as np
import optax

import crossshard
from crossshard import CrossShardOptimizer, make_train_step

N, STEPS, ROWS = 8, 12, 32
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(64, 40)).astype(np.float32) / 10,
    "b": np.zeros(40, np.float32),
}
X = RNG.normal(size=(STEPS, ROWS, 64)).astype(np.float32)
Y = np.tanh(X @ RNG.normal(size=(64, 40)).astype(np.float32) / 8)
# The rows of each worker follow each other.
WORKERS = {
    8: None,
    4: [[0, 1], [2, 3], [4, 5], [6, 7]],
    2: [[0, 1, 2, 3], [4, 5, 6, 7]],
    1: [[*range(8)]],
}
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return ((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2).mean()


def step_of(workers: int, inner: Any = None, **options: Any) -> Any:
    opt = CrossShardOptimizer(inner or optax.sgd(0.3), group_assignment=WORKERS[workers])
    return make_train_step(loss_fn, opt, **{"num_shards": N, "sync_every": 4} | options)


def train(step: Any, state: Any, steps: Any = range(STEPS)) -> Any:
    for t in steps:
        state, _ = step(state, (X[t], Y[t]))
    return state


class Sgd:
    """Plain SGD; with momentum as Nesterov has it."""

    def __init__(self, learning_rate: float, momentum: float = 0, nesterov: bool = False) -> None:
        self.rate, self.momentum, self.nesterov = learning_rate, momentum, nesterov
        self.trace: dict[str, Any] = {}

    def __call__(self, gradient: Any) -> Any:
        found = {}
        for name, g in gradient.items():
            trace = self.trace[name] = self.momentum * self.trace.get(name, 0) + g
            found[name] = -self.rate * (self.momentum * trace + g if self.nesterov else trace)
        return found


class Adam:
    """Adam, as in the paper."""

    def __init__(self, rate: float) -> None:
        self.rate, self.m, self.v, self.t = rate, dict[str, Any](), dict[str, Any](), 0

    def __call__(self, gradient: Any) -> Any:
        self.t, found = self.t + 1, {}
        for name, g in gradient.items():
            m = self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * g
            v = self.v[name] = 0.999 * self.v.get(name, 0) + 0.001 * g**2
            m, v = m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)
            found[name] = -self.rate * m / (np.sqrt(v) + 1e-8)
        return found


def train_alone(each: Any, optimizers: Any, t: int) -> None:
    """One step of each worker."""
    parts = zip(*(np.split(np.float64(x[t]), len(each)) for x in (X, Y)), strict=True)
    for params, optimizer, (x, y) in zip(each, optimizers, parts, strict=True):
        error = 2 * (x @ params["w"] + params["b"] - y) / y.size
        for name, update in optimizer({"w": x.T @ error, "b": error.sum(0)}).items():
            params[name] = params[name] + update


def on_a_line(workers: int, length: int, steps: int, **options: Any) -> tuple[Any, Any, Any]:
    """A step and its state after a linear loss, whose way does not depend on what was rounded.

    Returns:
      The step, the state, and the sum of what the workers have moved on average, exactly.
    """
    g = RNG.normal(size=(steps, N, length, 40)).astype(np.float32)
    opt = CrossShardOptimizer(optax.sgd(0.5), group_assignment=WORKERS[workers])
    linear = lambda params, g: (params * g.mean(0)).sum()
    step = make_train_step(linear, opt, num_shards=N, loss_over="shard", **options)
    state = step.init(np.zeros((length, 40), np.float32))
    for each in g:
        state, _ = step(state, each)
    return step, state, -0.5 * np.float64(g).mean(1).sum(0)


INNER: dict[str, Any] = {
    "sgd": (lambda: optax.sgd(0.3), lambda: Sgd(0.3)),
    "adam": (lambda: optax.adam(0.01), lambda: Adam(0.01)),
}


def sent_by(step: Any) -> tuple[float, float]:
    """The bytes of parameters by a device in a step that does not synchronise, and in one."""
    report = crossshard.inspect(step.lower(step.init(BIG), (XB, YB)), BIG)
    return report.bytes_sent - report.bytes_in_branches, report.bytes_in_branches


BIG = {"w": np.zeros((256, 512), np.float32), "b": np.zeros(512, np.float32)}
XB, YB = np.zeros((ROWS, 256), np.float32), np.zeros((ROWS, 512), np.float32)
SIZE = sum(x.nbytes for x in BIG.values())


def damaged(x: jax.Array) -> jax.Array:
    """The array, with another copy on device 3."""
    copies = [np.array(shard.data) for shard in x.addressable_shards]
    copies[3].flat[7] += 1
    each = [jax.device_put(a, s.device) for a, s in zip(copies, x.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, each)
