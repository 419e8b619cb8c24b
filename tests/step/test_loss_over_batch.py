"""A loss over the batch: one device's numbers on any number of shards, with the loss unchanged."""

import functools
import itertools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    AxisError,
    CheckpointWarning,
    LossError,
)
from tests.quick import deep, deep_but
from tests.step.common import assert_close, on_one_device, train
from tests.step.comparing import (
    CASES,
    FEATURES,
    ROWS,
    SEED,
    WIDTH,
    array,
    batch_norm,
    batches,
    contrastive,
    linen_batch_norm,
    params,
    token_mean,
)

SGD, ADAMW = optax.sgd(0.1), optax.adamw(1e-3)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}
PLACES = (
    {"weight_update": "replicated"},
    {"weight_update": "sharded"},
    {"params": "sharded"},
)


def _step(loss: Any, optimizer: Any = SGD, number: int = 4, **options: Any) -> Any:
    return make_train_step(loss, optimizer, num_shards=number, loss_over="batch", **options)


_plain = functools.cache(lambda name, optimizer: CASES[name].on_one_device(optimizer))


def _stepped(name: str, optimizer: Any, number: int, **options: Any) -> tuple[Any, list[Any]]:
    """The model after a step on each batch, and the metrics of each."""
    case = CASES[name]
    model, model_state = case.make()
    kept = {} if model_state is None else {"model_state": "mean"}
    step = make_train_step(case.loss, optimizer, num_shards=number, **kept, **options)
    state, found = step.init(model, SEED, model_state=model_state), []
    for batch in batches():
        state, metrics = step(state, batch)
        found.append(metrics)
    return eqx.filter(step.model(state), eqx.is_array), found


def _is_quick(one: tuple[Any, ...]) -> bool:
    name, number, where, optimizer = one
    return number == 4 and optimizer == "sgd" and where is PLACES[list(CASES).index(name) % 3]


ALL = deep_but(_is_quick, itertools.product(CASES, (1, 2, 4, 8), PLACES, OPTIMIZERS))


@pytest.mark.parametrize(("name", "number", "where", "optimizer"), ALL, ids=str)
def test_the_step_is_that_of_one_device(name: str, number: int, where: Any, optimizer: str) -> None:
    expected, losses = _plain(name, OPTIMIZERS[optimizer])
    found, metrics = _stepped(name, OPTIMIZERS[optimizer], number, loss_over="batch", **where)
    assert_close(found, expected)
    assert_close([each["loss"] for each in metrics], losses, rtol=1e-6)


# The Linen loss is refused there: each shard would count its own rows.
COMPARED = [name for name in CASES if name != "linen_batch_norm"]


@pytest.mark.parametrize(
    "name", deep_but(["contrastive", "keras_batch_norm_and_dropout"], COMPARED)
)
def test_shards_alone_would_compute_something_else(name: str) -> None:
    expected, _ = _plain(name, SGD)
    found, _ = _stepped(name, SGD, 4, loss_over="shard")
    differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), found, expected)
    assert max(jax.tree.leaves(differences)) > 1e-4


@pytest.mark.parametrize("optimizer", [optax.contrib.muon(1e-3), optax.lamb(1e-3)])
@pytest.mark.parametrize("where", PLACES[1:], ids=str)
def test_of_any_optimizer(optimizer: Any, where: Any) -> None:
    expected, _ = on_one_device(contrastive, optimizer, params(), batches())
    step = _step(contrastive, optimizer, 4, **where)
    assert_close(step.model(train(step, step.init(params()), batches())), expected, atol=3e-6)


