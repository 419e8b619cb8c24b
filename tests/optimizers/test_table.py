"""Every rule of the table: shards step as one shard does on the whole batch, by plain Optax."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import crossshard
from tests.optimizers.table import (
    LEFT_OUT,
    OPTIMIZERS,
    ROWS,
    TRANSFORMS,
    Row,
    public_factories,
)

# What Optax advises against is still in Optax, and people still train with it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:inject_stateful_hyperparams:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*use `optimistic_adam_v2`:DeprecationWarning"),
]

AXIS = "shards"
SHARDS = 8
STEPS = 6
BATCH = 16
GROUPS = {
    "neighbours": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "interleaved": [[0, 2, 4, 6], [1, 3, 5, 7]],
}

# The least that XLA can do to a program: it is the arithmetic that is compared, and there are a
# thousand programs to compile.
_LEAST = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def _knows(option: str) -> bool:
    try:
        jax.jit(jnp.negative, compiler_options={option: _LEAST[option]})(0.0)
    except jax.errors.JaxRuntimeError:  # another XLA, without it
        return False
    return True


@functools.cache
def quickly() -> dict[str, Any]:
    """Compiler options to compile with little effort, of those that this XLA knows."""
    return {option: value for option, value in _LEAST.items() if _knows(option)}


# Of a thousand seeds, one under which rules do not magnify rounding: a change of the start by one
# part in ten million is at most six in the end (in float64, for the 19 most sensitive rules),
# and no gradient has a component so near zero that a rule that normalises it, or takes its sign,
# would see another one.
_rng = np.random.default_rng(425)
# What each shard sees is shifted and stretched, so that no shard's gradient passes for the mean.
_shift = np.linspace(-1.0, 1.0, BATCH)[:, None]
X = np.float32(_rng.normal(size=(STEPS, BATCH, 3)) * (1.5 + _shift) + _shift)
Y = np.float32(_rng.normal(size=(STEPS, BATCH, 2)) + 2 * _shift)
READOUT = np.float32(_rng.normal(size=(4, 2)) / 2)
START = {
    "bias": np.float32(_rng.normal(size=4)),
    "kernel": np.float32(_rng.normal(size=(3, 4))),
}


def loss(params: Any, x: Any, y: Any) -> jax.Array:
    hidden = jnp.tanh(x @ params["kernel"] + params["bias"])
    return jnp.mean((hidden @ READOUT - y) ** 2)


def start(row: Row) -> tuple[Any, Any]:
    """The parameters and the state to start from, in plain Optax."""
    params: Any = jax.tree.map(jnp.asarray, START)
    if row is ROWS["lookahead"]:
        params = optax.LookaheadParams.init_synced(params)
    return params, row.make().init(params)


def weights(params: Any) -> Any:
    """What the loss is differentiated by: of lookahead's parameters the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def extras(row: Row, value: jax.Array, objective: Callable[[Any], jax.Array]) -> dict[str, Any]:
    given = {"value": value} if row.value else {}
    return given | ({"obj_fn": objective} if row.hessian else {})


