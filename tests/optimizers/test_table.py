"""Every rule of the table: shards step as one shard does on the whole batch, by plain Optax."""

import functools
from collections.abc import Callable, Collection
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
    SCALES,
    SOME,
    Row,
    public_factories,
)

# What Optax advises against is still in Optax, and people still train with it.
pytestmark = pytest.mark.filterwarnings("ignore:.*use `optimistic_adam_v2`:DeprecationWarning")

AXIS = "shards"
SHARDS = 8
STEPS = 6
BATCH = 16
GROUPS = {"neighbours": [[0, 1, 2, 3], [4, 5, 6, 7]], "interleaved": [[0, 2, 4, 6], [1, 3, 5, 7]]}
ALL = tuple(range(SHARDS))

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
START = {"bias": np.float32(_rng.normal(size=4)), "kernel": np.float32(_rng.normal(size=(3, 4)))}


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


# Rules are compiled several at a time, which takes half as long as each for itself.
BUNDLES = [
    tuple(names[i : i + 8])
    for names in (SOME, [name for name in ROWS if name not in SOME])
    for i in range(0, len(names), 8)
]
BUNDLE_OF = {name: bundle for bundle in BUNDLES for name in bundle}


def bundles(of: Collection[str], *more: Any, quick: Collection[str]) -> list[Any]:
    """Parameters of a test: the rules, in bundles, of which `make test` has what begins quick."""
    found = []
    for bundle in BUNDLES:
        names = tuple(name for name in bundle if name in of)
        marks = [pytest.mark.deep] if names and names[0] not in quick else []
        text = "-".join([*map(str, more), f"{names[0]} and {len(names) - 1} more"]) if names else ""
        found += [pytest.param(names, *more, id=text, marks=marks)] if names else []
    return found


@functools.cache
def plain_step(bundle: tuple[str, ...]) -> Callable[..., Any]:
    rules = {name: ROWS[name].make() for name in bundle}

    def of_one(name: str, params: Any, state: Any, x: Any, y: Any, factor: Any) -> tuple[Any, Any]:
        def objective(params: Any) -> jax.Array:
            return factor * loss(params, x, y)

        value, gradients = jax.value_and_grad(objective)(weights(params))
        given = extras(ROWS[name], value, objective)
        updates, state = rules[name].update(gradients, state, params, **given)
        return optax.apply_updates(params, updates), state

    return jax.jit(
        lambda now, *data: {name: of_one(name, *each, *data) for name, each in now.items()}
    )


