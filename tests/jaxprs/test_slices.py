"""Whether an update is elementwise, held against the update itself, run whole and in slices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax

import crossshard
from crossshard.jaxprs.slices import Along, Kind, Mixed, Slices, Slicing, why_not_elementwise
from crossshard.jaxprs.walk import follow
from tests.optimizers.table import ROWS, SOME, Row
from tests.quick import deep_but

pytestmark = [
    pytest.mark.filterwarnings("ignore:inject_stateful_hyperparams:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*use `optimistic_adam_v2`:DeprecationWarning"),
]

SHARDS = 4
STEPS = 4
_rng = np.random.default_rng(7)
START = {
    "bias": np.float32(_rng.normal(size=12)),
    "kernel": np.float32(_rng.normal(size=(6, 8))),
    "whole": np.float32(_rng.normal(size=3)),
}
GOALS = [jax.tree.map(lambda x: np.float32(_rng.normal(size=x.shape)), START) for _ in range(STEPS)]
LOSS = np.float32(1.5)
KEY = jax.random.key(3)


def sliced(tree: Any, shard: int) -> Any:
    """One shard's slice along the last axis of what has the shape of a parameter, but the last."""

    def one(x: Any) -> Any:
        if x.shape not in ((12,), (6, 8)):
            return x
        width = x.shape[-1] // SHARDS
        return x[..., shard * width : (shard + 1) * width]

    return jax.tree.map(one, tree)


def update_of(row: Row) -> Callable[..., Any]:
    inner = row.make()

    def update(params: Any, state: Any, gradients: Any, value: Any) -> Any:
        extra_args = {"value": value} if row.value else {}
        updates, state = inner.update(gradients, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return update


def trained(row: Row, update: Callable[..., Any], of: Callable[[Any], Any]) -> Any:
    """The parameters and the state after all steps, on ``of`` of every array."""
    params, state = of(START), of(row.make().init(jax.tree.map(jnp.asarray, START)))
    for goal in GOALS:
        # Of the parameters, since some updates are elementwise until they meet their own results.
        gradients = jax.tree.map(lambda p, g: p - g, params, of(goal))
        params, state = update(params, state, gradients, LOSS)
    return jax.device_get((params, state))


def slices_agree(row: Row) -> bool:
    """Whether every shard reaches on its slices what one reaches on whole arrays."""
    update = jax.jit(update_of(row))
    whole = trained(row, update, lambda tree: tree)
    for shard in range(SHARDS):
        try:
            own = trained(row, update, functools.partial(sliced, shard=shard))
        except Exception:  # an optimizer may refuse such shapes in any way
            return False
        ours, theirs = (jax.tree.leaves(tree) for tree in (own, sliced(whole, shard)))
        if [x.shape for x in ours] != [x.shape for x in theirs]:
            return False
        if not all(_close(*pair) for pair in zip(ours, theirs, strict=True)):
            return False
    return True


def _close(got: Any, expected: Any) -> bool:
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, expected = jax.random.key_data(got), jax.random.key_data(expected)
    got, expected = np.float64(got), np.float64(expected)
    scale = np.max(np.abs(expected), initial=1e-6)
    return bool(np.max(np.abs(got - expected), initial=0) <= 1e-5 * scale)


def answer(row: Row) -> str | None:
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), START)
    whole = params, jax.eval_shape(row.make().init, params)
    slices = jax.eval_shape(functools.partial(sliced, shard=0), whole)
    value = jax.ShapeDtypeStruct((), np.float32)
    return why_not_elementwise(update_of(row), (*whole, params, value), (*slices, slices[0], value))


# Refused, though slices agree: what two of them ask of the whole gradient is true of every slice
# here, and a stack has an axis in front of those that are sliced.
CAUTIOUS = {"apply_if_finite", "zero_nans", "a scan that stacks"}
LEFT_OUT = {
    "lookahead": "its parameters are a pair, fast and slow",
    "monitor": "its state has another structure after the first step than before",
    "freeze": "its mask names other parameters",
    "selective_transform": "its mask names other parameters",
}


TRIED = [name for name, row in ROWS.items() if not row.hessian and name not in LEFT_OUT]
FEW = {*SOME[::3], *CAUTIOUS}


# All are trained by tests/step/test_every_optimizer.py.
@pytest.mark.parametrize(
    "name", deep_but(FEW, [name for k, name in enumerate(TRIED) if name in FEW or k % 3 == 0])
)
def test_the_answer_is_what_slices_do(name: str):
    row = ROWS[name]
    assert (answer(row) is None) == (slices_agree(row) and name not in CAUTIOUS)


def leafwise(function: Callable[[Any], Any]) -> Row:
    return Row(lambda: optax.stateless_with_tree_map(lambda g, _: function(g)))


