"""Both idioms follow the recorded runs of the original, step by step, on every shard."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import crossshard
from tests.reference import recordings
from tests.reference.recordings import Recording

RECORDINGS = recordings.load()
every_recording = pytest.mark.parametrize("run", RECORDINGS, ids=lambda run: run.name)
# One without groups, and those with groups: the stateful idiom has followed the others.
some = pytest.mark.parametrize(
    "run",
    [run for run in RECORDINGS if run.number == 0 or run.case["group_assignment"]],
    ids=lambda run: run.name,
)


def wrapped(run: Recording) -> crossshard.CrossShardOptimizer:
    return crossshard.CrossShardOptimizer(
        run.rule(),
        reduction=run.case["reduction"],
        group_assignment=run.case["group_assignment"],
    )


def clip(gradients: list[jax.Array | None], norm: float | None) -> list[jax.Array | None]:
    if norm is None:
        return gradients
    here = optax.tree.norm([g for g in gradients if g is not None])
    return [None if g is None else g * norm / jnp.maximum(here, norm) for g in gradients]


def agree(run: Recording, what: str, ours: dict[str, Any], recorded: dict[str, np.ndarray]) -> None:
    assert recorded, what
    for name, expected in recorded.items():
        np.testing.assert_allclose(
            np.asarray(ours[name]), expected, rtol=0, atol=run.tolerance, err_msg=f"{what} {name}"
        )


@every_recording
def test_stateful_idiom_follows_the_original(run: Recording):
    shards = run.case["num_shards"]
    variables = {name: nnx.Param(jnp.asarray(v)) for name, v in run.under("init/").items()}
    global_step = nnx.Variable(jnp.array(0)) if run.case.get("global_step") else None
    opt = wrapped(run)
    trained = list(variables.values())

    @crossshard.shard(num_shards=shards)
    def step(given: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss() -> jax.Array:
            return recordings.loss({n: v[...] for n, v in variables.items()}, x[0], y[0])

        value = loss()
        pairs = opt.compute_gradients(loss, var_list=trained)
        clipped = clip([g for g, _ in pairs], run.case.get("local_clip"))
        opt.apply_gradients(list(zip(clipped, trained, strict=True)), global_step)
        handed_out = {n: g for n, (g, _) in zip(variables, pairs, strict=True) if g is not None}
        stack = partial(jax.tree.map, lambda leaf: leaf[None])
        return value, stack(handed_out), stack({n: v[...] for n, v in variables.items()})

    assert opt.get_slot_names() == []
    x, y = run.arrays["x"], run.arrays["y"]
    for t in range(run.case["steps"]):
        value, handed_out, params = step([variables, opt, global_step], x[t], y[t])
        agree(run, f"loss {t}", {"loss": value}, {"loss": run.arrays["loss"][t]})
        agree(run, f"params {t}", params, {n: v[t] for n, v in run.under("params/").items()})
        if t == 0:
            recorded = run.under("compute_gradients/")
            assert set(handed_out) == set(recorded)
            agree(run, "compute_gradients", handed_out, recorded)

    for key, recorded_slot in run.under("slot/").items():
        slot, name = key.split("/")
        value = opt.get_slot(variables[name], slot)[...]
        # Under groups a slot is [shards, …]; else it is stored once, and every shard recorded it.
        agree(run, key, {key: np.broadcast_to(value, recorded_slot.shape)}, {key: recorded_slot})
    if "unused" in variables:
        assert opt.get_slot(variables["unused"], "accumulator") is None
    if global_step is not None:
        assert set(run.arrays["global_step"].tolist()) == {int(global_step[...])}


def optax_step(run: Recording, opt: Any, params: Any, state: Any, x: Any, y: Any) -> Any:
    value, gradients = crossshard.value_and_grad(recordings.loss)(params, x, y)
    # The original clips gradients that are divided by the number of shards; these are not yet.
    norm = run.case.get("local_clip")
    leaves, tree = jax.tree.flatten(gradients)
    gradients = tree.unflatten(clip(leaves, norm and norm * run.case["num_shards"]))
    updates, state = opt.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


@some
def test_optax_idiom_follows_the_original(run: Recording):
    shards = run.case["num_shards"]
    opt = wrapped(run)
    params = {name: jnp.asarray(value) for name, value in run.under("init/").items()}
    state = opt.init(params)
    params, state = jax.tree.map(lambda v: jnp.stack([v] * shards), (params, state))

    def of_one(*args: Any) -> Any:
        out = optax_step(run, opt, *jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], out)

    mesh = jax.sharding.Mesh(jax.devices()[:shards], ("shards",))
    each = P("shards")
    step = jax.jit(jax.shard_map(of_one, mesh=mesh, in_specs=each, out_specs=each))
    for t in range(run.case["steps"]):
        params, state, value = step(params, state, run.arrays["x"][t], run.arrays["y"][t])
        agree(run, f"loss {t}", {"loss": value}, {"loss": run.arrays["loss"][t]})
        agree(run, f"params {t}", params, {n: v[t] for n, v in run.under("params/").items()})
    for slot, theirs in {"mu": "m", "nu": "v", "trace": "momentum"}.items():
        recorded = run.under(f"slot/{theirs}/")
        if recorded:
            agree(run, slot, optax.tree.get(state, slot), recorded)
