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
    # The fewest dimensions of what has rows: a layer has none, though it has a first axis.
    stacked: int = W.ndim

    @property
    def kind(self) -> Any:
        return self.dtype, self.may_convert, self.stacked

    def of(self, arrays: Any) -> "Noted":
        return dataclasses.replace(self, arrays=arrays)

    def used(self) -> jax.Array:
        # Two arrays, so that their slices must stay together.
        return (self.arrays["x"] + self.arrays["zero"]).astype(self.dtype)

    def in_dtype(self, dtype: Any) -> "Noted | None":
        return dataclasses.replace(self, dtype=jnp.dtype(dtype)) if self.may_convert else None

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


def inside(function: Any, w: Any = W, **options: Any) -> list[Inside]:
    return [each for each, *_ in uses_of(function, w, **options)]


def turn(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w[0] + h @ w[1]), None


def run(w: Any, x: Any, body: Any = turn, **options: Any) -> Any:
    return lax.scan(body, x, w, **options)[0]


# In loops.


@pytest.mark.parametrize(
    "options",
    [{}, {"reverse": True}, {"unroll": 2}, {"unroll": True}, {"_split_transpose": True}],
    ids=str,
)
def test_a_row_is_used_in_its_turn(options: Any):
    found = uses_of(functools.partial(run, **options))
    assert found == [(ONCE, "float32", (2, 4, 4))]


def test_the_options_of_a_scan_are_kept():
    for options in ({"reverse": True}, {"unroll": 2}, {"_split_transpose": True}):
        jaxpr = jax.make_jaxpr(functools.partial(run, **options))(W, X)

        def again(w: Any, x: Any, jaxpr: Any = jaxpr) -> Any:
            return evaluate(jaxpr, [Noted("w", {"x": w, "zero": 0 * w}), x])

        found = jax.make_jaxpr(again)(W, X)
        params = [
            next(e for e in each.eqns if e.primitive.name == "scan").params
            for each in (jaxpr, found)
        ]
        # Not each version of JAX writes all of them into the jaxpr.
        for name in {"reverse", "unroll", "_split_transpose", "length"} & params[0].keys():
            assert params[0][name] == params[1][name]
        assert len(params[0]) == len(params[1])


def test_loops_within_loops_take_rows_of_rows():
    inner = lambda h, w: (lax.scan(lambda h, v: (jnp.tanh(h @ v), None), h, w)[0], None)
    found = uses_of(lambda w, x: run(w, x, inner), stacked=3)
    assert found == [(Inside(2 * LAYERS, 2), "float32", (4, 4))]


def test_a_loop_over_the_same_weights_in_a_loop_uses_them_before_both():
    outer = lambda w, x: lax.scan(lambda h, _: (run(w, h), None), x, length=2)[0]
    assert inside(outer) == [Inside()]


def test_the_constants_and_the_carry_of_a_loop_are_used_before_it():
    constant = lambda w, x: lax.scan(lambda h, i: (turn(h, w[i])[0], None), x, jnp.arange(3))[0]
    carried = lambda w, x: lax.scan(
        lambda c, i: ((turn(c[0], c[1][i])[0], 0.5 * c[1]), None), (x, w), jnp.arange(3)
    )[0][0]
    assert inside(constant) == [Inside()]
    assert inside(carried) == [Inside()]


def test_what_has_no_rows_is_used_before_the_loop():
    assert inside(run, stacked=9) == [Inside()]


def test_a_loop_over_two_of_the_same_uses_it_before():
    both = lambda w, x: lax.scan(lambda h, p: (turn(h, p[0] + p[1])[0], None), x, (w, w))[0]
    assert inside(both) == [Inside()]


def test_a_loop_of_no_turns_and_one_that_does_not_read_its_row():
    assert inside(lambda w, x: run(w[:0], x) + 0 * w.sum()) == [Inside()]
    unread = lambda w, x: lax.scan(lambda h, _: (0.5 * h, None), x, w)[0]
    assert inside(unread) == []


