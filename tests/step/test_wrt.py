"""wrt: what is not trained is neither differentiated nor sent, and stays as it was."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import make_train_step
from crossshard.errors import ArgumentError, VariableError
from tests.quick import deep
from tests.step import common
from tests.step.common import on_one_device, sgd_step, train

RNG = np.random.default_rng(0)
# Frozen and trained arrays of one shape, large enough to travel alone, and small ones in buckets.
PARAMS = {
    name: {"kernel": np.float32(RNG.normal(size=(64, 64)) / 8), "bias": np.zeros(64, np.float32)}
    for name in ("body", "neck", "head")
}
BATCH = np.float32(RNG.normal(size=(16, 64)))
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(1e-2),
}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    for name in ("body", "neck", "head"):
        batch = jnp.tanh(batch @ params[name]["kernel"] + params[name]["bias"])
    return ((batch - 0.5) ** 2).mean()


def is_trained(path: Any, leaf: Any) -> bool:
    return path[0].key == "head" or (path[0].key == "neck" and leaf.ndim == 1)


def split(params: Any) -> tuple[Any, Any]:
    trained = {"neck": {"bias": params["neck"]["bias"]}, "head": params["head"]}
    return trained, {"body": params["body"], "neck": {"kernel": params["neck"]["kernel"]}}


assert_close = functools.partial(common.assert_close, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_nothing_frozen_is_sent_or_copied(weight_update: str):
    kwargs = {"wrt": is_trained, "weight_update": weight_update}
    step = make_train_step(loss_fn, OPTIMIZERS["adamw"], num_shards=8, **kwargs)
    trained, frozen = split(PARAMS)
    state = step.abstract_init(PARAMS)
    # The optimizer has never seen what is frozen.
    assert len(jax.tree.leaves(state.opt_state.inner_state[0].mu)) == len(jax.tree.leaves(trained))
    report = crossshard.inspect(step.lower(state, BATCH), trained)
    assert report.bytes_sent == pytest.approx(report.lower_bound, rel=0.01)
    # The whole state is updated in place, what is frozen included.
    assert report.memory.output - report.memory.alias < 4096
    assert report.memory.alias >= sum(leaf.nbytes for leaf in jax.tree.leaves((trained, frozen)))


def test_a_state_of_another_wrt_is_refused():
    """It would train what its own step trains, in silence."""
    whole, tuned = (
        make_train_step(loss_fn, OPTIMIZERS["sgd"], num_shards=4, donate=False, wrt=wrt)
        for wrt in (None, is_trained)
    )
    for one, other, how in ((whole, tuned, "trained in it"), (tuned, whole, "frozen in it")):
        state = one.init(PARAMS)
        for call, given in ((other, (state, BATCH)), (other.reshard, (one.unshard(state),))):
            with pytest.raises(ArgumentError, match=rf"another wrt=: params\['body'\].* is {how}"):
                call(*given)
        other(other.init(one.model(state)), BATCH)


# NNX and Equinox.


class Lora(nnx.Module):
    """A base with statistics and an adapter."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.base = nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)
        self.base.lora.lora_b[...] = jnp.ones((2, 3))
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.base(x))


def lora_loss(model: Any, batch: Any) -> jax.Array:
    return ((model(batch) - batch[:, :3]) ** 2).mean()


@pytest.mark.parametrize(
    ("wrt", "kind", "optimizer"),
    [
        (lambda path, leaf: "lora" in path, nnx.LoRAParam, optax.adamw(0.1)),
        deep((nnx.Param, nnx.Param, optax.sgd(0.1))),
    ],
)
def test_lora_with_and_without_its_base(wrt: Any, kind: Any, optimizer: Any):
    # Every shard has the same rows, so that statistics of a batch are those of one device.
    rows = BATCH[:4, :4]
    model = Lora()
    own = nnx.Optimizer(model, optimizer, wrt=kind)
    step = make_train_step(lora_loss, optimizer, num_shards=4, wrt=wrt, loss_over="shard")
    state = step.init(model)

    @nnx.jit
    def plain(model: Any, own: Any) -> None:
        own.update(model, nnx.grad(lora_loss, argnums=nnx.DiffState(0, kind))(model, rows))

    for _ in range(3):
        state, _ = step(state, np.tile(rows, (4, 1)))
        plain(model, own)
    assert_close(nnx.to_pure_dict(nnx.state(step.model(state))), nnx.to_pure_dict(nnx.state(model)))
    # Of the base, a kernel and a bias, and of the norm, a scale and a bias.
    assert len(jax.tree.leaves(state.frozen)) == (4 if kind is nnx.LoRAParam else 0)
    assert {x.shape[0] for x in jax.tree.leaves(state.model_state)} == {4}


