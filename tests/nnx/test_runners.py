"""The runners: arrays split and joined, variables handed in and out, contexts set and left."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentError, VariableError
from crossshard.nnx import batch_parallel, replicate, rewrite
from tests.quick import deep, deep_but
from tests.stateful import adam, assert_same, sgd, training

X = np.arange(48, dtype=np.float32).reshape(8, 6)


def number_of_shards() -> int:
    context = crossshard.get_shard_context()
    assert context is not None
    return context.number_of_shards


# The original's form.


def test_shard_splits_runs_and_joins():
    seen = []

    def computation(x: Any, y: Any) -> Any:
        seen.append((x.shape, y.shape, number_of_shards()))
        return x + 1, {"sum": y.sum(), "y": y}

    a, rest = crossshard.shard(computation, [X, {"y": X[:, 0]}["y"]], num_shards=4)
    assert set(seen) == {((2, 6), (2,), 4)}
    np.testing.assert_array_equal(a, X + 1)
    np.testing.assert_array_equal(rest["sum"], X[:, 0].reshape(4, 2).sum(1))
    np.testing.assert_array_equal(rest["y"], X[:, 0])
    assert crossshard.get_shard_context() is None


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: crossshard.shard(
                lambda x, whole: (x * whole, x.sum()),
                [X, np.float32(2)],
                num_shards=2,
                input_shard_axes=[1, None],
                output_shard_axes=[1, 0],
            ),
            (X * 2, X.reshape(8, 2, 3).sum((0, 2))),
        ),
        (
            lambda: crossshard.shard(
                lambda x: [x, x.sum()], [X], num_shards=4, outputs_from_all_shards=[False, True]
            ),
            [X[:2], X.reshape(4, 12).sum(1)],
        ),
        (lambda: crossshard.shard(lambda: None, num_shards=2), None),
        (lambda: crossshard.shard(number_of_shards, num_shards=2), np.array([2, 2])),
        (lambda: batch_parallel(jnp.square, [X], num_shards=8), X**2),
        (lambda: rewrite(lambda x: x.T, [X]), X.T),
        (lambda: rewrite(number_of_shards), np.int32(1)),
    ],
)
def test_forms_of_the_original(call: Any, expected: Any):
    jax.tree.map(np.testing.assert_array_equal, call(), expected)


def test_replicate_gives_each_replica_a_list_of_its_own():
    def computation(x: Any, y: Any) -> Any:
        return {"x": x + y, "n": jnp.float32(number_of_shards())}

    out = replicate(computation, [[X[i], np.float32(i)] for i in range(4)])
    assert len(out) == 4
    for i, one in enumerate(out):
        np.testing.assert_array_equal(one["x"], X[i] + i)
        assert one["n"] == 4


def test_a_mesh_of_several_axes():
    mesh = jax.make_mesh((2, 4), ("slice", "shard"), axis_types=(AxisType.Auto,) * 2)
    total = crossshard.shard(lambda x: crossshard.cross_replica_sum(x.sum()), [X], mesh=mesh)
    np.testing.assert_allclose(total, np.full(8, X.sum()))


# Variables in and out.


class Net(nnx.Module):
    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.inner = nnx.Linear(6, 5, rngs=rngs)
        self.outer = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.outer(jnp.tanh(self.inner(x)))[:, 0]


def mse(model: Any, x: Any) -> Any:
    return jnp.mean((model(x / 48) - x[:, 0]) ** 2)


def expected_after(steps: int) -> Net:
    """By plain Optax on one device."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.01, 0.9), wrt=nnx.Param)
    for _ in range(steps):
        optimizer.update(model, nnx.grad(mse)(model, X))
    return model


def check(model: Net, steps: int = 3) -> None:
    assert_same(model, expected_after(steps), rtol=2e-5, atol=1e-6)


def momentum() -> CrossShardOptimizer:
    return sgd(0.01, 0.9)


GLOBAL_MODEL, GLOBAL_OPTIMIZER = Net(), momentum()


def of_globals(model: Net, opt: CrossShardOptimizer, x: Any) -> None:
    # What was given to the step is what the globals name.
    GLOBAL_OPTIMIZER.minimize(lambda: mse(GLOBAL_MODEL, x), var_list=GLOBAL_MODEL)


def of_parts(parts: Any, x: Any) -> Any:
    return parts["opt"].minimize(lambda: mse(parts["model"], x), var_list=parts["model"])


def of_both(model: Any, opt: Any, x: Any) -> Any:
    return of_parts({"model": model, "opt": opt}, x)


