"""virtual_shards: the parts of the batch, what they compute, and what is refused."""

import functools
import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard.errors import (
    ArgumentError,
    AxisError,
    LossError,
    WeightUpdateError,
)
from tests.optimizers.table import across_leaves
from tests.quick import deep
from tests.step import common
from tests.step.common import sgd_step

ROWS = 24
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-2, eps=1e-3)}


def params_of() -> Any:
    rng = np.random.default_rng(1)
    return {
        "a": jnp.asarray(rng.normal(size=(64, 48)), jnp.float32) / 8,
        "b": jnp.asarray(rng.normal(size=48), jnp.float32) / 7,
    }


def batch_of(seed: int, rows: int = ROWS) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 64)).astype(np.float32)
    return {"x": x, "y": rng.normal(size=rows).astype(np.float32)}


def costs_of(params: Any, batch: Any) -> Any:
    return (jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2


def loss_fn(params: Any, batch: Any) -> Any:
    return costs_of(params, batch).mean()


def weighted(params: Any, batch: Any) -> Any:
    return (costs_of(params, batch) * batch["w"]).sum() / batch["w"].sum()


def on_one_device(loss: Any, optimizer: Any, batches: Any = None) -> Any:
    """Three steps without crossshard."""
    batches = map(batch_of, range(3)) if batches is None else batches
    return common.on_one_device(loss, optimizer, params_of(), batches)[0]


def sha(tree: Any) -> str:
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))
    ).hexdigest()


def trained(
    shards: int,
    loss: Any = loss_fn,
    optimizer: Any = OPTIMIZERS["sgd"],
    rows: int = ROWS,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """The parameters after three steps, and the metrics of the last."""
    step = crossshard.make_train_step(loss, optimizer, num_shards=shards, **options)
    state, metrics = step.init(params_of()), {}
    for seed in range(3):
        batch = batch_of(seed, rows)
        if "weight" in options:
            batch["w"] = (np.arange(rows) % 3 > 0).astype(np.float32)
        state, metrics = step(state, batch)
    return jax.device_get(step.model(state)), jax.device_get(metrics)


def near(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), found, wanted)


# Cut, or dealt out whole; with one norm of all leaves, and with plain steps too.
EVERY = OPTIMIZERS | {
    "clip, sgd": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "lamb": optax.lamb(1e-2, eps=1e-3),
}


@pytest.mark.parametrize("name", ["clip, sgd", deep("lamb")])
def test_one_two_and_eight_shards_have_the_same_bits_and_those_of_one_device_nearly(name: str):
    ways: list[Any] = [(1, {}), (2, {"weight_update": "sharded"}), (8, {"params": "sharded"})]
    found = [trained(n, optimizer=EVERY[name], virtual_shards=8, **way) for n, way in ways]
    assert len({sha((params, metrics["loss"])) for params, metrics in found}) == 1
    near(found[0][0], on_one_device(loss_fn, EVERY[name]))


def test_norms_are_added_piece_by_piece_and_only_what_cannot_be_cut_is_whole():
    step = crossshard.make_train_step(
        loss_fn, EVERY["clip, sgd"], num_shards=4, virtual_shards=8, weight_update="sharded"
    )
    params = {"a": jnp.zeros((64, 512)), "b": jnp.zeros(512), "odd": jnp.zeros(1027)}
    lowered = step.lower(step.abstract_init(params), batch_of(0))
    text = step.describe()
    assert "mean over all shards as 8 virtual shards, added in a fixed order" in text
    assert "updated element by element, a slice on each shard: `a`" in text
    assert "whole on one shard each, since it has no axis that divides by 8: `odd`" in text
    assert "updated on every shard: `b`" in text
    # To its owner and back, and what has no slices, with padding.
    assert crossshard.inspect(lowered).ratio == pytest.approx(1, abs=0.1)


def test_shards_agree_that_an_update_that_communicates_runs():
    """One whose count is damaged would skip it, and the others would wait for it."""
    agreements = []
    for name in ("sgd", "clip, sgd"):
        step = crossshard.make_train_step(
            loss_fn, EVERY[name], num_shards=4, virtual_shards=8, weight_update="sharded"
        )
        text = step.lower(step.abstract_init(params_of()), batch_of(0)).as_text()
        # All else is gathered or exchanged, and added in a fixed order.
        agreements.append(text.count("stablehlo.all_reduce"))
    assert agreements == [0, 1]