def test_a_loss_that_writes_a_frozen_parameter_is_refused():
    def loss(model: Any, batch: Any) -> jax.Array:
        model.base.kernel[...] = 0.9 * model.base.kernel[...]
        return lora_loss(model, batch)

    step = sgd_step(loss, 0.1, 2, wrt=nnx.LoRAParam, loss_over="shard")
    with pytest.raises(VariableError, match=r"wrote to an nnx\.Param"):
        step(step.init(Lora()), BATCH[:, :4])


def test_a_filter_of_modules():
    with pytest.raises(ArgumentError, match=r"none of .*params\['base'\]"):
        sgd_step(lora_loss, 0.1, 2, wrt="no tag").init(Lora())
    with pytest.raises(ArgumentError, match=r"norm/mean, an nnx BatchStat.*nnx\.All\(nnx\.Param"):
        sgd_step(lora_loss, 0.1, 2, wrt=nnx.PathContains("norm")).init(Lora())


# What an optimizer leaves alone.

LABELS = lambda params: jax.tree_util.tree_map_with_path(
    lambda path, leaf: "train" if is_trained(path, leaf) else "freeze", params
)
FROZEN = lambda params: jax.tree.map(lambda label: label == "freeze", LABELS(params))


SETS_TO_ZERO = optax.masked(optax.set_to_zero(), FROZEN)
LEAVES_ALONE = {
    # Moments of what is frozen, which nothing reads.
    "after": optax.chain(OPTIMIZERS["adamw"], SETS_TO_ZERO),
    # The norm is that of all gradients.
    "norm": optax.chain(optax.clip_by_global_norm(0.1), OPTIMIZERS["adamw"], SETS_TO_ZERO),
}


@pytest.mark.parametrize(("way", "update"), [("after", "replicated"), ("norm", "sharded")])
def test_what_an_optimizer_leaves_alone_is_not_sent(way: str, update: str):
    optimizer = LEAVES_ALONE[way]
    step = make_train_step(loss_fn, optimizer, num_shards=8, weight_update=update)
    state = train(step, step.init(PARAMS), [BATCH] * 2)
    assert_close(state.params, on_one_device(loss_fn, optimizer, PARAMS, [BATCH] * 2)[0])
    sent = PARAMS if way == "norm" else split(PARAMS)[0]
    report = crossshard.inspect(step.lower(step.abstract_init(PARAMS), BATCH), sent)
    assert report.bytes_sent == pytest.approx(report.lower_bound, rel=0.01)


def test_a_frozen_leaf_that_decays_keeps_decaying():
    optimizer = optax.chain(
        optax.masked(optax.set_to_zero(), FROZEN), optax.add_decayed_weights(0.1), optax.sgd(0.1)
    )
    trained, whole = (sum(x.nbytes for x in jax.tree.leaves(t)) for t in (split(PARAMS)[0], PARAMS))
    for weight_update, gathered in (("replicated", trained), ("sharded", whole)):
        step = make_train_step(loss_fn, optimizer, num_shards=8, weight_update=weight_update)
        state, _ = step(step.init(PARAMS), BATCH)
        assert_close(split(state.params)[1], jax.tree.map(lambda x: 0.99 * x, split(PARAMS)[1]))
        report = crossshard.inspect(step.lower(step.abstract_init(PARAMS), BATCH), PARAMS)
        assert report.bytes_sent == pytest.approx(7 / 8 * (trained + gathered), rel=0.02)