class Trainer(nnx.Module):
    def __init__(self, model: Net, opt: CrossShardOptimizer) -> None:
        self.parts = nnx.Dict(model=model, opt=nnx.List([opt]))

    def plain(self, x: Any) -> Any:
        return of_parts({"model": self.parts["model"], "opt": self.parts["opt"][0]}, x)

    step = crossshard.shard(num_shards=2)(plain)


GIVEN = {
    "the original's form": lambda model, opt: crossshard.shard(of_both, [model, opt, X], 2),
    "globals": lambda *_: crossshard.shard(of_globals, [GLOBAL_MODEL, GLOBAL_OPTIMIZER, X], 2),
    "a dict": lambda model, opt: crossshard.shard(of_parts, [{"model": model, "opt": opt}, X], 2),
    "a method": lambda model, opt: Trainer(model, opt).step(X),
    "a function of a class": lambda *pair: crossshard.shard(Trainer.plain, [Trainer(*pair), X], 2),
    "a partial": lambda *pair: crossshard.shard(
        functools.partial(Trainer.plain), [Trainer(*pair), X], 2
    ),
}


@pytest.mark.parametrize("way", deep_but(["the original's form", "globals", "a method"], GIVEN))
def test_ways_to_give_a_step_what_it_trains(way: str):
    model, opt = (GLOBAL_MODEL, GLOBAL_OPTIMIZER) if way == "globals" else (Net(), momentum())
    for _ in range(3):
        losses = GIVEN[way](model, opt)
    assert way == "globals" or losses.shape == (2,)
    check(model)


def test_variables_made_inside_a_step():
    def step(x: Any) -> Any:
        model, opt = Net(), momentum()
        for _ in range(3):
            opt.minimize(lambda: mse(model, x), var_list=model)
        return model.inner.kernel, model.outer.kernel

    inner, outer = crossshard.shard(step, [X], num_shards=4, outputs_from_all_shards=False)
    expected = expected_after(3)
    np.testing.assert_allclose(inner, expected.inner.kernel[...], rtol=2e-5)
    np.testing.assert_allclose(outer, expected.outer.kernel[...], rtol=2e-5)


def test_modes_of_a_module_are_part_of_what_a_program_is_compiled_for():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    run = crossshard.shard(num_shards=2)(lambda model, x: model(x))
    assert (np.asarray(run(model, np.ones((4, 8), np.float32))) == 0).any()
    model.eval()
    np.testing.assert_array_equal(run(model, np.ones((4, 8), np.float32)), 1)
    model.train()
    assert (np.asarray(run(model, np.ones((4, 8), np.float32))) == 0).any()