def test_layers_of_a_stack_have_owners():
    numbers = {"a": optax.contrib.MuonDimensionNumbers(1, 2)}
    muon = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=numbers)
    step = crossshard.make_train_step(
        lambda params, batch: jnp.tanh(batch["x"] @ params["a"]).mean(),
        muon,
        num_shards=2,
        virtual_shards=8,
        weight_update="sharded",
    )
    step.lower(step.abstract_init({"a": jnp.zeros((4, 64, 64))}), {"x": jnp.zeros((16, 64))})
    assert "updated layer by layer, each on one shard: `a`" in step.describe()


def test_an_odd_part_is_added_in_the_same_order():
    options: dict[str, Any] = {"virtual_shards": 12, "params": "sharded"}
    found, _ = trained(4, **options)
    assert sha(found) == sha(trained(2, **options)[0])
    near(found, on_one_device(loss_fn, OPTIMIZERS["sgd"]))


@pytest.mark.parametrize("options", [{"params": "sharded"}, deep({"accumulate_steps": 3})])
def test_a_number_that_does_not_divide_has_the_bits_of_one_shard(options: dict[str, Any]):
    found = [trained(n, virtual_shards=12, rows=72, **options) for n in (1, 5)]
    assert sha(found[0]) == sha(found[1])


def test_a_batch_that_lies_on_the_mesh_is_dealt_out_again():
    step = sgd_step(loss_fn, 0.1, 3, virtual_shards=8, donate=False)
    state, batch = step.init(params_of()), batch_of(0)
    rows = jax.NamedSharding(step.mesh, jax.P("shards"))
    wanted = step(state, batch)
    for given in (jax.device_put(batch, rows), jax.device_put(batch)):
        assert sha(step(state, given)) == sha(wanted)
    assert sha(jax.jit(step)(state, batch)) == sha(wanted)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    compiled = step.lower(step.abstract_init(params_of()), types).compile()
    near(compiled(state, step._program.placer(batch))[1]["loss"], wanted[1]["loss"])
    means = [
        step.evaluate(state, [each], costs_of)
        for each in (batch, jax.device_put(batch, rows), batch)
    ]
    near(means, [costs_of(params_of(), batch).mean()] * 3)
    with pytest.raises(ArgumentError, match="with rows that do not count"):
        step.evaluate(state, [step._program.placer(batch)], costs_of)


def test_an_update_that_is_not_elementwise_is_replicated_where_its_pieces_do_not_divide():
    make = functools.partial(crossshard.make_train_step, loss_fn, EVERY["lamb"], virtual_shards=8)
    step = make(num_shards=3, params="sharded")
    step.abstract_init(params_of())
    assert (
        "replicated: it is not elementwise, and 8 virtual shards do not divide over 3"
        in step.describe()
    )


def test_weights_count_and_padding_divides_over_virtual_shards():
    options: dict[str, Any] = {"loss": weighted, "rows": 21, "weight": "w"}
    options |= {"virtual_shards": 8, "accumulate_steps": 2}
    found = [trained(shards, **options) for shards in (1, 4, 3)]
    assert sha(found[0]) == sha(found[1]) == sha(found[2])
    assert found[0][1]["weight"] == 14
    weights = (np.arange(21) % 3 > 0).astype(np.float32)
    batches = [batch_of(seed, 21) | {"w": weights} for seed in range(3)]
    near(found[0][0], on_one_device(weighted, OPTIMIZERS["sgd"], batches))


def noisy(params: Any, state: Any, batch: Any, rng: Any) -> Any:
    x = jnp.where(jax.random.bernoulli(rng, 0.8, batch["x"].shape), batch["x"], 0)
    cost = loss_fn(params, batch | {"x": x})
    state = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0), "count": state["count"] + 1}
    aux = {"key": jax.random.bits(rng), "rows": len(x), "cost": cost}
    return cost, (state, aux)