class _Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        # Its bias has no gradient but for rounding, of which Adam would make steps.
        self.first = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def _arrays_of(module: Any) -> list[Any]:
    """The arrays of a module, of its keys their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    leaves = jax.tree.leaves(nnx.state(module))
    return [jax.random.key_data(x) if is_key(x) else x for x in leaves]


def _of_module(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def _is_quick_module(one: tuple[Any, ...]) -> bool:
    number, where, optimizer = one
    return number == 4 and (optimizer == "adamw") == ("params" in where)


MODULES = deep_but(_is_quick_module, itertools.product((1, 2, 4, 8), PLACES, OPTIMIZERS))


@pytest.mark.parametrize(("number", "where", "optimizer"), MODULES, ids=str)
def test_a_module_has_one_state(number: int, where: Any, optimizer: str) -> None:
    module = _Module(nnx.Rngs(0))
    state_of = nnx.Optimizer(module, OPTIMIZERS[optimizer], wrt=nnx.Param)

    @nnx.jit
    def plain(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.update(model, nnx.grad(_of_module)(model, batch))

    for batch in batches():
        plain(module, state_of, batch)
    step = _step(_of_module, OPTIMIZERS[optimizer], number, **where)
    state = train(step, step.init(_Module(nnx.Rngs(0))), batches())
    found = step.model(state)
    assert_close(_arrays_of(found), _arrays_of(module))
    assert found.norm.mean[...].shape == (WIDTH,)
    values = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(1)
    module.eval()

    def evaluated(model: Any, batch: Any) -> Any:
        model.eval()
        return values(model, batch)

    expected = values(module, batches()[0]).mean()
    np.testing.assert_allclose(step.evaluate(state, batches()[:1], evaluated), expected, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 2])
def test_model_state_is_kept_as_it_is_returned(steps: int) -> None:
    trained, before = CASES["linen_batch_norm"].make()
    expected, model_state = trained, before
    for count, batch in enumerate(batches()):
        gradients = jax.tree.map(jnp.zeros_like, expected)
        for i in range(steps):
            rows = jax.tree.map(lambda x, i=i: x[i::steps], batch)
            key = jax.random.fold_in(jax.random.key(SEED), count * steps + i)
            found, model_state = jax.grad(linen_batch_norm, has_aux=True)(
                expected, model_state, rows, jax.random.fold_in(key, 0)
            )
            gradients = jax.tree.map(lambda a, b: a + b / steps, gradients, found)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, gradients)
    # Integers that depend on the batch are the same on all shards here.
    options = {"accumulate_steps": steps, "weight_update": "sharded"}
    step = _step(linen_batch_norm, model_state="mean", **options)
    state = step.init(trained, SEED, model_state=before)
    assert_close(step.model(train(step, state, batches())), (expected, model_state))
    assert "one, as the loss returns it" in step.describe()


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_options_behind_the_gradient(where: Any) -> None:
    def with_aux(params: Any, batch: Any) -> Any:
        return contrastive(params, batch), {"each": batch["x"].sum(1), "mean": batch["x"].mean()}

    of_all = {
        "accumulate_steps": 2,
        "loss_scale": "dynamic",
        "nonfinite": "skip",
        "ema": 0.9,
        "metrics": ("grad_norm", "param_norm"),
        "check_divergence": 1,
        "has_aux": True,
    }
    found = []
    for number in (1, 4):
        step = _step(with_aux, ADAMW, number, **where, **of_all)
        state = step.init(params())
        for batch in batches():
            state, metrics = step(state, batch)
        step.finish(state)
        assert not metrics["skipped"]
        names = ("loss", "aux", "grad_norm", "param_norm", "loss_scale")
        chosen = {name: metrics[name] for name in names}
        found.append((step.model(state), step.model(state, ema=True), chosen))
    assert_close(*found, atol=2e-6)
    assert found[0][2]["aux"]["each"].shape == (2, ROWS // 2)
    of_half = lambda params, batch, i: contrastive(params, jax.tree.map(lambda x: x[i::2], batch))
    of_halves = lambda params, batch: sum(of_half(params, batch, i) / 2 for i in range(2))
    expected, _ = on_one_device(of_halves, ADAMW, params(), batches())
    assert_close(found[1][0], expected)


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_parameters_of_16_bits(where: Any) -> None:
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    found = []
    for number in (1, 4):
        step = _step(token_mean, SGD, number, master_dtype="float32", **where)
        found.append(step.model(train(step, step.init(narrow), batches())))
    as_wide = [jax.tree.map(lambda x: np.asarray(x, np.float32), each) for each in found]
    assert_close(*as_wide, atol=1e-2)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_a_step_that_is_not_finite_is_skipped(where: Any) -> None:
    step = _step(contrastive, ADAMW, nonfinite="skip", **where)
    state, bad = step.init(params()), batches()[0]
    bad["y"][3] = np.nan
    before = jax.device_get(step.model(state))
    state, metrics = step(state, bad)
    assert metrics["skipped"]
    assert int(metrics["nonfinite"].shard) == -1
    text = metrics["nonfinite"].describe(state.params)
    assert text == "the gradient of `first` is not finite"
    assert_close(step.model(state), before, atol=0)


def test_frozen_parameters_and_whole_entries() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return contrastive(params, {**batch, "x": batch["x"] * batch["factor"]})

    chosen = lambda path, _: "first" in str(path)
    found = []
    for number in (1, 4):
        step = _step(
            loss, SGD, number, wrt=chosen, params="sharded", replicated_entries=("factor",)
        )
        with_factor = [{**batch, "factor": np.float32(0.5)} for batch in batches()]
        found.append(step.model(train(step, step.init(params()), with_factor)))
    assert_close(*found)


def _moved(how: str, one: Any, other: Any, state: Any, folder: Any) -> Any:
    """The state as the other step has it, by a checkpoint or without one."""
    other.init(_Module(nnx.Rngs(1)))
    if how == "reshard":
        return other.reshard(one.unshard(state))
    with crossshard.Checkpoints(folder, one) as checkpoints:
        checkpoints.save(state)
    with (
        crossshard.Checkpoints(folder, other) as checkpoints,
        pytest.warns(CheckpointWarning, match="loss_over is (shard|batch) in it, and"),
    ):
        return checkpoints.restore_latest(other.init(_Module(nnx.Rngs(1))))[0]


WAYS = [("reshard", 4), deep(("reshard", 2)), deep(("checkpoint", 4)), ("checkpoint", 2)]


@pytest.mark.parametrize(("how", "number"), WAYS)
def test_a_module_goes_from_shards_to_the_batch_and_back(
    how: str, number: int, tmp_path: Any
) -> None:
    of_shards = make_train_step(_of_module, SGD, num_shards=4, loss_over="shard", ema=0.9)
    of_batch = _step(_of_module, SGD, number, params="sharded", ema=0.9)
    state, _ = of_shards(of_shards.init(_Module(nnx.Rngs(0))), batches()[0])
    statistics = np.asarray(state.model_state["norm"]["mean"][...])
    assert statistics.shape == (4, WIDTH)
    assert np.abs(statistics - statistics.mean(0)).max() > 1e-2
    if number == 4:
        with pytest.raises(ArgumentError, match="one for each shard, and this step keeps one for"):
            of_batch(state, batches()[1])
    there = _moved(how, of_shards, of_batch, state, tmp_path / "there")
    found = of_batch.model(there)
    np.testing.assert_allclose(found.norm.mean[...], statistics.mean(0), atol=1e-6)
    assert_close(found.first.kernel[...], of_shards.model(state).first.kernel[...], atol=0)
    there, _ = of_batch(there, batches()[1])
    back = _moved(how, of_batch, of_shards, there, tmp_path / "back")
    statistics = of_batch.model(there).norm.mean[...]
    every = back.model_state["norm"]["mean"][...]
    assert_close(every, np.broadcast_to(statistics, (4, WIDTH)), atol=0)
    keys = jax.random.key_data(back.model_state["dropout"]["rngs"]["key"][...])
    assert len(np.unique(keys, axis=0)) == 4
    _, metrics = of_shards(back, batches()[2])
    assert np.isfinite(metrics["loss"])


def test_the_state_goes_to_other_shards() -> None:
    module = lambda: _Module(nnx.Rngs(0))
    steps = {n: _step(_of_module, ADAMW, n, weight_update="sharded") for n in (2, 4)}
    state = steps[4].init(module())
    state, _ = steps[4](state, batches()[0])
    steps[2].init(module())
    moved = steps[2].reshard(steps[4].unshard(state))
    for batch in batches()[1:]:
        state, _ = steps[4](state, batch)
        moved, _ = steps[2](moved, batch)
    assert_close(*map(_arrays_of, (steps[2].model(moved), steps[4].model(state))))


def test_it_says_what_it_does() -> None:
    step = _step(batch_norm, ADAMW, params="sharded", accumulate_steps=2)
    state = step.init(params())
    said = step.describe()
    assert said.startswith(
        "gather → gradient of one loss over the batch, summed by XLA → accumulate 2 microbatches"
    )
    report = crossshard.inspect(step.lower(state, batches()[0]).compile())
    assert "all-gather" in {each.kind for each in report.collectives}


LAYERS, WIDE = 3, 256


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("wrt", [None, lambda path, _: "up" in str(path)])
def test_stacked_layers_are_gathered_in_their_loop(wrt: Any, steps: int) -> None:
    """Of parameters in parts no device has more than a layer, and no gradient is whole."""
    stack = {name: array(i, LAYERS, WIDE, WIDE) / 16 for i, name in enumerate(("up", "down"))}
    rows = [{"x": array(seed, ROWS, WIDE)} for seed in (5, 6)]

    def loss(params: Any, batch: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, each: Any) -> Any:
            x = x + jnp.tanh(x @ each["up"]) @ each["down"]
            return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3), None

        return (jax.lax.scan(layer, batch["x"], params)[0] ** 4).mean()

    step = _step(loss, SGD, params="sharded", wrt=wrt, accumulate_steps=steps)
    state = step.init(stack)
    compiled = step.lower(state, rows[0]).compile()
    found = crossshard.inspect(compiled)
    gathers = [each for each in found.collectives if each.kind == "all-gather"]
    sent = {(str(x), each.in_loop) for each in gathers for x in each.operands}
    assert sent == {(f"f32[{WIDE // 4},{WIDE}]", True)}, sent
    assert not re.search(rf"f32\[{LAYERS},{WIDE},{WIDE}\]", compiled.as_text())
    text = f"gathered row by row in a loop of {LAYERS} turns, in float32, and again in the backward"
    assert text in step.describe()
    trained = stack if wrt is None else {"up": stack["up"]}

    def plain(part: Any, batch: Any) -> Any:
        of = lambda i: loss({**stack, **part}, {"x": batch["x"][i::steps]})
        return sum(of(i) / steps for i in range(steps))

    expected, _ = on_one_device(plain, SGD, trained, rows)
    assert_close(step.model(train(step, state, rows)), {**stack, **expected})


MEAN = functools.partial(CrossShardOptimizer, SGD)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "weight=": (SGD, {"weight": "mask"}, "Weigh the rows in the loss"),
    "preprocess=": (MEAN(preprocess=optax.clip(1.0)), {}, "optax.chain"),
    "nonfinite='quarantine'": (SGD, {"nonfinite": "quarantine"}, "nonfinite='skip'"),
    "group_assignment": (MEAN(group_assignment=[[0, 1], [2, 3]]), {}, "Leave it out"),
    "model_state='per_shard'": (SGD, {"model_state": "per_shard"}, "model_state='mean'"),
    "aux_reduction='per_shard'": (
        SGD,
        {"has_aux": True, "aux_reduction": "per_shard"},
        "as the loss returns it",
    ),
    "reduction='sum'": (MEAN(reduction="sum"), {}, "reduction='mean'"),
    "metrics=['noise_scale']": (SGD, {"metrics": ("noise_scale",)}, "Leave it out"),
    "reduce_dtype='bfloat16'": (SGD, {"reduce_dtype": "bfloat16"}, "Leave it out"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_a_shards_own_gradient_is_refused(what: str) -> None:
    optimizer, options, instead = REFUSED[what]
    loss = (lambda p, s, batch: (0.0, s)) if "model_state" in options else contrastive
    with pytest.raises(ArgumentError, match="one loss, of the whole batch") as error:
        _step(loss, optimizer, **options)
    assert str(error.value).startswith(what)
    assert instead in str(error.value)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ArgumentError, match="loss_over must be 'rows', 'batch' or 'shard'"):
        make_train_step(contrastive, SGD, num_shards=2, loss_over="global")


def _named(axis: str) -> Any:
    return lambda params, batch: jax.lax.pmean(contrastive(params, batch), axis)


def test_the_shard_axis_is_not_bound() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    step = make_train_step(_named("data"), SGD, mesh=mesh, loss_over="batch")
    with pytest.raises(AxisError, match=r"names the shard axis 'data' \(.*batch.py:\d+\)"):
        step(step.init(params()), batches()[0])
    step = make_train_step(_named("other"), SGD, mesh=mesh, loss_over="batch")
    with pytest.raises(NameError, match="other"):
        step(step.init(params()), batches()[0])


def test_the_mesh_may_be_named() -> None:
    mesh = jax.make_mesh((4,), ("shards",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("shards"), out_specs=P(), check_vma=False
    )
    def gathered(x: Any) -> Any:
        return jax.lax.all_gather(x, "shards", tiled=True)

    def loss(params: Any, batch: Any) -> Any:
        whole = jax.lax.with_sharding_constraint(gathered(batch["x"]), NamedSharding(mesh, P()))
        return contrastive(params, {**batch, "x": whole})

    expected, _ = on_one_device(contrastive, SGD, params(), batches())
    step = make_train_step(loss, SGD, mesh=mesh, params="sharded", loss_over="batch")
    assert_close(step.model(train(step, step.init(params()), batches())), expected)


@pytest.mark.parametrize("where", deep_but(PLACES[2:], PLACES), ids=str)
def test_beside_a_model_axis(where: Any) -> None:
    axes = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=axes)
    split = {"first": P(None, "model"), "scale": P("model"), "second": P("model")}
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    placed = jax.tree.map(put, params(), split)
    for optimizer in (SGD, optax.contrib.muon(1e-3)):
        expected, _ = on_one_device(contrastive, optimizer, params(), batches())
        options = {"mesh": mesh, "axis_name": "data", "loss_over": "batch"}
        step = make_train_step(contrastive, optimizer, **options, **where)
        found = step.model(train(step, step.init(placed), batches()))
        assert_close(found, expected)
        assert "model" in found["second"].sharding.spec


def test_verify_takes_microbatches_of_the_batch_on_one_device_too() -> None:
    step = _step(contrastive, ADAMW, 8, accumulate_steps=2)
    assert crossshard.verify(step, params(), batches()[0]).ok


def test_what_has_no_mean_over_microbatches_is_refused_with_the_way_on() -> None:
    def with_aux(params: Any, batch: Any) -> Any:
        loss = contrastive(params, batch)
        return loss, {"large": loss > 1, "loss": loss}

    options = {"has_aux": True, "accumulate_steps": 2}
    step = _step(with_aux, aux_reduction="mean", **options)
    with pytest.raises(ArgumentTypeError, match="Pass aux_reduction=None for it"):
        step(step.init(params()), batches()[0])
    step = _step(with_aux, aux_reduction={"large": None, "loss": "mean"}, **options)
    _, metrics = step(step.init(params()), batches()[0])
    assert jax.tree.map(jnp.shape, metrics["aux"]) == {"large": (2,), "loss": ()}


def test_rows_that_do_not_divide_are_refused_without_a_weight() -> None:
    step = _step(contrastive)
    batch = jax.tree.map(lambda x: x[:10], batches()[0])
    with pytest.raises(ArgumentError, match=r"Pass 8 or 12\.$"):
        step(step.init(params()), batch)


def test_a_checkpoint_goes_to_other_shards(tmp_path: Any) -> None:
    steps = [_step(_of_module, ADAMW, n, params="sharded") for n in (4, 2)]
    state = steps[0].init(_Module(nnx.Rngs(0)))
    state, _ = steps[0](state, batches()[0])
    with crossshard.Checkpoints(tmp_path, steps[0]) as checkpoints:
        checkpoints.save(state)
    with crossshard.Checkpoints(tmp_path, steps[1]) as checkpoints:
        found, _ = checkpoints.restore(steps[1].init(_Module(nnx.Rngs(1))), 1)
    found, _ = steps[1](found, batches()[1])
    state, _ = steps[0](state, batches()[1])
    assert_close(*map(_arrays_of, (steps[1].model(found), steps[0].model(state))))


def test_under_a_plain_jit_there_is_nothing_to_reduce() -> None:
    expected, _ = on_one_device(contrastive, ADAMW, params(), batches())
    mesh = jax.make_mesh((4,), ("shards",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    rows = jax.device_put(batches(), NamedSharding(mesh, P("shards")))
    whole = jax.device_put(params(), NamedSharding(mesh, P()))
    found, _ = on_one_device(contrastive, CrossShardOptimizer(ADAMW), whole, rows)
    assert_close(found, expected)


def _convolved(kernel: Any, x: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def _adapted(kernel: Any, batch: Any) -> Any:
    def of_task(x: Any) -> Any:
        of_kernel = lambda kernel: (_convolved(kernel, x) ** 2).mean()
        return of_kernel(kernel - 0.1 * jax.grad(of_kernel)(kernel))

    return jax.vmap(of_task)(batch).mean()


@pytest.mark.parametrize("rows_of_task", [1, 2])
@pytest.mark.parametrize("loss_over", ["batch", "rows"])
def test_a_gradient_of_a_kernel_for_each_row(rows_of_task: int, loss_over: str) -> None:
    kernel = np.float32(np.random.default_rng(0).normal(size=(3, 3, 2, 4))) / 5
    batch = np.float32(np.random.default_rng(1).normal(size=(16, rows_of_task, 6, 6, 2)))
    step = make_train_step(_adapted, SGD, num_shards=4, loss_over=loss_over)
    if loss_over == "batch" and rows_of_task == 1:
        # XLA computes something else.
        with pytest.raises(LossError, match=r"kernel for each row .*test_loss_over_batch.py"):
            step(step.init(kernel), batch)
        return
    state, _ = step(step.init(kernel), batch)
    expected, _ = on_one_device(_adapted, SGD, kernel, [batch])
    assert_close(step.model(state), expected)