def _in_a_loop(g: Any, n: int, factor: Any) -> Any:
    return lax.fori_loop(0, n, lambda i, c: c * factor(i, c), -g)


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "a custom derivative": (jax.nn.relu, None),
    "a constant everywhere": (lambda g: g - jnp.ones_like(g), None),
    "an optimization barrier": (lambda g: -lax.optimization_barrier(g), None),
    "a branch by a constant": (lambda g: lax.cond(jnp.int32(1) > 0, lambda: -g, lambda: g), None),
    "a branch by a norm": (
        lambda g: lax.cond((g * g).sum() > 4, lambda: -g, lambda: g),
        "a branch that depends on the elements of a parameter",
    ),
    "a branch that mixes": (
        lambda g: lax.switch(jnp.int32(1), [lambda: g, lambda: g - jnp.max(g), lambda: -g]),
        "reduce_max over a full parameter",
    ),
    "a loop that ends by a norm": (
        lambda g: lax.while_loop(lambda c: (c * c).sum() > 1, lambda c: c / 2, g),
        "a loop whose length depends on the elements of a parameter",
    ),
    "a loop that mixes": (
        lambda g: _in_a_loop(g, 3, lambda i, c: jnp.max(c)),
        "reduce_max over a full parameter",
    ),
    "a loop that mixes in its second round": (
        lambda g: lax.fori_loop(0, 2, lambda i, c: (c[0] * c[1], jnp.max(g)), (g, 1.0))[0],
        "reduce_max over a full parameter",
    ),
    "a loop as long as an axis": (
        lambda g: _in_a_loop(g, g.shape[-1], lambda i, c: 0.9),
        "a scan along an axis of a parameter",
    ),
    "a scan that stacks": (
        lambda g: lax.scan(lambda c, x: (c, g * x), 0, jnp.arange(3.0))[1].sum(0),
        "a scan along an axis of a parameter",
    ),
    "a sort": (lambda g: -jnp.sort(g), "sort over a full parameter"),
    "a constant for each place": (
        lambda g: g * np.linspace(0, 1, g.size, dtype=np.float32).reshape(g.shape),
        "a constant with the shape of a parameter",
    ),
    "a number by a typed key": (lambda g: g * jax.random.uniform(KEY), None),
    "noise by a typed key": (
        lambda g: g + jax.random.normal(KEY, g.shape),
        "random_bits creates an array of a parameter's shape",
    ),
    "the number of elements": (
        lambda g: g / g.size,
        "it computes with the shape of a parameter",
    ),
    "a program for large arrays": (
        lambda g: jnp.sin(g) if g.size > 13 else jnp.cos(g),
        "it computes something different on slices of the parameters",
    ),
    "a longer program for large arrays": (
        lambda g: -jnp.sin(g) if g.size > 13 else jnp.sin(g),
        "it computes something different on slices of the parameters",
    ),
    "a refusal of small arrays": (
        lambda g: g / (1 if g.shape in ((12,), (6, 8), (3,)) else [][1]),
        "it cannot be traced on slices of the parameters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_each_gradient(name: str):
    function, reason = FUNCTIONS[name]
    row = leafwise(function)
    said = answer(row)
    assert slices_agree(row) == (reason is None or name in CAUTIOUS)
    assert said is None if reason is None else said is not None and said.startswith(reason)


def test_a_value_taken_from_elsewhere_on_slices_is_found():
    # The same equations in both traces, between other values.
    def chosen(g: Any, p: Any) -> Any:
        return -0.1 * (g + (p if g.size > 13 else g))

    row = Row(lambda: optax.stateless_with_tree_map(chosen))
    said = answer(row)
    assert said is not None
    assert said.startswith("it computes something different on slices")
    assert not slices_agree(row)


def test_state_that_comes_out_whole_is_refused():
    def update(g: Any, state: Any, params: Any = None) -> Any:
        del params
        return g, jax.tree.map(jnp.zeros_like, state)

    row = Row(lambda: optax.GradientTransformation(lambda params: jnp.ones((6, 8)), update))
    assert answer(row) is None

    def shrunk(g: Any, state: Any, params: Any = None) -> Any:
        del params, state
        return g, jnp.zeros((6, 2))

    row = Row(lambda: optax.GradientTransformation(lambda params: jnp.ones((6, 8)), shrunk))
    assert answer(row) == "a new parameter or state array is sliced differently from the old one"


@pytest.mark.parametrize(
    ("name", "maker"), [("clip_by_global_norm",) * 2, ("lamb", "scale_by_trust_ratio")]
)
def test_a_reason_names_the_line_of_the_optimizer(name: str, maker: str):
    # The second time, JAX has traced the norm before, and only its call has a line.
    for _ in range(2):
        said = answer(ROWS[name])
        assert said is not None
        assert said.startswith(f"reduce_sum over a full parameter ({maker}, optax/")


# Slices along an axis: what is found is held against the function on slices.

LAYERS, PARTS = 6, 3
WHOLE = jnp.asarray(np.random.default_rng(5).normal(size=(LAYERS, 4, 5)), jnp.float32)
EYE = jnp.eye(4, dtype=jnp.float32)


def kind_of(function: Callable[[Any], Any]) -> Kind:
    """What the analysis says of a function of a stack."""
    slices = WHOLE[: LAYERS // PARTS]
    jaxprs = [jax.make_jaxpr(function)(x) for x in (WHOLE, slices)]
    (found,) = follow(Slices(of_leaves=True), jaxprs, [Along(0)])
    return found


def orthogonal(x: jax.Array) -> jax.Array:
    """The iteration of Newton and Schulz, as Muon does it."""
    x = x / jnp.linalg.norm(x)

    def turn(_: Any, x: jax.Array) -> jax.Array:
        a = x @ x.T
        return 1.5 * x - 0.5 * a @ x

    return lax.fori_loop(0, 3, turn, x)


# Each with the axis along which its value is then sliced.
KEEPS: dict[str, tuple[Callable[[jax.Array], jax.Array], int]] = {
    "a norm of each layer": (lambda x: x / jnp.sqrt((x**2).sum((1, 2), keepdims=True)), 0),
    "a product that puts layers last": (lambda x: jnp.einsum("ij,ljk->ikl", EYE, x), 2),
    "a transposition": (lambda x: x.transpose(1, 0, 2), 1),
    "products of each layer": (lambda x: jnp.einsum("lij,lkj->lik", x, x), 0),
    "flattened layers": (lambda x: x.reshape(len(x), -1), 0),
    "a part of each layer": (lambda x: x[:, 1:3], 0),
    "padded layers": (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 2))), 0),
    "halves joined": (lambda x: jnp.concatenate([x[:, :2], x[:, 2:]], 2), 0),
    "turned around": (lambda x: x[:, ::-1], 0),
    "a decomposition": (lambda x: jnp.linalg.cholesky(x @ jnp.swapaxes(x, 1, 2) + EYE), 0),
    "one matrix for all": (lambda x: x + jnp.ones(5) * jnp.arange(5.0), 0),
    "a loop over each layer": (jax.vmap(orthogonal), 0),
    "a branch": (lambda x: lax.cond(jnp.float32(1) > 0, jnp.sin, jnp.zeros_like, x), 0),
}
MIXES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a norm of all": lambda x: x / jnp.linalg.norm(x),
    "neighbours": lambda x: x - jnp.roll(x, 1, 0),
    "a running sum": lambda x: jnp.cumsum(x, 0),
    "turned around": lambda x: x[::-1],
    "a product over layers": lambda x: jnp.einsum("lij,lik->jk", x, x),
    "the number of a layer": lambda x: x * jnp.arange(len(x))[:, None, None],
    "their number": lambda x: x / len(x),
    "a scan over layers": lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x)[1],
    "a branch on a layer": lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
    "columns of layers": lambda x: x.reshape(-1, len(x)),
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_keeps_layers_apart_is_found_and_computes_the_same_on_some(name: str):
    function, axis = KEEPS[name]
    assert kind_of(function) == Along(axis)
    number = LAYERS // PARTS
    some = [function(WHOLE[i * number : (i + 1) * number]) for i in range(PARTS)]
    np.testing.assert_allclose(jnp.concatenate(some, axis), function(WHOLE), atol=1e-5)


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_layers_is_refused(name: str):
    assert isinstance(kind_of(MIXES[name]), Mixed)