def test_what_a_loop_stacks_comes_out():
    def stacked(w: Any, x: Any) -> Any:
        h, every = lax.scan(lambda h, v: (turn(h, v)[0], 2 * v), x, w)
        return h + every.sum()

    assert inside(stacked) == [ONCE]


def test_a_row_that_is_read_twice_is_used_once():
    twice = lambda h, w: (jnp.tanh(h @ w[0]) + (w**2).sum(), None)
    assert inside(lambda w, x: run(w, x, twice)) == [ONCE]


# In other functions.


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (None, "nothing"),
        (jax.checkpoint_policies.dots_saveable, "dots"),
        (jax.checkpoint_policies.everything_saveable, "everything"),
        (jax.checkpoint_policies.save_only_these_names("h"), "names"),
    ],
)
def test_a_use_in_a_checkpoint_stays_there(policy: Any, name: str):
    named = lambda h, w: (checkpoint_name(turn(h, w)[0], "h"), None)
    within = lambda w, x: run(w, x, jax.checkpoint(named, policy=policy))
    around = jax.checkpoint(run, policy=policy)
    checkpointed = dataclasses.replace(ONCE, checkpointed=True)
    assert inside(within) == [checkpointed]
    assert inside(around) == [checkpointed]
    assert inside(jax.checkpoint(lambda w, x: turn(x, w[0])[0])) == [Inside(checkpointed=True)]


def test_the_policy_of_a_checkpoint_is_kept():
    kept = {"policy": jax.checkpoint_policies.dots_saveable, "prevent_cse": False}
    jaxpr = jax.make_jaxpr(jax.checkpoint(lambda w, x: turn(x, w)[0], **kept))(W[0], X)
    again = lambda w, x: evaluate(jaxpr, [Noted("w", {"x": w, "zero": 0 * w}), x])
    (equation,) = (e for e in jax.make_jaxpr(again)(W[0], X).eqns if "policy" in e.params)
    assert {name: equation.params[name] for name in kept} == kept


def test_a_use_in_a_jit_stays_there_and_one_of_two_does_not():
    within = jax.jit(lambda h, w: turn(h, w))
    assert inside(lambda w, x: run(w, x, within)) == [ONCE]
    assert inside(jax.jit(jax.jit(run))) == [ONCE]
    assert inside(lambda w, x: jax.jit(run)(w, x) + jax.jit(run)(w, 2 * x)) == [Inside()]


def test_a_jit_with_shardings_is_called_as_it_is():
    mesh = jax.make_mesh((1,), ("i",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert inside(jax.jit(run, in_shardings=(where, where))) == [Inside()]


def test_a_branch_and_a_while_loop_use_it_before():
    branch = lambda w, x: lax.cond(x.sum() > 0, lambda w: w[0, 0] @ x, lambda w: w[1, 1] @ x, w)
    assert inside(branch) == [Inside()]
    until = lambda w, x: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, turn(c[1], lax.stop_gradient(w)[c[0]])[0]), (0, X)
    )[1]
    assert inside(until) == [Inside()]


def test_functions_with_derivatives_of_their_own_keep_them():
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
    for function in (tenfold, doubled):
        body = lambda h, w, function=function: (jnp.tanh(function(h, w)), None)
        assert inside(lambda w, x, body=body: run(w, x, body)) == [ONCE]


def test_a_derivative_within_the_function():
    penalized = lambda w, x: run(w, x) + jax.grad(lambda x: run(w, x).sum())(x) ** 2
    assert inside(penalized) == [Inside()]
    of_turn = lambda h, w: (jax.grad(lambda h: turn(h, w)[0].sum())(h) + h, None)
    assert inside(lambda w, x: run(w, x, of_turn)) == [ONCE]


# Dtypes.


