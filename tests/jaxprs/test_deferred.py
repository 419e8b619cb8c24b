"""The evaluator of a jaxpr with deferred inputs: where each is used, and that values stay."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from crossshard.jaxprs.deferred import Deferred, Inside, evaluate
from tests.quick import deep_but

LAYERS = 3
FLOAT = np.dtype(np.float32)
X = np.linspace(-1, 1, 4, dtype=np.float32)
W = np.float32(np.random.default_rng(0).normal(size=(LAYERS, 2, 4, 4)))
ONCE = Inside(LAYERS, 1)


@dataclasses.dataclass(frozen=True)
class Noted(Deferred):
    """An array in a dtype, of which ``note`` writes down where it is used."""

    name: str
    arrays: Any
    dtype: Any = FLOAT
    may_convert: bool = True
    back: Any = None
    # The fewest dimensions of what has rows: a layer has none, though it has a first axis.
    stacked: int = W.ndim
    refs: Any = None

    @property
    def kind(self) -> Any:
        return self.dtype, self.may_convert, self.stacked

    def of(self, arrays: Any, refs: Any) -> "Noted":
        return dataclasses.replace(self, arrays=arrays, refs=refs)

    def used(self) -> jax.Array:
        # Two arrays, so that their slices must stay together.
        found = (self.arrays["x"] + self.arrays["zero"]).astype(self.dtype)
        return found.astype(self.back or self.dtype)

    def in_dtype(self, dtype: Any, *, back: bool = False) -> "Noted | None":
        own = self.dtype if back else None
        new = dataclasses.replace(self, dtype=jnp.dtype(dtype), back=own)
        return new if self.may_convert else None

    def row(self) -> "Noted | None":
        return self if self.arrays["x"].ndim >= self.stacked else None

    def rows(self, number: int) -> "Noted":
        del number
        return self


def noting(uses: list[Any]) -> Any:
    """A ``note`` that adds to this list."""

    def note(name: str, used: Noted, inside: Inside) -> None:
        assert name == used.name == "w"
        uses.append((inside, used.dtype.name, used.arrays["x"].shape))

    return note


def uses_of(function: Any, w: Any = W, **options: Any) -> list[Any]:
    """Where ``function(w, x)`` uses ``w``; its value and its gradient are checked."""
    w = jnp.asarray(w)
    uses: list[Any] = []

    def deferred(w: Any, x: Any) -> Any:
        jaxpr = jax.make_jaxpr(function)(w, x)
        given = Noted("w", {"x": w, "zero": jnp.zeros_like(w)}, w.dtype, **options)
        (found,) = evaluate(jaxpr, [given, x], noting(uses))
        return found

    @jax.jit
    def both(w: Any) -> Any:
        found = []
        for each in (deferred, function):
            summed = lambda w, each=each: (each(w, X).astype(float).sum(), each(w, X))
            found.append(jax.grad(summed, has_aux=True)(w))
        return found

    jax.eval_shape(deferred, w, X)
    noted = list(uses)
    (slope, got), (want_slope, want) = both(w)
    assert got.dtype == want.dtype
    # CPUs that multiply 16 bits round between two operations where XLA fused them, or do not.
    tolerance = 1e-5 if want.dtype == jnp.float32 else 4 * float(jnp.finfo(want.dtype).eps)
    np.testing.assert_allclose(got, want, rtol=tolerance)
    largest = float(jnp.abs(want_slope).max())
    np.testing.assert_allclose(slope, want_slope, rtol=0, atol=tolerance * largest)
    return noted


def turn(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w[0] + h @ w[1]), None


def run(w: Any, x: Any, body: Any = turn, **options: Any) -> Any:
    return lax.scan(body, x, w, **options)[0]


def loop(body: Any) -> Any:
    """A loop over the layers."""
    return lambda w, x: run(w, x, body)


def narrow(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


def stacked(w: Any, x: Any) -> Any:
    h, every = lax.scan(lambda h, v: (turn(h, v)[0], 2 * v), x, w)
    return h + every.sum()


def written_out(w: Any, x: Any) -> Any:
    for layer in range(LAYERS):
        x, _ = turn(x, w[layer])
    return x


def until(w: Any, x: Any) -> Any:
    of = lambda c: (c[0] + 1, turn(c[1], lax.stop_gradient(w)[c[0]])[0])
    return lax.while_loop(lambda c: c[0] < 2, of, (0, X))[1]


@jax.custom_vjp
def tenfold(h: Any, w: Any) -> Any:
    return h @ w[0]


tenfold.defvjp(
    lambda h, w: (tenfold(h, w), (h, w)),
    lambda kept, g: (10 * g @ kept[1][0].T, 10 * jnp.ones_like(kept[1]) * g.sum()),
)


@jax.custom_jvp
def doubled(h: Any, w: Any) -> Any:
    return h @ w[0]


doubled.defjvp(lambda p, t: (doubled(*p), 2 * t[0] @ p[1][0] + 2 * p[0] @ t[1][0]))
inner = lambda h, w: (lax.scan(lambda h, v: (jnp.tanh(h @ v), None), h, w)[0], None)
of_gradient = lambda h, w: (jax.grad(lambda h: turn(h, w)[0].sum())(h) + h, None)
named = lambda h, w: (checkpoint_name(turn(h, w)[0], "h"), None)
saved = jax.checkpoint_policies.save_only_these_names("h")
dots = jax.checkpoint_policies.dots_saveable
convert = lambda w, x: narrow(x) @ narrow(w)[0, 0]
WHERE = jax.sharding.NamedSharding(jax.make_mesh((1,), ("i",)), jax.sharding.PartitionSpec())
SHIFT = jnp.float32(X)
CHECKPOINTED = dataclasses.replace(ONCE, checkpointed=True)
WHOLE = (Inside(), "float32", W.shape)
LAYER, IN_BFLOAT16 = (ONCE, "float32", (2, 4, 4)), (ONCE, "bfloat16", (2, 4, 4))
# Functions of the weights and an input that use all of the weights before anything else.
BEFORE = {
    "the same in each turn of a loop": lambda w, x: lax.scan(
        lambda h, _: (run(w, h), None), x, length=2
    )[0],
    "a constant": lambda w, x: lax.scan(lambda h, i: (turn(h, w[i])[0], None), x, jnp.arange(3))[0],
    "a carry": lambda w, x: lax.scan(
        lambda c, i: ((turn(c[0], c[1][i])[0], 0.5 * c[1]), None), (x, w), jnp.arange(3)
    )[0][0],
    "two of the same": lambda w, x: lax.scan(
        lambda h, p: (turn(h, p[0] + p[1])[0], None), x, (w, w)
    )[0],
    "no turns": lambda w, x: run(w[:0], x) + 0 * w.sum(),
    "two jits": lambda w, x: jax.jit(run)(w, x) + jax.jit(run)(w, 2 * x),
    "a jit with shardings": jax.jit(run, in_shardings=(WHERE, WHERE)),
    "a branch": lambda w, x: lax.cond(x.sum() > 0, lambda w: w[0, 0] @ x, lambda w: w[1, 1] @ x, w),
    "a while loop": until,
    "a gradient of all": lambda w, x: run(w, x) + jax.grad(lambda x: run(w, x).sum())(x) ** 2,
    "captured arrays": lambda w, x: run(w, x) + jax.jit(lambda w: SHIFT * w.sum())(w),
    "uneven slices": lambda w, x: (w[::2] * x).sum() + (w[0] * x).sum(),
    "parts of rows": lambda w, x: (w[:1, :1] * x).sum() + (w[1:, 1:] * x).sum(),
    "one reader converts": lambda w, x: convert(w, x).sum() + w.sum(),
    "another reader converts": lambda w, x: w.sum() + convert(w, x).sum(),
    "two dtypes": lambda w, x: (
        (x.astype(jnp.float16) @ w.astype(jnp.float16)[0, 0]).sum() + narrow(w).sum()
    ),
}
# Those that use each layer in its turn.
IN_TURN = {
    "a loop": run,
    "a loop in reverse": functools.partial(run, reverse=True),
    "two turns at once": functools.partial(run, unroll=2),
    "a transpose apart": functools.partial(run, _split_transpose=True),
    "what a loop stacks": stacked,
    "a row that is read twice": loop(lambda h, w: (turn(h, w)[0] + (w**2).sum(), None)),
    "a jit in a loop": loop(jax.jit(turn)),
    "a jit in a jit": jax.jit(jax.jit(run)),
    "a derivative backwards": loop(lambda h, w: (jnp.tanh(tenfold(h, w)), None)),
    "a derivative forwards": loop(lambda h, w: (jnp.tanh(doubled(h, w)), None)),
    "a gradient in a turn": loop(of_gradient),
}
# Each with where it uses them, and options of the weights.
USES: dict[str, tuple[Any, ...]] = {
    **{name: (function, [WHOLE]) for name, function in BEFORE.items()},
    **{name: (function, [LAYER]) for name, function in IN_TURN.items()},
    "a loop in a loop": (
        loop(inner),
        [(Inside(2 * LAYERS, 2), "float32", (4, 4))],
        {"stacked": 3},
    ),
    "no rows": (run, [WHOLE], {"stacked": 9}),
    "rows that are not read": (loop(lambda h, _: (0.5 * h, None)), []),
    "a checkpoint in a loop": (loop(jax.checkpoint(named)), [CHECKPOINTED]),
    "a policy in a loop": (loop(jax.checkpoint(named, policy=saved)), [CHECKPOINTED]),
    "a checkpoint around a loop": (jax.checkpoint(run), [CHECKPOINTED]),
    "a policy around a loop": (jax.checkpoint(run, policy=dots), [CHECKPOINTED]),
    "a checkpoint alone": (
        jax.checkpoint(lambda w, x: turn(x, w[0])[0]),
        [Inside(checkpointed=True)],
    ),
    "nothing": (lambda w, x: 2 * x, []),
    "nothing in a jit": (lambda w, x: jax.jit(lambda w, x: 2 * x)(w, x), []),
    "layers": (written_out, [(Inside(), "float32", W.shape[1:])] * LAYERS),
    "two slices": (
        lambda w, x: (w[1:] * x).sum() + (w[:1] * x).sum(),
        [(Inside(), "float32", (n, *W.shape[1:])) for n in (LAYERS - 1, 1)],
    ),
    "converted before": (lambda w, x: run(narrow(w), narrow(x)), [IN_BFLOAT16]),
    "converted in a turn": (
        lambda w, x: run(w, narrow(x), lambda h, w: turn(h, narrow(w))),
        [IN_BFLOAT16],
    ),
    "all readers convert": (
        lambda w, x: convert(w, x) + convert(w, 2 * x),
        [(Inside(), "bfloat16", W.shape)],
    ),
    "all readers in a turn convert": (
        lambda w, x: run(w, narrow(x), lambda h, w: (turn(h, narrow(w)[:2])[0], None)),
        [IN_BFLOAT16],
    ),
    "no conversion": (convert, [WHOLE], {"may_convert": False}),
    "no conversion of two": (
        lambda w, x: convert(w, x) + convert(w, 2 * x),
        [WHOLE],
        {"may_convert": False},
    ),
}


# Programs that take long to compile, each like another one.
SLOW = [
    *("a gradient of all", "the same in each turn of a loop", "two turns at once", "two jits"),
    *("a transpose apart", "what a loop stacks", "a policy around a loop", "a policy in a loop"),
    *("converted in a turn", "all readers in a turn convert", "a gradient in a turn"),
]


@pytest.mark.parametrize("name", deep_but(lambda name: name not in SLOW, USES))
def test_weights_are_used_where_they_are_read(name: str):
    function, expected, *options = USES[name]
    found = uses_of(function, **(options[0] if options else {}))
    assert [
        each[0] if isinstance(want, Inside) else each
        for each, want in zip(found, expected, strict=True)
    ] == expected


# What the new jaxpr keeps of the old one.


def again(jaxpr: Any, note: Any = lambda name, used, inside: None) -> Any:
    """The same function of the weights and an input, with the weights deferred."""
    return lambda w, x: evaluate(jaxpr, [noted("w", w), x], note)


def noted(name: Any, w: Any) -> Noted:
    return Noted(name, {"x": w, "zero": 0 * w}, jnp.asarray(w).dtype)


@pytest.mark.parametrize(("number", "back"), [(2, None), (3, FLOAT)])
def test_gradients_of_more_than_two_uses_add_up_in_the_dtype_of_the_input(number: int, back: Any):
    half, used = lambda x: x.astype(jnp.bfloat16), []
    function = lambda w, x: sum(half(x) @ half(w) for _ in range(number))
    jaxpr = jax.make_jaxpr(function)(W[0, 0], X)
    note = lambda name, each, inside: used.append((each.dtype.name, each.back))
    evaluate(jaxpr, [noted("w", W[0, 0]), jnp.asarray(X)], note)
    assert used == [("bfloat16", back)]


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (functools.partial(run, reverse=True), "reverse unroll _split_transpose length"),
        (functools.partial(run, unroll=2), "reverse unroll _split_transpose length"),
        (
            jax.checkpoint(lambda w, x: turn(x, w[0])[0], policy=dots, prevent_cse=False),
            "policy prevent_cse",
        ),
    ],
    ids=["reverse", "unroll", "checkpoint"],
)
def test_parameters_are_kept(function: Any, kept: str):
    jaxpr = jax.make_jaxpr(function)(W, X)
    before, after = (
        next(e.params for e in each.eqns if kept.split()[0] in e.params)
        for each in (jaxpr, jax.make_jaxpr(again(jaxpr))(W, X))
    )
    # Not each version of JAX writes all of them into the jaxpr.
    assert len(before) == len(after)
    for name in set(kept.split()) & before.keys():
        assert before[name] == after[name]


def test_a_weak_type_stays_weak():
    how = {"new_dtype": np.dtype(np.float32), "weak_type": True, "sharding": None}
    weak = lambda w: lax.convert_element_type_p.bind(w, **how)
    w = jnp.bfloat16(2)
    uses: list[Any] = []
    (found,) = evaluate(jax.make_jaxpr(weak)(w), [noted("w", w)], noting(uses))
    assert found.aval == weak(w).aval
    assert found.weak_type
    assert len(uses) == 1


def test_an_output_is_an_array_and_a_literal_stays():
    jaxpr = jax.make_jaxpr(lambda w, x: (run(w, x), w, 2.5, w[0], x, 7))(W, X)
    uses: list[Any] = []
    found = again(jaxpr, noting(uses))(W, X)
    assert [np.shape(each) for each in found] == [(4,), W.shape, (), W[0].shape, X.shape, ()]
    assert (float(found[2]), int(found[5])) == (2.5, 7)
    assert uses == [(Inside(), "float32", W.shape)]
    np.testing.assert_array_equal(found[1], W)


@pytest.mark.parametrize("number", [1, 2])
def test_an_output_is_the_array_though_all_who_read_it_convert_it(number: int):
    read = lambda w, x: [x @ w.astype(jnp.bfloat16)[0, 0] for _ in range(number)]
    uses: list[Any] = []
    jaxpr = jax.make_jaxpr(lambda w, x: (*read(w, x), w))(W, X)
    *_, found = again(jaxpr, noting(uses))(W, X)
    np.testing.assert_array_equal(found, W, strict=True)
    assert uses == [(Inside(), "float32", W.shape)]


POLICIES = [(None, True), (None, True), (jax.checkpoint_policies.everything_saveable, True)]
POLICIES += [(None, False)]


def test_equal_layers_of_weights_of_other_kinds_have_traces_of_their_own():
    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        return sum(x @ w.astype(jnp.bfloat16)[0] for _ in range(2))

    first, second = noted("a", W[0]), dataclasses.replace(noted("b", W[1]), may_convert=False)
    jaxpr, used = jax.make_jaxpr(lambda a, b, x: layer(layer(x, a), b))(W[0], W[1], X), []
    note = lambda name, used_as, inside: used.append((name, used_as.dtype.name))
    evaluate(jaxpr, [first, second, X], note)
    assert used == [("a", "bfloat16"), ("b", "float32")]


def test_equal_layers_under_a_checkpoint_are_each_noted_and_keep_their_policies():
    ws, noted_names = list(jnp.concatenate([W, W])[: len(POLICIES)]), list[Any]()
    note = lambda name, used, inside: noted_names.append((name, inside.checkpointed))
    layer = lambda h, w: turn(h, w)[0]

    def function(ws: Any, x: Any) -> Any:
        for each, (policy, prevent_cse) in zip(ws, POLICIES, strict=True):
            x = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)(x, each)
        return x

    def deferred(ws: Any, x: Any) -> Any:
        given = [noted(name, each) for name, each in enumerate(ws)]
        return evaluate(jax.make_jaxpr(function)(ws, x), [*given, x], note)[0]

    jaxpr = jax.make_jaxpr(deferred)(ws, X)
    assert noted_names == [(name, True) for name in range(len(ws))]
    found = [each.params for each in jaxpr.eqns if "policy" in each.params]
    assert [(each["policy"], each["prevent_cse"]) for each in found] == POLICIES
    assert found[0]["jaxpr"] is found[1]["jaxpr"]
    np.testing.assert_allclose(deferred(ws, X), function(ws, X), rtol=1e-6)


def test_rows_of_one_and_of_two_inputs_share_no_trace():
    block = jax.checkpoint(lambda h, v, w: jnp.tanh(h @ v[0] + h @ w[0]))
    w, noted_names = jnp.asarray(W), list[Any]()
    note = lambda name, used, inside: noted_names.append(name)

    def function(one: Any, two: Any, three: Any, x: Any) -> Any:
        return block(block(x, one[0], one[1]), two[0], three[0])

    given = [noted(name, w) for name in range(3)]
    (found,) = evaluate(jax.make_jaxpr(function)(w, w, w, X), [*given, X], note)
    assert noted_names == [0, 0, 1, 2]
    np.testing.assert_allclose(found, function(w, w, w, X), rtol=1e-6)


def test_side_effects_and_names_stay():
    seen: list[float] = []

    def body(h: Any, w: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x)), h.sum())
        return turn(h, w)

    def function(w: Any, x: Any) -> Any:
        with jax.named_scope("readout"):
            return run(w, x, body)

    again_named = again(jax.make_jaxpr(function)(W, X))
    again_named(jnp.asarray(W), X)
    jax.effects_barrier()
    assert len(seen) == LAYERS
    assert "readout" in jax.jit(again_named).lower(W, X).as_text(debug_info=True)
