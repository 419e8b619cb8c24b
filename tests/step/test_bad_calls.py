"""What make_train_step and its steps refuse, by name, and that nothing is lost by it."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import crossshard
from crossshard import make_train_step
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    GroupAssignmentError,
    NestedReductionError,
    VariableError,
)

ROWS = np.ones((8, 3), np.float32)
PARAMS = {"w": np.ones((64, 64), np.float32)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return (params["w"] ** 2).sum() * batch.mean()


def bad(name: str, call: Callable[[], Any], error: type, *names: str) -> Any:
    """A wrong call, and what its error says; … stands for whatever is between."""
    return pytest.param(call, error, names, id=name)


def make_step(shards: int) -> Any:
    return make_train_step(loss_fn, optax.sgd(0.1), num_shards=shards, donate=False)


def make(loss: Any = loss_fn, opt: Any = None, **kwargs: Any) -> Callable[[], Any]:
    kwargs = {"num_shards": 4} | kwargs
    return lambda: make_train_step(loss, optax.sgd(0.1) if opt is None else opt, **kwargs)


def wrapped(**kwargs: Any) -> Any:
    return crossshard.CrossShardOptimizer(optax.sgd(0.1), **kwargs)


def init(params: Any, *rest: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: make(**kwargs)().init(params, *rest)


def step_on(batch: Any, **kwargs: Any) -> Callable[[], Any]:
    def call() -> Any:
        step = make(**kwargs)()
        return step(step.init(PARAMS), batch)

    return call


def state_of_another_step() -> Any:
    adam, sgd = make(opt=optax.adam(0.1))(), make()()
    return sgd(adam.init(PARAMS), ROWS)


def state_of_another_step_to_reshard() -> Any:
    adam, adamw = make(opt=optax.adam(0.1))(), make(opt=optax.adamw(0.1))()
    return adamw.reshard(adam.unshard(adam.init(PARAMS)))


def a_further_array() -> Any:
    step = make()()
    return step(step.init(PARAMS), ROWS, ROWS)


def stateful(change: Callable[[Any], Any] = lambda out: out, **kwargs: Any) -> Callable[[], Any]:
    """A step whose loss returns a state, or what ``change`` makes of it."""

    def loss(params: Any, state: Any, batch: Any) -> Any:
        return change((loss_fn(params, batch), state))

    def call() -> Any:
        step = make(**{"loss": loss, "model_state": "mean"} | kwargs)()
        return step(step.init(PARAMS, model_state={"mean": np.float32(2), "count": 3}), ROWS)

    return call


def lora() -> Any:
    return nnx.LoRALinear(4, 3, lora_rank=2, rngs=nnx.Rngs(0))


def state_of_another_number_of_shards() -> Any:
    odd = {"w": np.ones((37, 41), np.float32)}
    three, four = (
        make(opt=optax.adam(0.1), num_shards=number, weight_update="sharded")() for number in (3, 4)
    )
    return four(three.init(odd), ROWS)


class Sowing(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))


def sow(model: Any, batch: Any) -> jax.Array:
    model.seen = nnx.Variable(batch.sum())
    return (model.w[...] * batch).sum()


# fmt: off
TABLE = [
    bad("no function", make(loss=3), ArgumentTypeError, "loss_fn must be a function", "3"),
    bad("a loss of one argument", make(loss=lambda p: p), ArgumentTypeError,
        "(params, batch)", "['p']"),
    bad("no optimizer", make(opt=0.1), ArgumentTypeError, "Optax transformation", "float"),
    bad("a sum", make(reduction="sum"), ArgumentTypeError, "'reduction', which is the optimizer's",
        "CrossShardOptimizer(optimizer, reduction=...)"),
    bad("a factory", make(opt=optax.adam), ArgumentTypeError, "adam(learning_rate)"),
    bad("too many shards", make(num_shards=1000), ArgumentError, "1000 shards", "8"),
    bad("a mesh of another size",
        make(num_shards=2, mesh=Mesh(np.array(jax.devices()[:4]), ("x",))),
        ArgumentError, "num_shards is 2", "4 devices"),
    bad("groups of other shards",
        make(opt=wrapped(group_assignment=[[0, 1], [2, 3]]), num_shards=8),
        GroupAssignmentError, "range(8)"),
    bad("gradients said to be summed", make(opt=wrapped(incoming="summed")), ArgumentError,
        "'summed'", "Leave incoming out"),
    bad("nothing to train", init({"n": np.arange(3)}), ArgumentError, "nothing to train", "dict"),
    bad("a bare variable", init(nnx.Param(jnp.ones(3))), ArgumentTypeError, "nnx Param"),
    bad("a leaf that cannot be fixed", init((np.ones(3), bytearray(3))), ArgumentTypeError,
        "bytearray"),
    bad("several keys", init(PARAMS, jax.random.split(jax.random.key(0), 2)), ArgumentTypeError,
        "jax.random.key"),
    bad("the state of another rule", state_of_another_step, ArgumentError, "another optimizer"),
    bad("the state of another number of shards", state_of_another_number_of_shards, ArgumentError,
        "another step", "reshard"),
    bad("rows that do not divide", step_on(np.ones((10, 3), np.float32)), ArgumentError,
        "10 rows", "4 shards", "2 are left over", "8 or 12", "weight="),
    bad("rows of one of two", step_on({"x": ROWS, "y": ROWS[:7]}), ArgumentError,
        "All arrays of a batch must have as many rows", "batch['x'] has 8, and batch['y'] 7",
        "in replicated_entries=."),
    bad("a word in the batch", step_on({"x": ROWS, "n": "train"}), ArgumentTypeError,
        "batch['n'] must be an array", "'train'"),
    bad("an empty batch", step_on({}), ArgumentError, "empty"),
    bad("a list of rows", step_on({"x": [[1.0, 2.0], [3.0, 4.0]]}), ArgumentError,
        "batch['x'][0][0] is a scalar", "numpy.asarray(batch['x'])"),
    bad("a number beside rows", step_on([ROWS, 0.5]), ArgumentError,
        "batch[1] is a scalar", "batch_axis"),
    bad("a weight that counts padding", step_on(np.ones((10, 3), np.float32), weight=len),
        ArgumentError, "10 rows", "weight 0", "mask"),
    bad("a weight that is not in the batch", step_on(ROWS, weight="mask"), ArgumentError, "'mask'"),
    bad("a weight of many numbers", step_on(ROWS, weight=lambda batch: batch[:, 0]), ArgumentError,
        "one number", "(2,)"),
    bad("padding of different lengths",
        step_on({"x": ROWS[:7], "y": ROWS[:6], "mask": np.ones(7)}, weight="mask",
                loss=lambda p, b: (p["w"] ** 2).sum() * b["x"].mean()),
        ArgumentError, "[6, 7]"),
    bad("a loss of many numbers", step_on(ROWS, loss=lambda p, b: p["w"][0]), ArgumentError,
        "scalar", "(64,)"),
    bad("no aux", step_on(ROWS, has_aux=True), ArgumentTypeError, "(loss, aux)"),
    bad("an optimizer inside that reduces again", step_on(ROWS, opt=optax.chain(wrapped())),
        NestedReductionError, "twice"),
    bad("a loss that makes variables",
        lambda: (step := make(loss=sow)()) and step(step.init(Sowing()), ROWS),
        VariableError, "added or removed variables"),
    bad("an optimizer that searches a line", init(PARAMS, opt=optax.lbfgs()), ArgumentError,
        "needs more than gradients"),
    bad("an optimizer whose state changes",
        init(PARAMS, opt=optax.monitor({"n": optax.tree.norm})), ArgumentError,
        "measurements['n'] from nothing…metrics="),
    bad("a keyword that nobody passes", make(loss=lambda p, b, *, scale: p["w"].sum()),
        ArgumentTypeError, "'scale'"),
    bad("modules in a dict", lambda: init({"m": Sowing()})(), ArgumentTypeError, "one nnx.Module"),
    bad("the state of another rule, to reshard", state_of_another_step_to_reshard, ArgumentError,
        "another optimizer's"),
    bad("several keys in one", make(loss=lambda w, b, rngs=None: w.sum()), ArgumentTypeError,
        "one key…loss_fn(params, batch, rng)"),
    *(bad(f"{number} shards of a mesh of eight",
          make(num_shards=number, mesh=Mesh(np.array(jax.devices()), ("data",))), ArgumentError,
          f"num_shards is {number} and the mesh has 8 devices") for number in (1, 4)),
    *(bad(f"the seed {seed}", init(PARAMS, seed), ArgumentError, f"64 bits…{seed}")
      for seed in (2**70, -(2**70), 2**63)),
    *(bad(f"{rows} rows for eight shards", step_on(np.ones((rows, 3), np.float32), num_shards=8),
          ArgumentError, said)
      for rows, said in ((3, "Pass 8,"), (11, "Pass 8 or 16,"), (0, "has 0 rows"))),
    *(bad(f"an optimizer with parameters of its own form, {name}",
          init(params, opt=optax.lookahead(optax.sgd(0.1), 3, 0.5)), ArgumentError,
          "cannot update these parameters…the Optax idiom")
      for name, params in
      (("plain", PARAMS), ("its own", optax.LookaheadParams.init_synced(PARAMS)))),
    bad("two arrays beside the parameters", make(loss=lambda params, x, y: (params * x - y).mean()),
        ArgumentTypeError, "'x': x, 'y': y", "call it rng"),
    bad("what sounds like a key", make(loss=lambda params, images, keypoints: images.mean()),
        ArgumentTypeError, "'keypoints']…call it rng"),
    bad("arrays beside a state",
        make(loss=lambda params, stats, x, y: (x.mean(), stats), model_state="mean"),
        ArgumentTypeError, "(params, model_state, batch)…of which the loss reads"),
    bad("an array after the batch", a_further_array, ArgumentTypeError,
        "got 1 more…{'x': x, 'y': y}"),
    bad("a forgotten has_aux", step_on(ROWS, loss=lambda p, x: (loss_fn(p, x), 1)),
        ArgumentTypeError, "returned (loss, aux)…pass has_aux=True"),
    bad("a state with statistics",
        lambda: init(nnx.split(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))[1])(), ArgumentTypeError,
        "BatchStat…nnx.split(model, nnx.Param, ..."),
    *(bad(f"the base of an adapter, {name}", lambda opt=opt: init(lora(), opt=opt)(), ArgumentError,
          "params['bias']…wrt=nnx.LoRAParam")
      for name, opt in (("sgd", optax.sgd(0.1)), ("adamw", optax.adamw(0.1)))),
    bad("rows that do not divide into microbatches",
        step_on(np.ones((16, 3), np.float32), accumulate_steps=3), ArgumentError, "divide"),
    bad("an optimizer that accumulates over calls", make(opt=wrapped(accumulate_steps=2)),
        ArgumentError, "accumulates over calls"),
    bad("an average that nobody takes",
        lambda: (step := make()()) and step.model(step.init(PARAMS), ema=True), ArgumentError,
        "ema=0.999"),
    bad("rows of a batch that do not divide",
        step_on(np.ones((10, 3), np.float32), loss_over="batch"), ArgumentError, "Pass 8 or 12."),
    bad("fewer virtual shards than shards", make(virtual_shards=3), ArgumentError,
        "there are 4, of which some would have none. Pass at least 4"),
    bad("parameters in another place", make(params="split"), ArgumentError, "params", "'sharded'"),
    bad("a dtype of what is not gathered", make(gather_dtype="bfloat16"), ArgumentError,
        "params='sharded'"),
    bad("a dtype that nothing is gathered in", make(params="sharded", gather_dtype="int16"),
        ArgumentError, "gather_dtype must be bfloat16"),
    # wrt.
    bad("a mask as a filter", init(PARAMS, wrt={"head": True}), ArgumentTypeError,
        "wrt is {'head': True} (dict)…lambda path, leaf"),
    bad("a filter of one argument", init(PARAMS, wrt=lambda leaf: True), ArgumentTypeError,
        "function of other arguments"),
    bad("an NNX filter of a pytree", init(PARAMS, wrt=nnx.Param), ArgumentTypeError,
        "NNX filter…a pytree (dict)"),
    bad("a filter of nothing", init(PARAMS, wrt=lambda path, leaf: False), ArgumentError,
        "none of …params['w']"),
    # model_state.
    bad("a loss that takes no state", stateful(loss=lambda params, batch: (params, batch)),
        ArgumentTypeError, "(params, model_state, batch)"),
    bad("no model state", init(PARAMS, loss=lambda p, s, b: (loss_fn(p, b), s), model_state="mean"),
        ArgumentError, "init(params, model_state=state)"),
    bad("a model state that no loss takes", stateful(loss=loss_fn, model_state=None), ArgumentError,
        "the loss takes none"),
    bad("a module and a state",
        lambda: make(loss=lambda p, s, b: (b.mean(), s), model_state="mean")().init(
            lora(), model_state={}), ArgumentError, "Linear is an NNX module"),
    bad("a word in the model state",
        lambda: make(loss=lambda p, s, b: (b.mean(), s), model_state="mean")().init(
            PARAMS, model_state={"name": "batch"}),
        ArgumentTypeError, "model_state['name'] must be an array…'batch'"),
    bad("a loss that returns no state", stateful(lambda out: out[0]), ArgumentTypeError,
        "returns (loss, model_state)"),
    bad("a state of another structure", stateful(lambda out: (out[0], {"mean": 1.0})),
        ArgumentError, "of the structure that it took"),
    bad("a state of another shape",
        stateful(lambda out: (out[0], {**out[1], "mean": jnp.ones(3)})), ArgumentError,
        "model_state['mean'] was float32[], and the loss returned float32[3]"),
    bad("a key for each row that no loss takes", make(rng_per="row"), ArgumentError,
        "a key for each row"),
    # check_divergence.
    *(bad(f"check_divergence={every}", make(check_divergence=every), ArgumentError,
          f"check_divergence…{every}") for every in (0, -1, 2**31)),
    *(bad(f"check_divergence={every!r}", make(check_divergence=every), ArgumentTypeError,
          "such as 100") for every in (True, 1.5, "100")),
    bad("an unknown on_divergence", make(check_divergence=1, on_divergence="stop"), ArgumentError,
        "'raise' or 'repair'; got 'stop'"),
    bad("a repair without a check", make(on_divergence="repair"), ArgumentError,
        "check_divergence=100"),
    bad("a description too soon", lambda: make()().describe(), ArgumentError, "init(params)"),
    bad("the model of no group in particular",
        lambda: (step := make(opt=wrapped(group_assignment=[[0, 1], [2, 3]]))())
        and step.model(step.init(PARAMS)), ArgumentError, "shard=0"),
]
# fmt: on


@pytest.mark.parametrize(("call", "error", "names"), TABLE)
def test_a_wrong_call(call: Callable[[], Any], error: type, names: tuple[str, ...]):
    with pytest.raises(error) as caught:
        call()
    assert issubclass(error, crossshard.CrossshardError)
    for name in names:
        assert re.search(".*".join(map(re.escape, name.split("…"))), str(caught.value))


def test_the_table_is_long_enough():
    assert len({case.id for case in TABLE}) == len(TABLE) >= 40


def test_a_refused_batch_costs_no_state():
    step = make(opt=optax.adam(0.1), weight_update="sharded")()
    state = step.init(PARAMS)
    for batch in (ROWS[:7], {}, "rows", np.float32(1)):
        with pytest.raises(crossshard.CrossshardError):
            step(state, batch)
    state, metrics = step(state, ROWS)
    assert float(metrics["loss"]) == 64 * 64


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
@pytest.mark.parametrize("shape", [(1, 64), (64, 128)], ids=str)
def test_moments_of_another_shape_are_refused(weight_update: Any, shape: tuple[int, ...]):
    # Those that broadcast would train without a word.
    step = make(opt=optax.adam(0.1), weight_update=weight_update)()
    state = step.init(PARAMS)
    other = jax.tree.map(lambda x: jnp.ones(shape) if x.ndim else x, state.opt_state.inner_state)
    opt_state = state.opt_state._replace(inner_state=other)
    with pytest.raises(ArgumentError, match="The optimizer state has arrays of other shapes"):
        step(dataclasses.replace(state, opt_state=opt_state), ROWS)


@pytest.mark.parametrize(("shards", "others"), [(4, 2), (1, 4)])
def test_a_state_of_other_devices_is_told_the_way(shards: int, others: int):
    """Not by JAX, and whatever it is passed to."""
    step, other = make_step(shards), make_step(others)
    state = step.init(PARAMS)
    calls: list[Callable[[], Any]] = [
        lambda: other(state, ROWS),
        lambda: other.lower(state, ROWS),
        lambda: other.unshard(state),
        lambda: other.predict(state, [ROWS], lambda params, batch: batch * params["w"].sum()),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match=r"on devices \[0.*step\.reshard\(other\.unshard"):
            call()
    other(other.reshard(step.unshard(state)), ROWS)