@functools.cache
def plain_step(name: str) -> Callable[..., tuple[Any, Any]]:
    row = ROWS[name]
    opt = row.make()

    @functools.partial(jax.jit, compiler_options=quickly())
    def step(params: Any, state: Any, x: Any, y: Any, factor: Any) -> tuple[Any, Any]:
        def objective(params: Any) -> jax.Array:
            return factor * loss(params, x, y)

        value, gradients = jax.value_and_grad(objective)(weights(params))
        given = extras(row, value, objective)
        updates, state = opt.update(gradients, state, params, **given)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def plain(name: str, shards: tuple[int, ...] = tuple(range(SHARDS)), factor: float = 1.0) -> Any:
    """The parameters and the state that plain Optax reaches on the rows of these shards of 8."""
    rows = np.arange(BATCH).reshape(SHARDS, -1)[list(shards)].ravel()
    # Given twice they have the same mean, and one shape for all means that one program does.
    rows = np.tile(rows, SHARDS // len(shards))
    params, state = start(ROWS[name])
    for x, y in zip(X, Y, strict=True):
        params, state = plain_step(name)(params, state, x[rows], y[rows], np.float32(factor))
    return jax.device_get((params, state))


def sharded(
    name: str, number: int, reduction: str = "mean", groups: list[list[int]] | None = None
) -> Any:
    """The same by ``update`` under ``shard_map``; with groups every leaf is ``[shards, …]``."""
    row = ROWS[name]
    opt = crossshard.CrossShardOptimizer(row.make(), reduction, group_assignment=groups)
    mesh = jax.sharding.Mesh(jax.devices()[:number], (AXIS,))
    over = jax.lax.pmean if reduction == "mean" else jax.lax.psum
    own = P() if groups is None else P(AXIS)

    @functools.partial(jax.jit, compiler_options=quickly())
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(own, own, P(AXIS), P(AXIS)),
        out_specs=(own, own),
        check_vma=groups is None or not row.untyped_groups,
    )
    def step(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        if groups is not None:
            params, state = jax.tree.map(lambda leaf: leaf[0], (params, state))

        def objective(params: Any) -> jax.Array:
            # A function cannot be reduced after the fact: Optax wants it to be the whole loss.
            return over(loss(params, x, y), AXIS)

        value, gradients = crossshard.value_and_grad(loss)(weights(params), x, y)
        given = extras(row, value, objective)
        ours = crossshard.CrossShardState(inner_state=state)
        updates, ours = opt.update(gradients, ours, params, **given)
        stepped = optax.apply_updates(params, updates), ours.inner_state
        return stepped if groups is None else jax.tree.map(lambda leaf: leaf[None], stepped)

    begin = start(row)
    if groups is not None:
        begin = jax.tree.map(lambda leaf: jnp.stack([leaf] * number), begin)
    # Where the step leaves them, or its second call would compile it again.
    params, state = jax.device_put(begin, jax.sharding.NamedSharding(mesh, own))
    for x, y in zip(X, Y, strict=True):
        params, state = step(params, state, x, y)
    return jax.device_get((params, state))


def stateful(name: str) -> Any:
    """The same by ``compute_gradients`` and ``apply_gradients`` under ``crossshard.shard``."""
    row = ROWS[name]
    opt = crossshard.CrossShardOptimizer(row.make())
    variables = {key: nnx.Param(jnp.asarray(value), name=key) for key, value in START.items()}

    @crossshard.shard(num_shards=SHARDS)
    def step(x: Any, y: Any) -> jax.Array:
        pairs = opt.compute_gradients(
            lambda: loss({key: v[...] for key, v in variables.items()}, x, y),
            var_list=list(variables.values()),
        )
        value = loss({key: v[...] for key, v in variables.items()}, x, y)
        opt.apply_gradients(pairs, **({"value": value} if row.value else {}))
        return value

    for x, y in zip(X, Y, strict=True):
        step(x, y)
    return jax.device_get(({key: v[...] for key, v in variables.items()}, opt.state))


def follows(got: Any, want: Any) -> None:
    """Assert that parameters are equal within 1e-5, and states within 1e-4.

    States have squares of gradients, and differences of parameters that are close to each other.
    They tell what the parameters of Adam and its kin do not: how large the gradient was.
    """
    (params, state), (plain_params, plain_state) = got, want
    assert max(errors(plain_params, start_like(plain_params)).values()) > 1e-2, "it has to move"
    off = {k: e for k, e in errors(params, plain_params).items() if not e <= 1e-5}
    assert not off, f"parameters are off by {off}"
    off = {k: e for k, e in errors(state, plain_state).items() if not e <= 1e-4}
    assert not off, f"the state is off by {off}"


def start_like(params: Any) -> Any:
    synced = optax.LookaheadParams.init_synced
    return synced(START) if isinstance(params, optax.LookaheadParams) else START


def errors(got: Any, want: Any) -> dict[str, float]:
    """By leaf how far ``got`` is from ``want``, relative to the largest number of the leaf."""
    have = jax.tree.leaves(got)
    expected = jax.tree_util.tree_flatten_with_path(want)[0]
    assert len(have) == len(expected)
    return {
        jax.tree_util.keystr(path): _error(a, b)
        for a, (path, b) in zip(have, expected, strict=True)
    }


def _error(a: Any, b: Any) -> float:
    if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if not np.issubdtype(b.dtype, np.inexact):
        return 0.0 if np.array_equal(a, b) else np.inf
    if not np.isfinite(b).all():
        return 0.0 if np.array_equal(a, b) else np.inf
    return float(np.abs(a - b).max(initial=0) / (np.abs(b).max(initial=0) or 1))


def test_every_public_factory_is_in_the_table_or_left_out_for_a_reason() -> None:
    in_table = {name.split(" ")[0] for name in ROWS}.union(*(row.covers for row in ROWS.values()))
    public = set(public_factories())
    assert public - in_table - set(LEFT_OUT) == set(), "new in Optax: add a row or a reason"
    assert set(LEFT_OUT) - public == set(), "left out, and not there"
    assert in_table & set(LEFT_OUT) == set()
    assert len(OPTIMIZERS) >= 50


def test_the_shards_differ_so_much_that_none_passes_for_another() -> None:
    whole, _ = plain("sgd")
    for part in [
        *([shard] for shard in range(SHARDS)),
        *GROUPS["neighbours"],
        *GROUPS["interleaved"],
    ]:
        assert max(errors(plain("sgd", tuple(part))[0], whole).values()) > 1e-2, part


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name in OPTIMIZERS for number in (1, 2, 4, 8)]
    + [(name, number) for name in TRANSFORMS for number in (2, 8)],
)
def test_shards_equal_one_shard_on_the_whole_batch(name: str, number: int) -> None:
    follows(sharded(name, number), plain(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sum_equals_the_summed_gradient(name: str) -> None:
    follows(sharded(name, SHARDS, "sum"), plain(name, factor=SHARDS))


@pytest.mark.parametrize(
    ("name", "groups", "reduction"),
    [(name, "interleaved", "sum") for name, row in ROWS.items() if not row.hessian]
    + [(name, "neighbours", "mean") for name, row in OPTIMIZERS.items() if not row.hessian],
)
def test_each_group_equals_one_shard_on_its_own_rows(
    name: str, groups: str, reduction: str
) -> None:
    got = sharded(name, SHARDS, reduction, GROUPS[groups])
    for group in GROUPS[groups]:
        want = plain(name, tuple(group), 1.0 if reduction == "mean" else len(group))
        for shard in group:
            follows(jax.tree.map(lambda leaf, shard=shard: leaf[shard], got), want)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, row in ROWS.items()
        # What only scales is in an optimizer above, with the same state.
        if not row.not_stateful and not name.removeprefix("contrib.").startswith("scale_by_")
    ],
)
def test_the_stateful_idiom_equals_one_shard_on_the_whole_batch(name: str) -> None:
    follows(stateful(name), plain(name))