def narrow(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


def test_what_is_converted_first_is_used_in_that_dtype():
    before = lambda w, x: run(narrow(w), narrow(x))
    within = lambda w, x: run(w, narrow(x), lambda h, w: turn(h, narrow(w)))
    for function in (before, within):
        assert uses_of(function) == [(ONCE, "bfloat16", (2, 4, 4))]


def test_what_all_readers_convert_to_one_dtype_is_used_once_in_that():
    twice = lambda w, x: narrow(x) @ narrow(w)[0, 0] + narrow(x) @ narrow(w)[1, 1]
    assert uses_of(twice) == [(Inside(), "bfloat16", W.shape)]
    in_turn = lambda h, w: (jnp.tanh(h @ narrow(w)[0] + h @ narrow(w)[1]), None)
    assert uses_of(lambda w, x: run(w, narrow(x), in_turn)) == [(ONCE, "bfloat16", (2, 4, 4))]


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: (narrow(x) @ narrow(w)[0, 0]).sum() + w.sum(),
        lambda w, x: w.sum() + (narrow(x) @ narrow(w)[0, 0]).sum(),
        lambda w, x: (x.astype(jnp.float16) @ w.astype(jnp.float16)[0, 0]).sum() + narrow(w).sum(),
    ],
)
def test_what_is_read_in_several_dtypes_is_used_in_its_own(function: Any):
    assert uses_of(function) == [(Inside(), "float32", W.shape)]


def test_what_cannot_be_converted_is_used_before():
    convert = lambda w, x: narrow(x) @ narrow(w)[0, 0]
    assert uses_of(convert, may_convert=False) == [(Inside(), "float32", W.shape)]
    twice = lambda w, x: convert(w, x) + convert(w, 2 * x)
    assert uses_of(twice, may_convert=False) == [(Inside(), "float32", W.shape)]


def test_a_weak_type_stays_weak():
    how = {"new_dtype": np.dtype(np.float32), "weak_type": True, "sharding": None}
    weak = lambda w: lax.convert_element_type_p.bind(w, **how)
    w = jnp.bfloat16(2)
    uses: list[Any] = []
    given = Noted("w", {"x": w, "zero": 0 * w}, w.dtype)
    (found,) = evaluate(jax.make_jaxpr(weak)(w), [given], noting(uses))
    assert found.aval == weak(w).aval
    assert found.weak_type
    assert len(uses) == 1


# Inputs and outputs.


def test_an_output_is_an_array_and_a_literal_stays():
    jaxpr = jax.make_jaxpr(lambda w, x: (w, 2.5, w[0], x, 7))(W, X)
    uses: list[Any] = []
    found = evaluate(jaxpr, [Noted("w", {"x": W, "zero": 0 * W}), X], noting(uses))
    assert [np.shape(each) for each in found] == [W.shape, (), W[0].shape, X.shape, ()]
    assert (float(found[1]), int(found[4])) == (2.5, 7)
    assert len(uses) == 1


def test_what_is_also_returned_is_used_once_before_the_loop():
    jaxpr = jax.make_jaxpr(lambda w, x: (run(w, x), w))(W, X)
    uses: list[Any] = []
    found = evaluate(jaxpr, [Noted("w", {"x": W, "zero": 0 * W}), X], noting(uses))
    assert uses == [(Inside(), "float32", W.shape)]
    np.testing.assert_array_equal(found[1], W)


def test_layers_that_are_written_out_are_used_one_by_one():
    def written_out(w: Any, x: Any) -> Any:
        for layer in range(LAYERS):
            x, _ = turn(x, w[layer])
        return x

    assert uses_of(written_out) == [(Inside(), "float32", W.shape[1:])] * LAYERS
    two = lambda w, x: (w[1:] * x).sum() + (w[:1] * x).sum()
    assert [shape[0] for *_, shape in uses_of(two)] == [LAYERS - 1, 1]
    uneven = lambda w, x: (w[::2] * x).sum() + (w[0] * x).sum()
    assert uses_of(uneven) == [(Inside(), "float32", W.shape)]