def test_one_number_at_every_position_is_a_slice_of_any_kind():
    assert Slices(of_leaves=True).join([Slicing.UNIFORM, Along(1)]) == Along(1)
    assert Slices(of_leaves=True).join([Slicing.UNIFORM, Slicing.SAME]) is Slicing.SAME
    assert isinstance(Slices(of_leaves=True).join([Slicing.SAME, Along(0)]), Mixed)
    assert isinstance(Slices(of_leaves=True).join([Along(1), Along(0)]), Mixed)


@pytest.mark.parametrize("kind", ["typed", "raw"])
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_key_in_an_update_that_is_sharded_under_jit(kind: str, momentum: float | None):
    key = jax.random.key(3) if kind == "typed" else jax.random.PRNGKey(3)
    by_number = optax.stateless_with_tree_map(lambda g, _: g * jax.random.uniform(key))
    plain = optax.chain(by_number, optax.sgd(0.1, momentum))
    opt = crossshard.CrossShardOptimizer(plain, weight_update="sharded")
    params, x = {"w": jnp.ones((64, 40))}, np.float32(_rng.normal(size=(3, 8, 64)))

    def loss(params: Any, x: Any) -> Any:
        return (jnp.tanh(x @ params["w"]) ** 2).mean()

    def step(params: Any, state: Any, x: Any, opt: Any, grad: Any) -> Any:
        updates, state = opt.update(grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    mesh = jax.make_mesh((SHARDS,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = opt.state_specs(params, SHARDS)
    on_shards = functools.partial(jax.shard_map, mesh=mesh)
    init = on_shards(opt.init, in_specs=P(), out_specs=specs)
    train = jax.jit(
        on_shards(
            functools.partial(step, opt=opt, grad=crossshard.grad),
            in_specs=(P(), specs, P("shards")),
            out_specs=(P(), specs),
        )
    )
    ours, theirs = (params, init(params)), (params, plain.init(params))
    for rows in x:
        ours, theirs = train(*ours, rows), step(*theirs, rows, plain, jax.grad)
    np.testing.assert_allclose(ours[0]["w"], theirs[0]["w"], atol=1e-6)