def test_each_part_has_the_keys_state_and_aux_of_a_shard():
    options: dict[str, Any] = {
        "has_aux": True,
        "model_state": "mean",
        "loss_over": "shard",
        "aux_reduction": {"key": None, "rows": "sum", "cost": "mean"},
    }
    found = []
    for shards, virtual in ((8, None), (2, 8), (3, 8)):
        options |= {} if virtual is None else {"virtual_shards": virtual}
        step = sgd_step(noisy, 0.1, shards, **options)
        before = {"mean": jnp.zeros(64), "count": jnp.int32(0)}
        state = step.init(params_of(), rng=3, model_state=before)
        for seed in range(2):
            state, metrics = step(state, batch_of(seed))
        found.append(jax.device_get((step.model(state), metrics["aux"], metrics["loss"])))
    plain, virtual, uneven = found
    near(virtual, plain)
    assert sha(uneven) == sha(virtual)
    np.testing.assert_array_equal(virtual[1]["key"], plain[1]["key"])
    assert virtual[1]["key"].shape == (8,)
    assert virtual[0][1]["count"] == 2


@pytest.mark.parametrize(("shards", "virtual", "nodes"), [(4, 8, 1), (2, 6, 3)])
def test_bytes_are_those_of_an_all_reduce_times_the_odd_part(shards: int, virtual: int, nodes: int):
    step = sgd_step(loss_fn, 0.1, shards, virtual_shards=virtual, weight_update="replicated")
    lowered = step.lower(step.abstract_init(params_of()), batch_of(0))
    report = crossshard.inspect(lowered)
    # With the loss, padded.
    elements = 64 * 48 + 48 + 1
    elements += -elements % shards
    each = 4 * elements * (shards - 1) / shards
    assert report.bytes_sent == (nodes + 1) * each
    text = lowered.compile().as_text()
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == 1
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 1
    assert not re.search(r" (all-reduce|reduce-scatter)(-start)?\(", text)


# What is refused.


def test_an_update_that_reads_all_leaves_at_once_is_not_sharded():
    make = functools.partial(
        crossshard.make_train_step, loss_fn, across_leaves(0.1), num_shards=4, virtual_shards=8
    )
    says = r"not depend on the number of shards, and .* neither elementwise nor leaf by leaf"
    for options in ({"weight_update": "sharded"}, {"params": "sharded"}):
        with pytest.raises(WeightUpdateError, match=says):
            make(**options).init({"a": jnp.zeros((64, 48)), "b": jnp.zeros((48, 64))})
    step = make()
    step.abstract_init({"a": jnp.zeros((1024, 256)), "b": jnp.zeros((256, 1024))})
    assert "update on every shard" in str(step)


@pytest.mark.parametrize("over", ["rows", "shard"])
@pytest.mark.parametrize(
    "of", [lambda x: jax.lax.pmean(x, "shards"), lambda x: x / jax.lax.psum(x, "shards")]
)
def test_a_loss_that_names_the_axis_is_refused(over: str, of: Any):
    loss = lambda params, batch: of(loss_fn(params, batch))
    step = sgd_step(loss, 0.1, 4, virtual_shards=8, loss_over=over)
    with pytest.raises(AxisError, match="The loss names the shard axis 'shards'"):
        step(step.init(params_of()), batch_of(0))


def test_a_loss_that_is_no_mean_over_rows_is_refused_on_one_shard_too():
    loss = lambda params, batch: loss_fn(params, batch | {"x": batch["x"] - batch["x"].mean(0)})
    step = sgd_step(loss, 0.1, 1, virtual_shards=8)
    with pytest.raises(LossError):
        step(step.init(params_of()), batch_of(0))


def test_a_module_with_state_of_each_shard_is_refused():
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    step = sgd_step(lambda model, x: model(x).mean(), 0.1, 4, virtual_shards=8)
    with pytest.raises(ArgumentError, match="Each shard keeps its own variables"):
        step.init(model)


def test_rows_that_do_not_divide_over_virtual_shards_are_refused():
    step = sgd_step(loss_fn, 0.1, 2, virtual_shards=8, accumulate_steps=2)
    with pytest.raises(ArgumentError, match="12 rows, which do not divide evenly over 8 virtual"):
        step(step.init(params_of()), batch_of(0, 12))
    # What lies on the devices already was not looked at.
    rows = jax.NamedSharding(step.mesh, jax.P("shards"))
    placed = jax.device_put(batch_of(0, 12), rows)
    with pytest.raises(ArgumentError, match="A shard has 6 rows of this batch"):
        step(step.init(params_of()), placed)