def test_a_model_that_a_transform_has_seen_in_a_step_can_change_its_mode_after_it():
    model = nnx.Sequential(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    opt = nnx.Optimizer(model, CrossShardOptimizer(optax.sgd(0.1)), wrt=nnx.Param)

    @crossshard.shard(num_shards=2)
    def step(model: Any, opt: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        opt.update(model, grads)
        return loss

    for _ in range(2):
        model.train()
        step(model, opt, X)
        model.eval()
        np.testing.assert_array_equal(model(X), model(X))


class Recurrent(nnx.Module):
    """Its scan starts from zeros, which are equal on all shards, and ends with what are not."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.cell = nnx.RNN(nnx.LSTMCell(2, 4, rngs=rngs))
        self.head = nnx.Linear(4, 1, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.seen[...] = self.seen[...] + x.sum()
        return self.head(self.cell(x.reshape(-1, 3, 2))[:, -1])[:, 0]


@pytest.mark.deep
def test_a_loop_that_jax_cannot_type():
    model, opt = Recurrent(), momentum()

    average = nnx.Variable(model.head.kernel[...])

    @crossshard.shard(num_shards=4)
    def step(model: Any, opt: Any, average: Any, x: Any) -> None:
        opt.minimize(lambda: mse(model, x), var_list=model)
        average.set_value(0.9 * average[...] + 0.1 * model.head.kernel[...])

    reference = Recurrent()
    optimizer = nnx.Optimizer(reference, optax.sgd(0.01, 0.9), wrt=nnx.Param)
    for _ in range(3):
        step(model, opt, average, X)
        optimizer.update(reference, nnx.grad(mse)(reference, X))
    kernel = model.cell.cell.hi.kernel
    assert not any(map(crossshard.nnx.is_per_shard, [kernel, average]))
    np.testing.assert_allclose(
        kernel.get_value(), reference.cell.cell.hi.kernel[...], rtol=2e-5, atol=1e-6
    )
    # What cannot be proven equal is held per shard.
    np.testing.assert_allclose(
        model.seen.get_value(), 3 * (X / 48).reshape(4, -1).sum(1), rtol=1e-5
    )


@pytest.mark.deep
def test_groups_under_a_loop_that_jax_cannot_type():
    model, opt = Recurrent(), sgd(0.01, group_assignment=[[0, 1], [2, 3]])
    training(mse, 4)(model, opt, X)
    kernel = np.asarray(model.head.kernel.get_value())
    assert kernel.shape == (4, 4, 1)
    np.testing.assert_array_equal(kernel[0], kernel[1])
    assert (kernel[0] != kernel[2]).any()


def test_a_gradient_that_comes_and_goes_leaves_its_slots_alone():
    w, v = nnx.Param(jnp.zeros(())), nnx.Param(jnp.zeros(()))
    opt = sgd(1.0, 0.5)

    @crossshard.shard(num_shards=2)
    def step(w: Any, v: Any, opt: Any, both: bool, x: Any) -> None:
        loss = lambda: (w[...] * x[0] + v[...] * x[0]) if both else w[...] * x[0]
        opt.minimize(loss, var_list=[w, v])

    for both in (False, True, False, True):
        step(w, v, opt, both, np.ones(2, np.float32))
    # trace: 1, 1.5, 1.75, 1.875 for w; 1, 1.5 for v.
    np.testing.assert_allclose([w[...], v[...]], [-6.125, -2.5])


def test_an_exception_in_a_step_leaves_everything_as_it_was():
    model, opt = Net(), momentum()

    @crossshard.shard(num_shards=2)
    def step(model: Any, opt: Any, x: Any) -> None:
        opt.minimize(lambda: mse(model, x), var_list=model)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step(model, opt, X)
    assert_same(model, Net())
    assert crossshard.get_shard_context() is None
    good = training(mse, 2)
    for _ in range(3):
        good(model, opt, X)
    check(model)


def test_what_a_step_was_not_given_is_refused():
    model, opt = Net(), momentum()
    refused = pytest.raises(VariableError, match="Pass its module to the step function")
    for read_or_write in (
        lambda opt, x: opt.minimize(lambda: mse(model, x), var_list=model),
        lambda opt, x: model(x),
        lambda opt, x: model.inner.kernel * 2,
        lambda opt, x: nnx.state(model.inner).kernel[...] * 2,
    ):
        with refused:
            crossshard.shard(read_or_write, [opt, X], num_shards=2)
    write = lambda x: model.inner.kernel.set_value(jnp.zeros((6, 5)))
    with refused:
        crossshard.shard(write, [X], num_shards=2)
    assert_same(model, Net())


def test_a_step_that_catches_the_refusal_is_refused_again():
    rate = nnx.Variable(jnp.float32(2))

    def step(x: Any) -> Any:
        with contextlib.suppress(crossshard.errors.VariableError):
            rate[...]
        return rate[...] * x

    with pytest.raises(crossshard.errors.VariableError, match="not given"):
        crossshard.shard(step, [X], num_shards=2)


def over_rows(function: Any) -> Any:
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))


@pytest.mark.parametrize(
    "outer",
    deep_but(
        [jax.jit, over_rows],
        [jax.jit, nnx.jit, jax.make_jaxpr, over_rows, lambda f: jax.vmap(f, axis_name="rows")],
    ),
)
def test_a_runner_inside_of_a_trace_is_refused(outer: Any):
    model, opt = Net(), CrossShardOptimizer(optax.adam(0.1))
    step = crossshard.shard(num_shards=2)(
        lambda model, opt, x: opt.minimize(lambda: mse(model, x), var_list=model)
    )
    refused = pytest.raises(
        crossshard.errors.NestedContextError, match=r"inside jax\.jit.*call it outside"
    )
    with refused:
        outer(lambda x: step(model, opt, x))(X)
    if outer in (jax.jit, nnx.jit, jax.make_jaxpr):
        with refused:
            outer(lambda: step(model, opt, X))()
    # Slots made in the trace would be its tracers.
    assert nnx.state(opt) == nnx.state(CrossShardOptimizer(optax.adam(0.1)))
    step(model, opt, X)


def test_a_step_is_traced_no_more_than_it_must():
    traces = []
    model, opt = Net(), momentum()

    @crossshard.shard(num_shards=2)
    def step(model: Any, opt: Any, x: Any) -> Any:
        traces.append(1)
        return opt.minimize(lambda: mse(model, x), var_list=model)

    for _ in range(2):
        step(model, opt, X)
    after_two = len(traces)
    for _ in range(20):
        step(model, opt, X)
    assert len(traces) == after_two
    step(model, opt, X[:4])
    assert len(traces) > after_two


def test_one_optimizer_on_two_models_of_one_structure():
    def train(run: Any) -> Any:
        opt, first, second = momentum(), Net(0), Net(1)
        step = run(lambda model, opt, x: opt.minimize(lambda: mse(model, x), var_list=model))
        for model in (first, first, second, second, first):
            step(model, opt, X)
        return [first, second], len(opt.variables())

    (sharded, slots), (alone, expected) = train(crossshard.shard(num_shards=8)), train(one_shard)
    assert slots == expected == 8
    assert_same(sharded, alone, rtol=2e-5, atol=1e-6)


def one_shard(step: Any) -> Any:
    def run(*args: Any) -> Any:
        with crossshard.shard_context(1):
            return step(*args)

    return run


def test_slots_made_in_a_trace_that_ends_are_refused():
    model, opt = Net(), momentum()
    step = nnx.jit(one_shard(lambda model, x: opt.minimize(lambda: mse(model, x), var_list=model)))
    with pytest.raises(VariableError, match="lost when it ends"):
        step(model, X)
    assert opt.variables() == []


def test_random_streams_differ_between_shards_and_are_stored_once():
    rngs = nnx.Rngs(0)
    draw = crossshard.shard(num_shards=8)(lambda rngs: jax.random.uniform(rngs(), (4,)))
    first, second = np.asarray(draw(rngs)).reshape(8, 4), np.asarray(draw(rngs)).reshape(8, 4)
    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 16
    assert not any(map(crossshard.nnx.is_per_shard, nnx.state(rngs).flat_state().leaves))
    alone = crossshard.shard(num_shards=1)(lambda rngs: jax.random.uniform(rngs(), (4,)))
    np.testing.assert_array_equal(alone(nnx.Rngs(0)), jax.random.uniform(nnx.Rngs(0)(), (4,)))


def test_variables_that_are_only_read_are_read_anew_at_each_call():
    w = nnx.Variable(jnp.float32(1))
    steps = (lambda w, x: x * w[...], lambda _, x, *, box=[w]: x * box[0][...])
    runs = [crossshard.shard(num_shards=2)(step) for step in steps]
    for value in (1, 10):
        w.set_value(jnp.float32(value))
        for run in runs:
            np.testing.assert_array_equal(run(w, X), value * X)


def test_a_variable_that_is_given_twice():
    one, ten = (nnx.Variable(jnp.float32(value)) for value in (1, 10))
    run = crossshard.shard(num_shards=2)(lambda v, w, either, x: x * either[...])
    for either, value in ((one, 1), (ten, 10)):
        np.testing.assert_array_equal(run(one, ten, either, X), value * X)


def test_containers_written_anew_are_no_new_programs():
    traces = []
    model = Net()

    @crossshard.shard(num_shards=2)
    def run(parts: Any, config: Any, x: Any) -> Any:
        traces.append(1)
        return parts["model"](x)

    run({"model": model}, {"mode": ["train"]}, X)
    before = len(traces)
    run({"model": model}, {"mode": ["train"]}, X)
    assert len(traces) == before
    run({"model": model}, {"mode": ["test"]}, X)
    assert len(traces) > before


def test_the_loss_goes_to_rules_that_take_it_and_to_no_others():
    def update(updates: Any, state: Any, params: Any = None, *, scale: float = 2.0) -> Any:
        return jax.tree.map(lambda g: -scale * g, updates), state

    w = nnx.Param(jnp.float32(0))
    rule = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    opt = CrossShardOptimizer(rule)
    minimize = lambda w, opt, x: opt.minimize(lambda: w[...] * x.sum(), None, [w])
    crossshard.shard(minimize, [w, opt, X[:2]], 2)
    np.testing.assert_allclose(w.get_value(), -X[:2].sum())


def test_a_loss_that_the_optimizer_does_not_read_is_looked_at_for_a_nan():
    w, opt = nnx.Param(jnp.zeros(2)), CrossShardOptimizer(optax.sgd(1.0), nonfinite="skip")
    with crossshard.shard_context(1):
        for loss, expected in ((np.nan, [0, 0]), (1.0, [-1, -1])):
            pairs = opt.compute_gradients(lambda: w[...].sum(), [w])
            opt.apply_gradients(pairs, value=jnp.float32(loss))
            np.testing.assert_array_equal(w[...], expected)
        with pytest.raises(TypeError, match="golbal_step"):
            opt.apply_gradients(pairs, golbal_step=1)  # type: ignore[call-arg]


def test_what_is_said_to_be_reduced_is_proven_by_nobody_in_a_loop_that_jax_cannot_type():
    w, opt = nnx.Param(jnp.float32(0)), sgd(1.0)

    @crossshard.shard(num_shards=4)
    def step(w: Any, opt: Any, x: Any) -> None:
        jax.lax.scan(lambda c, row: (c + row.mean(), None), jnp.float32(0), x)
        opt.apply_gradients([(x.mean(), w)], incoming="reduced")

    step(w, opt, X)
    np.testing.assert_allclose(w.get_value(), -X.reshape(4, -1).mean(1), rtol=1e-6)


def test_modules_that_are_shared_and_that_hold_themselves():
    model, opt = Net(), momentum()
    model.inner.parent = nnx.data(model)

    def minimize(model: Any, opt: Any, same: Any, x: Any) -> None:
        opt.minimize(lambda: mse(same.inner.parent, x), var_list=model)

    other = Net(1)
    other.inner.parent = nnx.data(other)
    for _ in range(3):
        crossshard.shard(minimize, [model, opt, model, X], 2)
        # Another program: what is given besides is not the model that is trained.
        with pytest.raises(ArgumentError, match="No gradients"):
            crossshard.shard(minimize, [model, momentum(), other, X], 2)
    del model.inner.parent
    check(model)


class Sowing(Net):
    def __call__(self, x: Any) -> Any:
        out = super().__call__(x)
        self.sow(nnx.Intermediate, "out", out)
        return out


def test_a_loss_that_writes_to_a_module_that_was_not_given():
    norm, w = nnx.BatchNorm(6, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(6))
    opt = momentum()
    with (
        crossshard.shard_context(1),
        pytest.raises(TraceContextError),
    ):
        opt.minimize(lambda: (norm(X) * w[...]).mean(), var_list=[w])
    np.testing.assert_array_equal(norm.mean[...], jnp.zeros(6))
    with crossshard.shard_context(1):
        opt.minimize(lambda: (norm(X) * w[...]).mean(), var_list=[w, norm])
    assert np.abs(norm.mean[...]).max() > 1e-3


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: jax.lax.psum(x, "shards", axis_index_groups=[[0, 1], [2, 3]]),
        lambda x: jax.vmap(lambda row: jax.lax.pmean(row, "rows"), axis_name="rows")(x),
    ],
)
def test_collectives_that_jax_cannot_type(collective: Any):
    assert crossshard.shard(collective, [X], num_shards=4).shape == X.shape


@pytest.mark.parametrize(
    ("shape", "kind", "how"),
    [
        deep(({"slice": 2, "chip": 4}, AxisType.Explicit, "split")),
        deep(({"slice": 2, "chip": 4}, AxisType.Explicit, "host")),
        deep(({"slice": 2, "chip": 4}, AxisType.Auto, "split")),
        deep(({"data": 8}, AxisType.Auto, "host")),
    ],
)
def test_on_the_mesh_that_is_set(shape: Any, kind: AxisType, how: str):
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(kind,) * len(shape))
    with jax.set_mesh(mesh):
        step = training(mse)
        model, opt = Net(), momentum()
        x = jax.device_put(X, P(tuple(shape))) if how == "split" else X
        for _ in range(3):
            step(model, opt, x)
        weights = jax.tree.leaves(nnx.state(model, nnx.Param))
        # JAX takes no array of another mesh beside explicit axes.
        assert all(bool((x == x).all()) and x.sharding.mesh == mesh for x in weights)
        doubled = replicate(lambda x: 2 * x, [[jnp.float32(i)] for i in range(8)])
        assert doubled[3] + 1 == 7
    check(model)


def test_in_a_step_a_variable_is_one_shards_own():
    w, opt = (nnx.Param(jnp.zeros(3)), adam(0.1, group_assignment=[[0], [1]]))

    @crossshard.shard(num_shards=2)
    def step(w: Any, opt: Any, x: Any) -> None:
        opt.minimize(lambda: (w[...] * x[0, :3]).sum(), var_list=[w])
        w.set_value(w[...] + 1)

    for _ in range(2):
        step(w, opt, X[:2])
    assert crossshard.nnx.is_per_shard(w)
    assert w.get_value().shape == (2, 3)


@pytest.mark.parametrize("run", [training, lambda loss, number: one_shard(minimizing(loss))])
def test_what_a_step_or_a_loss_makes_in_a_module_is_refused_and_gone(run: Any):
    model, opt = Sowing(), momentum()
    for _ in range(2):
        with pytest.raises(VariableError, match=r"created Intermediate.*or pop it where it is"):
            run(mse, 2)(model, opt, X)
    assert not hasattr(model, "out")


def minimizing(loss: Any) -> Any:
    return lambda model, opt, x: opt.minimize(lambda: loss(model, x), var_list=model)
