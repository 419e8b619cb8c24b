"""A user's own checkpoint of model and optimizer, by Orbax or Flax, goes on as if nothing was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization

import crossshard
from crossshard import CrossShardOptimizer
from tests.quick import deep_but

SHARDS = 4
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)


class Normed(nnx.Module):
    """Each shard has statistics and random streams of its own."""

    def __init__(self, seed: int):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0), momentum=0.5)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
        self.linear = linear(seed)

    def __call__(self, x: Any) -> Any:
        return self.linear(self.dropout(self.norm(x)))


def linear(seed: int, dtype: Any = jnp.float32) -> nnx.Linear:
    return nnx.Linear(3, 1, param_dtype=dtype, rngs=nnx.Rngs(seed))


def adam() -> Any:
    return optax.inject_hyperparams(optax.adam)(lambda count: 0.1 / (1 + count))


GROUPS = [[0, 1], [2, 3]]
CASES: dict[str, Callable[[int], tuple[Any, CrossShardOptimizer]]] = {
    "momentum": lambda seed: (linear(seed), CrossShardOptimizer(optax.sgd(0.1, momentum=0.9))),
    "statistics, streams, schedule": lambda seed: (Normed(seed), CrossShardOptimizer(adam())),
    "stages": lambda seed: (
        linear(seed),
        CrossShardOptimizer(
            optax.sgd(0.1),
            preprocess=optax.trace(0.9),
            accumulate_steps=2,
            loss_scale=crossshard.DynamicLossScale(initial=8.0, growth_interval=1),
            nonfinite="skip",
            ema=0.9,
            metrics=("grad_norm",),
        ),
    ),
    "masters": lambda seed: (
        linear(seed, jnp.bfloat16),
        CrossShardOptimizer(optax.adam(0.1), master_dtype="float32"),
    ),
    "groups": lambda seed: (
        linear(seed),
        CrossShardOptimizer(optax.adam(0.1), group_assignment=GROUPS),
    ),
}


@crossshard.shard(num_shards=SHARDS)
def step(model: Any, opt: CrossShardOptimizer, x: Any, y: Any) -> Any:
    return opt.minimize(lambda: ((model(x)[:, 0] - y) ** 2).mean(), var_list=model)


def made(case: str, seed: int = 0) -> dict[str, Any]:
    model, opt = CASES[case](seed)
    return {"model": model, "opt": opt}


def trained(case: str, steps: int = 3) -> dict[str, Any]:
    both = made(case)
    for _ in range(steps):
        step(both["model"], both["opt"], X, Y)
    return both


def built(case: str) -> dict[str, Any]:
    """New ones of other values, in the form of those that have stepped, as they have."""
    both = made(case, seed=7)
    step(both["model"], both["opt"], X, Y)
    return both


def bits(leaf: Any) -> bytes:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()


def check_same_bits(one: Any, other: Any) -> None:
    ours, theirs = (jax.tree_util.tree_leaves_with_path(nnx.state(each)) for each in (one, other))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        assert bits(a) == bits(b), path


# The ways in which users of NNX save and restore.


def saved(folder: Path, state: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "it", state)
    return folder / "it"


def with_types(folder: Path, old: Any, new: Any) -> None:
    path = saved(folder, nnx.state(old))
    types = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(new))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(new, checkpointer.restore(path, types))


def with_flax(folder: Path, old: Any, new: Any) -> None:
    (folder / "it").write_bytes(serialization.to_bytes(nnx.to_pure_dict(nnx.state(old))))
    state = nnx.state(new)
    pure = serialization.from_bytes(nnx.to_pure_dict(state), (folder / "it").read_bytes())
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(new, state)


WAYS = [with_types, with_flax]


QUICK = ["momentum", "statistics, streams, schedule", "groups"]


@pytest.mark.parametrize("case", deep_but(QUICK, CASES))
def test_new_ones_hold_all_of_it_and_go_on_with_the_same_bits(case: str, tmp_path: Path):
    old, new = trained(case), built(case)
    for way in WAYS:
        if way is with_flax and case.startswith("statistics"):
            continue  # Flax writes no PRNG keys.
        folder = tmp_path / way.__name__
        folder.mkdir()
        other = nnx.clone(new)
        way(folder, old, other)
        check_same_bits(other, old)
    with_types(tmp_path, old, new)
    for _ in range(3):
        for each in (old, new):
            step(each["model"], each["opt"], X, Y)
    check_same_bits(new, old)


@pytest.mark.parametrize("case", ["momentum", "masters"])
def test_types_alone_are_enough_where_nothing_differs_between_shards(case: str, tmp_path: Path):
    old = trained(case)

    def make() -> Any:
        both = made(case, seed=7)
        both["opt"].build(both["model"])
        return both

    graph, types = nnx.split(nnx.eval_shape(make))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), types)
    with ocp.StandardCheckpointer() as checkpointer:
        new = nnx.merge(graph, checkpointer.restore(saved(tmp_path, nnx.state(old)), types))
    for each in (old, new):
        step(each["model"], each["opt"], X, Y)
    check_same_bits(new, old)


def test_one_that_is_not_built_says_what_to_write(tmp_path: Path):
    old, new = trained("momentum"), made("momentum", seed=7)
    with pytest.raises(ValueError, match="do not match"):
        with_types(tmp_path, old, new)