@functools.cache
def plain_bundle(bundle: tuple[str, ...], shards: tuple[int, ...], factor: float) -> dict[str, Any]:
    rows = np.arange(BATCH).reshape(SHARDS, -1)[list(shards)].ravel()
    # Given twice they have the same mean, and one shape for all means that one program does.
    rows = np.tile(rows, SHARDS // len(shards))
    now = {name: start(ROWS[name]) for name in bundle}
    for x, y in zip(X, Y, strict=True):
        now = plain_step(bundle)(now, x[rows], y[rows], np.float32(factor))
    return jax.device_get(now)


def plain(name: str, shards: tuple[int, ...] = ALL, factor: float = 1.0) -> Any:
    """The parameters and the state that plain Optax reaches on the rows of these shards of 8."""
    return plain_bundle(BUNDLE_OF[name], shards, factor)[name]


def sharded_step(name: str, mesh: Any, reduction: str, groups: Any) -> Callable[..., Any]:
    """A step by ``update`` under ``shard_map``; with groups every leaf is ``[shards, …]``."""
    row = ROWS[name]
    opt = crossshard.CrossShardOptimizer(row.make(), reduction, group_assignment=groups)
    over = jax.lax.pmean if reduction == "mean" else jax.lax.psum
    own = P() if groups is None else P(AXIS)

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

    return step


def sharded(
    names: tuple[str, ...],
    number: int = SHARDS,
    reduction: str = "mean",
    groups: list[list[int]] | None = None,
) -> dict[str, Any]:
    """By rule the parameters and the state after all steps, of all rules in one program."""
    mesh = jax.sharding.Mesh(jax.devices()[:number], (AXIS,))
    steps = {name: sharded_step(name, mesh, reduction, groups) for name in names}
    together = jax.jit(lambda now, *data: {name: steps[name](*now[name], *data) for name in now})
    now = {name: start(ROWS[name]) for name in names}
    if groups is not None:
        now = jax.tree.map(lambda leaf: jnp.stack([leaf] * number), now)
    # Where the step leaves them, or its second call would compile it again.
    place = jax.sharding.NamedSharding(mesh, P() if groups is None else P(AXIS))
    now = jax.device_put(now, place)
    for x, y in zip(X, Y, strict=True):
        now = together(now, x, y)
    return jax.device_get(now)


def stateful(names: tuple[str, ...]) -> dict[str, Any]:
    """The same by ``compute_gradients`` and ``apply_gradients`` under ``crossshard.shard``."""
    opts = {name: crossshard.CrossShardOptimizer(ROWS[name].make()) for name in names}
    variables = {
        name: {key: nnx.Param(jnp.asarray(value), name=key) for key, value in START.items()}
        for name in names
    }

    @crossshard.shard(num_shards=SHARDS)
    def step(variables: Any, opts: Any, x: Any, y: Any) -> None:
        for name, opt in opts.items():
            own = variables[name]
            of_own = lambda own=own: loss({key: v[...] for key, v in own.items()}, x, y)
            pairs = opt.compute_gradients(of_own, var_list=list(own.values()))
            opt.apply_gradients(pairs, **({"value": of_own()} if ROWS[name].value else {}))

    for x, y in zip(X, Y, strict=True):
        step(variables, opts, x, y)
    reached = {
        name: ({key: v[...] for key, v in variables[name].items()}, opts[name].state)
        for name in names
    }
    return jax.device_get(reached)


def faults(got: Any, want: Any) -> str:
    """What is wrong, unless parameters are equal within 1e-5, and states within 1e-4.

    States have squares of gradients, and differences of parameters that are close to each other.
    They tell what the parameters of Adam and its kin do not: how large the gradient was.
    """
    (params, state), (plain_params, plain_state) = got, want
    if not max(errors(plain_params, start_like(plain_params)).values()) > 1e-2:
        return "it has to move"
    off = {f"params{k}": e for k, e in errors(params, plain_params).items() if not e <= 1e-5}
    off |= {f"state{k}": e for k, e in errors(state, plain_state).items() if not e <= 1e-4}
    return f"off by {off}" if off else ""


def assert_all_follow(got: dict[str, Any], want: Callable[[str], Any]) -> None:
    assert got
    assert {name: fault for name in got if (fault := faults(got[name], want(name)))} == {}


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
    in_table |= SCALES
    public = set(public_factories())
    assert public - in_table - set(LEFT_OUT) == set(), "new in Optax: add a row or a reason"
    assert set(LEFT_OUT) - public == set(), "left out, and not there"
    assert in_table & set(LEFT_OUT) == set()
    assert len(OPTIMIZERS) >= 50
    assert set(SOME) <= set(ROWS)


def test_the_shards_differ_so_much_that_none_passes_for_another() -> None:
    whole, _ = plain("sgd")
    for part in [
        *([shard] for shard in range(SHARDS)),
        *GROUPS["neighbours"],
        *GROUPS["interleaved"],
    ]:
        assert max(errors(plain("sgd", tuple(part))[0], whole).values()) > 1e-2, part


STATEFUL = {name for name, row in ROWS.items() if not row.not_stateful}


@pytest.mark.parametrize(
    ("names", "number"),
    [
        *bundles(ROWS, 8, quick=ROWS),
        *bundles(ROWS, 2, quick=SOME[:1]),
        *bundles(OPTIMIZERS, 1, quick=()),
        *bundles(OPTIMIZERS, 4, quick=()),
    ],
)
def test_shards_equal_one_shard_on_the_whole_batch(names: tuple[str, ...], number: int) -> None:
    assert_all_follow(sharded(names, number), plain)


@pytest.mark.parametrize(
    ("names", "groups", "reduction"),
    [
        *bundles({n for n in ROWS if not ROWS[n].hessian}, "interleaved", "sum", quick=SOME[:1]),
        *bundles({n for n in OPTIMIZERS if not ROWS[n].hessian}, "neighbours", "mean", quick=()),
    ],
)
def test_each_group_equals_one_shard_on_its_own_rows(
    names: tuple[str, ...], groups: str, reduction: str
) -> None:
    got = sharded(names, SHARDS, reduction, GROUPS[groups])
    for group in GROUPS[groups]:
        factor = 1.0 if reduction == "mean" else float(len(group))
        for shard in group:
            assert_all_follow(
                jax.tree.map(lambda leaf, shard=shard: leaf[shard], got),
                lambda name, group=group, factor=factor: plain(name, tuple(group), factor),
            )


@pytest.mark.parametrize("names", bundles(STATEFUL, quick=SOME[:1]))
def test_the_stateful_idiom_equals_one_shard_on_the_whole_batch(names: tuple[str, ...]) -> None:
    assert_all_follow(stateful(names), plain)