@pytest.mark.parametrize(
    "wrap",
    [lambda opt: opt, optax.contrib.split_real_and_imaginary],
    ids=["whole", "split"],
)
@pytest.mark.parametrize("opt", [optax.sgd(0.1), optax.adam(0.05)], ids=["sgd", "adam"])
def test_complex_parameters(opt: Any, wrap: Callable[[Any], Any]) -> None:
    opt = wrap(opt)
    params = {"w": jnp.asarray(START["kernel"] + 1j * START["kernel"][::-1])}

    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        return jnp.mean(jnp.abs(x @ params["w"] @ READOUT - y) ** 2)

    def stepped(gradients: Any, params: Any, state: Any, update: Any) -> tuple[Any, Any]:
        # In JAX the direction of descent is the conjugate of the gradient.
        updates, state = update(jax.tree.map(jnp.conj, gradients), state, params)
        return optax.apply_updates(params, updates), state

    def whole(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        return stepped(jax.grad(loss)(params, x, y), params, state, opt.update)

    @functools.partial(
        jax.shard_map,
        mesh=jax.sharding.Mesh(jax.devices(), (AXIS,)),
        in_specs=(P(), P(), P(AXIS), P(AXIS)),
        out_specs=P(),
    )
    def parts(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        update = crossshard.CrossShardOptimizer(opt).update
        ours = crossshard.CrossShardState(inner_state=state)
        params, ours = stepped(crossshard.grad(loss)(params, x, y), params, ours, update)
        return params, ours.inner_state

    reached = []
    for step in (whole, parts):
        now = params, opt.init(params)
        for x, y in zip(X, Y, strict=True):
            now = jax.jit(step, compiler_options=quickly())(*now, x, y)
        reached.append(jax.device_get(now))
    assert max(errors(reached[0][0], jax.device_get(params)).values()) > 1e-2
    assert all(error <= 1e-5 for error in errors(reached[1], reached[0]).values())