def test_equal_layers_under_a_checkpoint_are_each_noted():
    block = jax.checkpoint(lambda h, w: turn(h, w)[0])
    w = jnp.asarray(W)

    def function(ws: Any, x: Any) -> Any:
        for each in ws:
            x = block(x, each)
        return x

    noted: list[Any] = []
    note = lambda name, used, inside: noted.append((name, inside.checkpointed))

    def deferred(ws: Any, x: Any) -> Any:
        given = [Noted(name, {"x": each, "zero": 0 * each}) for name, each in enumerate(ws)]
        return evaluate(jax.make_jaxpr(function)(ws, x), [*given, x], note)[0]

    jaxpr = jax.make_jaxpr(deferred)(list(w), X)
    assert noted == [(name, True) for name in range(LAYERS)]
    within = [each.params["jaxpr"] for each in jaxpr.eqns if "policy" in each.params]
    assert len(within) == LAYERS
    assert all(each is within[0] for each in within)
    np.testing.assert_allclose(deferred(list(w), X), function(list(w), X), rtol=1e-6)


def test_equal_layers_under_a_checkpoint_keep_their_policies():
    policies = [None, jax.checkpoint_policies.everything_saveable, None]
    prevents = [True, True, False]
    layer = lambda h, w: turn(h, w)[0]

    def function(ws: Any, x: Any) -> Any:
        for each, policy, prevent_cse in zip(ws, policies, prevents, strict=True):
            x = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)(x, each)
        return x

    def deferred(ws: Any, x: Any) -> Any:
        given = [Noted(name, {"x": each, "zero": 0 * each}) for name, each in enumerate(ws)]
        return evaluate(jax.make_jaxpr(function)(ws, x), [*given, x])[0]

    jaxpr = jax.make_jaxpr(deferred)(list(jnp.asarray(W)), X)
    found = [each.params for each in jaxpr.eqns if "policy" in each.params]
    assert [each["policy"] for each in found] == policies
    assert [each["prevent_cse"] for each in found] == prevents


def test_what_is_not_read_is_not_used():
    assert inside(lambda w, x: 2 * x) == []
    assert inside(lambda w, x: jax.jit(lambda w, x: 2 * x)(w, x)) == []


def test_captured_arrays_are_constants():
    shift = jnp.float32(X)
    assert inside(lambda w, x: run(w, x) + jax.jit(lambda w: shift * w.sum())(w)) == [Inside()]
    assert inside(lambda w, x: run(w, x + shift)) == [ONCE]


def test_side_effects_happen_as_often_as_before():
    seen: list[float] = []

    def body(h: Any, w: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x)), h.sum())
        return turn(h, w)

    jaxpr = jax.make_jaxpr(lambda w, x: run(w, x, body))(W, X)
    evaluate(jaxpr, [Noted("w", {"x": jnp.asarray(W), "zero": 0 * W}), X])
    jax.effects_barrier()
    assert len(seen) == LAYERS


def test_names_of_operations_are_kept():
    def named(w: Any, x: Any) -> Any:
        with jax.named_scope("readout"):
            return run(w, x)

    jaxpr = jax.make_jaxpr(named)(W, X)
    again = lambda w, x: evaluate(jaxpr, [Noted("w", {"x": w, "zero": 0 * w}), x])
    assert "readout" in jax.jit(again).lower(W, X).as_text(debug_info=True)


def test_rows_of_one_and_of_two_inputs_share_no_trace():
    block = jax.checkpoint(lambda h, v, w: jnp.tanh(h @ v[0] + h @ w[0]))
    w = jnp.asarray(W)
    noted: list[Any] = []
    note = lambda name, used, inside: noted.append(name)

    def function(one: Any, two: Any, three: Any, x: Any) -> Any:
        return block(block(x, one[0], one[1]), two[0], three[0])

    given = [Noted(name, {"x": w, "zero": 0 * w}) for name in range(3)]
    (found,) = evaluate(jax.make_jaxpr(function)(w, w, w, X), [*given, X], note)
    assert noted == [0, 0, 1, 2]
    np.testing.assert_allclose(found, function(w, w, w, X), rtol=1e-6)
