"""The behaviour of ``tf.compat.v1.tpu.CrossShardOptimizer``: what is kept, mended or refused."""

import copy
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import sparse
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, Reduction

ATOL = {"rtol": 0, "atol": 1e-6}


def sgd(**kwargs: Any) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.sgd(1.0), **kwargs)


def param(value: Any = 2.0) -> nnx.Param:
    return nnx.Param(jnp.asarray(value, jnp.float32))


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), **ATOL)


# The constructor.


@pytest.mark.parametrize("given", ["weighted_sum", "sum", Reduction.SUM])
def test_sum_is_accepted(given: str):
    assert sgd(reduction=given).reduction is Reduction.SUM


@pytest.mark.parametrize("given", ["weighted_mean", "mean", Reduction.MEAN])
def test_mean_is_accepted(given: str):
    assert sgd(reduction=given).reduction is Reduction.MEAN


@pytest.mark.parametrize(
    "given",
    [
        Reduction.NONE,
        Reduction.SUM_OVER_BATCH_SIZE,
        Reduction.SUM_BY_NONZERO_WEIGHTS,
        "avg",
        1,
        None,
    ],
)
def test_other_reductions_are_refused_before_the_optimizer_is_looked_at(given: Any):
    with pytest.raises(ValueError, match=r"weighted_sum.*weighted_mean.*received") as caught:
        CrossShardOptimizer("no optimizer", reduction=given)
    assert repr(given) in str(caught.value)


def test_reduction_carries_tensorflows_values():
    assert [str(r) for r in Reduction] == [
        "none",
        "weighted_sum",
        "weighted_sum_over_batch_size",
        "weighted_mean",
        "weighted_sum_by_nonzero_weights",
    ]
    assert Reduction.SUM_OVER_NONZERO_WEIGHTS is Reduction.SUM_BY_NONZERO_WEIGHTS


def test_what_is_no_optax_transformation_is_refused():
    with pytest.raises(TypeError, match="no init and no update"):
        CrossShardOptimizer(3)
    with pytest.raises(TypeError, match=r"Call it: sgd\(learning_rate\)"):
        CrossShardOptimizer(optax.sgd)
    assert CrossShardOptimizer(crossshard.Optimizer(optax.sgd(1.0))).reduction is Reduction.MEAN


@pytest.mark.parametrize(
    ("library", "name", "equivalent"),
    [
        ("keras.src.optimizers.adam", "Adam", "optax.adam"),
        ("torch.optim.sgd", "SGD", "optax.sgd"),
        ("tensorflow.python.training.momentum", "MomentumOptimizer", "optax.sgd"),
    ],
)
def test_other_libraries_optimizers_are_named_with_their_equivalent(
    library: str, name: str, equivalent: str
):
    other = type(name, (), {"__module__": library})()
    with pytest.raises(TypeError, match=equivalent):
        CrossShardOptimizer(other)


def test_names():
    assert sgd(name="mine").get_name() == "mine"
    with pytest.raises(ValueError, match="empty"):
        sgd(name="")
    with pytest.raises(TypeError, match="3"):
        sgd(name=3)


@pytest.mark.parametrize("groups", [[[0, 0], [1, 1]], [[0, 1], [2]], [[0, 1.0]], 5, "01", [[1, 2]]])
def test_groups_are_checked_at_construction(groups: Any):
    with pytest.raises(ValueError, match="group_assignment"):
        sgd(group_assignment=groups)


def test_coverage_is_checked_once_the_number_of_shards_is_known():
    opt = sgd(group_assignment=[[0, 1], [2, 3]])
    with crossshard.shard_context(8), pytest.raises(ValueError, match=r"range\(8\)"):
        opt.compute_gradients(lambda: param()[...], [param()])


def test_wrapping_twice_is_refused():
    with pytest.raises(crossshard.NestedReductionError):
        CrossShardOptimizer(sgd(reduction="sum"), reduction="sum")
    nested = CrossShardOptimizer(optax.chain(optax.clip(1.0), sgd()))
    state = nested.init(jnp.ones(2))
    with crossshard.shard_context(1), pytest.raises(crossshard.NestedReductionError):
        nested.update(jnp.ones(2), state)


# compute_gradients.


def test_without_a_context_one_shard_is_assumed_with_a_warning():
    w = param()
    with pytest.warns(crossshard.ShardContextWarning, match="assuming 1 shard"):
        ((gradient, _),) = sgd().compute_gradients(lambda: w[...] * 3, [w])
    close(gradient, 3.0)


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([0, 1], "list of lists"),
        ([[0, 1], [3, 4]], "permutation"),
        ([[0, 0], [1, 1]], "permutation"),
        ([[0, 1], [0, 1]], "permutation"),
        ([[0, 1], [2]], "equal sizes"),
        ([[False, True]], "integer"),
        ([[0.0, 1.0]], "integer"),
    ],
)
def test_bad_groups_are_value_errors(groups: Any, why: str):
    with pytest.raises(ValueError, match=why):
        sgd(group_assignment=groups)


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), np.array([[0, 1], [2, 3]]), [(0, 1), [2, 3]]])
def test_tuples_and_integer_arrays_are_accepted(groups: Any):
    assert sgd(group_assignment=groups).group_assignment == [[0, 1], [2, 3]]


@pytest.mark.parametrize("groups", [[], (), None, np.zeros((0, 2), int)])
def test_no_groups_means_all_shards(groups: Any):
    assert sgd(group_assignment=groups).group_assignment is None


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, 0.125),
        ({"reduction": "sum"}, 1.0),
        ({"group_assignment": [[0, 1, 2, 3], [4, 5, 6, 7]]}, 0.25),
        ({"group_assignment": [[i] for i in range(8)]}, 1.0),
        ({"reduction": "sum", "group_assignment": [[0, 1, 2, 3], [4, 5, 6, 7]]}, 1.0),
    ],
)
def test_the_loss_is_scaled(kwargs: dict[str, Any], expected: float):
    w = param()
    with crossshard.shard_context(8):
        ((gradient, variable),) = sgd(**kwargs).compute_gradients(lambda: w[...] * 1.0, [w])
    assert variable is w
    close(gradient, expected)


@pytest.mark.parametrize("number", [0, -3, "x", 2.5, True, None])
def test_a_shard_count_is_an_int_of_at_least_one(number: Any):
    with (
        pytest.raises((crossshard.ArgumentError, crossshard.ArgumentTypeError), match="at least 1"),
        crossshard.shard_context(number),
    ):
        pass


def test_a_loss_is_a_function_and_nothing_of_the_callers_is_changed():
    w = param()
    data = np.array([1.0, 2.0], np.float32)
    with crossshard.shard_context(4):
        ((gradient, _),) = sgd().compute_gradients(lambda: w[...] * data.sum(), [w])
        with pytest.raises(TypeError, match="lambda"):
            sgd().compute_gradients(np.float32(3.0), [w])
        with pytest.raises(ValueError, match="scalar"):
            sgd().compute_gradients(lambda: w[...] * data, [w])
    close(gradient, 0.75)
    assert data.tolist() == [1.0, 2.0]
    close(w[...], 2.0)


def test_keywords_of_the_wrapped_optimizer():
    w = param()
    with crossshard.shard_context(4):
        ((gradient, _),) = sgd().compute_gradients(
            lambda: w[...] * 1.0,
            [w],
            gate_gradients=CrossShardOptimizer.GATE_GRAPH,
            aggregation_method=2,
            colocate_gradients_with_ops=True,
            grad_loss=8.0,
        )
        with pytest.raises(ValueError, match="gate_gradients"):
            sgd().compute_gradients(lambda: w[...], [w], gate_gradients=3)
        with pytest.raises(TypeError, match="unheard_of"):
            sgd().compute_gradients(lambda: w[...], [w], unheard_of=1)
    close(gradient, 2.0)


def test_gradients_are_local_pairs_and_none_where_the_loss_does_not_reach():
    w, unused = param(), param()

    @crossshard.shard(num_shards=4)
    def step(x: jax.Array) -> Any:
        pairs = sgd().compute_gradients(lambda: w[...] * x[0], [w, unused])
        assert isinstance(pairs, list)
        assert pairs[1][0] is None
        assert pairs[1][1] is unused
        return pairs[0][0]

    close(step(np.arange(4.0, dtype=np.float32)), np.arange(4) / 4)


def test_none_also_through_jit_scan_and_stop_gradient():
    w, passed, stopped = param(), param(), param()

    def loss() -> jax.Array:
        inner = jax.jit(lambda a, b: a * 2)(w[...], passed[...])
        return inner + jax.lax.stop_gradient(stopped[...])

    with crossshard.shard_context(1):
        pairs = sgd().compute_gradients(loss, [w, passed, stopped])
    assert [g is None for g, _ in pairs] == [False, True, True]


def test_without_a_list_every_parameter_is_trained():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with crossshard.shard_context(1):
        pairs = sgd().compute_gradients(lambda: model(jnp.ones((1, 2))).sum())
    assert {id(v) for _, v in pairs} == {id(model.kernel), id(model.bias)}


def test_variable_lists_that_cannot_be_trained():
    with crossshard.shard_context(1):
        with pytest.raises(ValueError, match=r"No variables to optimize\."):
            sgd().compute_gradients(lambda: 1.0, [])
        with pytest.raises(TypeError, match="var_list"):
            sgd().compute_gradients(lambda: 1.0, [jnp.ones(2)])
        with pytest.raises(ValueError, match="floating"):
            sgd().compute_gradients(lambda: 1.0, [nnx.Param(jnp.array(1))])


# apply_gradients.


def test_gradients_are_summed_over_the_group_and_none_passes_through():
    w, unused = param(np.zeros(())), param(5.0)
    opt = sgd(group_assignment=[[0, 2], [1, 3]])

    @crossshard.shard(num_shards=4)
    def step(x: jax.Array) -> None:
        opt.apply_gradients(opt.compute_gradients(lambda: w[...] * x[0], [w, unused]))

    step(np.arange(4.0, dtype=np.float32))
    close(w.get_value(), [-1.0, -2.0, -1.0, -2.0])
    close(unused.get_value(), 5.0)


def test_gradients_of_unknown_origin_are_refused_under_mean():
    w = param(np.zeros(()))
    opt = sgd()

    def run(incoming: str | None, opt: CrossShardOptimizer = opt) -> Any:
        def step(w: nnx.Param, x: jax.Array) -> None:
            opt.apply_gradients([(x[0], w)], incoming=incoming)

        crossshard.set_shared(w, jnp.zeros(()))
        crossshard.shard(num_shards=4)(step)(w, np.arange(4.0, dtype=np.float32))
        return w.get_value()

    with pytest.raises(crossshard.IncomingError, match="compute_gradients"):
        run(None)
    close(w.get_value(), 0.0)
    close(run("local"), -1.5)
    close(run("scaled"), -6.0)
    close(run(None, sgd(reduction="sum")), -6.0)


def test_gradients_are_good_for_one_step():
    w = param(np.zeros(()))
    opt = sgd()

    @crossshard.shard(num_shards=4)
    def step(x: jax.Array) -> None:
        pairs = opt.compute_gradients(lambda: w[...] * x[0], [w])
        opt.apply_gradients(pairs)
        opt.apply_gradients(pairs)

    with pytest.raises(crossshard.IncomingError):
        step(np.ones(4, np.float32))


def test_computing_under_shards_and_applying_outside_is_refused():
    w = param()
    opt = sgd()
    with crossshard.shard_context(8):
        pairs = opt.compute_gradients(lambda: w[...] * 1.0, [w])
    with pytest.raises(crossshard.ShardContextError, match="8 shards"):
        opt.apply_gradients(pairs)
    close(w[...], 2.0)


def test_a_context_alone_cannot_sum():
    w = param()
    opt = sgd()
    with (
        crossshard.shard_context(8),
        pytest.raises(crossshard.ShardContextError, match=r"crossshard\.shard\(num_shards=8\)"),
    ):
        opt.minimize(lambda: w[...] * 1.0, var_list=[w])
    close(w[...], 2.0)


def test_sparse_gradients_are_refused_by_name():
    w = param(np.ones(3))
    gradient = sparse.BCOO.fromdense(jnp.ones(3))
    with crossshard.shard_context(1), pytest.raises(TypeError, match="BCOO"):
        sgd().apply_gradients([(gradient, w)])
    with crossshard.shard_context(1), pytest.raises(TypeError, match=r"`w`.*BCOO"):
        sgd().update({"w": gradient}, sgd().init({"w": jnp.ones(3)}))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_floating_dtypes_are_reduced_in_their_own(dtype: Any):
    w = nnx.Param(jnp.zeros(2, dtype))
    opt = sgd()

    @crossshard.shard(num_shards=8)
    def step(x: jax.Array) -> None:
        opt.apply_gradients([(x[0], w)], incoming="local")

    # Eight times 20,000 overflows f16 before the division.
    step(np.full((8, 2), 20_000, np.dtype(dtype)))
    assert w.get_value().dtype == dtype
    np.testing.assert_allclose(np.asarray(w.get_value(), np.float32), -20_000, rtol=4e-3)


def test_float64():
    with jax.enable_x64(True):
        w = nnx.Param(jnp.zeros((), jnp.float64))
        opt = sgd()
        x = np.linspace(0, 1, 8) + 1e-12

        @crossshard.shard(num_shards=8)
        def step(x: jax.Array) -> None:
            opt.apply_gradients([(x[0], w)], incoming="local")

        step(x)
        assert abs(float(w.get_value()) + x.mean()) < 1e-15


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_])
def test_other_dtypes_are_refused_with_the_leafs_name(dtype: Any):
    w = param(np.ones(2))
    with crossshard.shard_context(1), pytest.raises(TypeError, match=np.dtype(dtype).name):
        sgd().apply_gradients([(jnp.ones(2, dtype), w)])
    with crossshard.shard_context(1), pytest.raises(TypeError, match="`layer/w`"):
        sgd().update({"layer": {"w": jnp.ones(2, dtype)}}, sgd().init({"layer": {"w": 1.0}}))


def test_lists_that_cannot_be_applied():
    w = param()
    with crossshard.shard_context(1):
        with pytest.raises(ValueError, match=r"No variables provided\."):
            sgd().apply_gradients([])
        with pytest.raises(ValueError, match=r"No gradients provided for any variable: .*Param"):
            sgd().apply_gradients([(None, w)])
        with pytest.raises(TypeError, match="grads_and_vars"):
            sgd().apply_gradients(3)
        with pytest.raises(ValueError, match=r"pair; got \(1\.0,\)"):
            sgd().apply_gradients([(1.0,)])
        with pytest.raises(ValueError, match="twice"):
            sgd().apply_gradients([(jnp.float32(1), w), (jnp.float32(1), w)])


def test_the_global_step_is_incremented_once_per_step():
    w, global_step = param(), nnx.Variable(jnp.array(41))
    opt = sgd()

    @crossshard.shard(num_shards=8)
    def step(x: jax.Array) -> None:
        opt.minimize(lambda: w[...] * x[0], global_step=global_step, var_list=[w])

    step(np.ones(8, np.float32))
    assert global_step[...] == 42
    assert global_step[...].dtype == jnp.int32
    for bad in (41, jnp.array(41), nnx.Variable(jnp.float32(41))):
        with crossshard.shard_context(1), pytest.raises(TypeError, match="global_step"):
            sgd().apply_gradients([(jnp.float32(1), w)], global_step=bad)


def test_the_constructors_name_is_in_the_compiled_program():
    w = param()
    opt = sgd(name="my_reducer")

    def step(w: Any, x: Any) -> Any:
        updates, _ = opt.update(w * x, opt.init(w), w)
        return updates

    lowered = jax.jit(jax.vmap(step, axis_name="i")).lower(jnp.ones(2), jnp.ones(2))
    assert "my_reducer" in lowered.compile().as_text()
    assert opt.get_name() == "my_reducer"
    with crossshard.shard_context(1):
        opt.apply_gradients([(jnp.float32(1), w)], name="this_step")


# The rest.


def test_minimize_is_compute_and_apply_with_the_same_order_of_arguments():
    import inspect

    # What comes after TensorFlow's arguments is passed on to apply_gradients, by name.
    *names, rest = inspect.signature(CrossShardOptimizer.minimize).parameters.values()
    assert rest.kind is rest.VAR_KEYWORD
    assert [parameter.name for parameter in names[1:]] == [
        "loss",
        "global_step",
        "var_list",
        "gate_gradients",
        "aggregation_method",
        "colocate_gradients_with_ops",
        "name",
        "grad_loss",
    ]
    w, v = param(), param()
    one, two = sgd(), sgd()

    @crossshard.shard(num_shards=4)
    def step(x: jax.Array) -> Any:
        one.apply_gradients(one.compute_gradients(lambda: w[...] ** 2 * x[0], [w]))
        return two.minimize(lambda: v[...] ** 2 * x[0], None, [v])

    own_losses = step(np.arange(4.0, dtype=np.float32))
    close(w[...], v[...])
    close(own_losses, 4 * np.arange(4))


def test_gates_and_kind():
    assert (sgd().GATE_NONE, sgd().GATE_OP, sgd().GATE_GRAPH) == (0, 1, 2)
    assert isinstance(sgd(), crossshard.Optimizer)
    assert isinstance(sgd(), optax.GradientTransformationExtraArgs)


def test_slots():
    w = param(np.ones(2))
    opt = CrossShardOptimizer(optax.adam(0.1))
    assert (opt.get_slot(w, "m"), opt.get_slot_names(), opt.variables()) == (None, [], [])
    with crossshard.shard_context(1):
        opt.apply_gradients([(jnp.array([1.0, 2.0]), w)])
    assert opt.get_slot_names() == ["mu", "nu"]
    close(opt.get_slot(w, "m")[...], [0.1, 0.2])
    assert opt.get_slot(w, "v") is opt.get_slot(w, "nu")
    assert opt.get_slot(w, "nonsense") is None
    assert opt.get_slot(param(), "m") is None
    assert all(isinstance(v, nnx.Variable) for v in opt.variables())
    assert len(opt.variables()) == 3  # two slots and the step count


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (optax.sgd(0.1, 0.9), {"momentum": "trace"}),
        (optax.adagrad(0.1), {"accumulator": "sum_of_squares"}),
        (optax.rmsprop(0.1, momentum=0.9), {"rms": "nu", "momentum": "trace"}),
        (optax.adadelta(0.1), {"accum": "e_g", "accum_update": "e_x"}),
    ],
)
def test_tensorflows_slot_names(rule: Any, names: dict[str, str]):
    w = param()
    opt = CrossShardOptimizer(rule)
    opt.build([w])
    for theirs, ours in names.items():
        assert opt.get_slot(w, theirs) is opt.get_slot(w, ours) is not None


def test_the_wrapped_optimizer_can_be_reached_and_read():
    inner = optax.sgd(0.1)
    opt = CrossShardOptimizer(inner, "sum", group_assignment=[[0, 1]])
    assert opt.inner is inner
    assert "SUM" in repr(opt)
    assert "[[0, 1]]" in repr(opt)
    assert "optax" in repr(opt)


def adam_and_model() -> tuple[CrossShardOptimizer, nnx.Linear]:
    return CrossShardOptimizer(optax.adam(0.1)), nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def train(opt: CrossShardOptimizer, model: nnx.Linear, steps: int) -> None:
    @crossshard.shard(num_shards=2)
    def step(model: nnx.Linear, opt: CrossShardOptimizer, x: jax.Array) -> Any:
        return opt.minimize(lambda: (model(x) ** 2).mean(), var_list=model)

    for seed in range(steps):
        step(model, opt, np.random.default_rng(seed).normal(size=(4, 2)).astype(np.float32))


def same_weights(a: nnx.Linear, b: nnx.Linear) -> None:
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.to_pure_dict(nnx.state(a)),
        nnx.to_pure_dict(nnx.state(b)),
    )


def test_the_whole_state_is_saved_and_restored(tmp_path: Any):
    import orbax.checkpoint as ocp

    opt, model = adam_and_model()
    train(opt, model, 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", opt.state)
        checkpointer.wait_until_finished()
        fresh = CrossShardOptimizer(optax.adam(0.1))
        other = nnx.clone(model)
        fresh.build(other)
        fresh.state = checkpointer.restore(tmp_path / "state", fresh.state)
    # The count too: Adam's bias correction would differ without it.
    assert int(optax.tree.get(fresh.state, "count")) == 2
    train(opt, model, 3)
    train(fresh, other, 3)
    same_weights(model, other)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("order", ["optimizer first", "model first"])
def test_deepcopy_and_pickle_work_after_use(how: Any, order: str):
    opt, model = adam_and_model()
    train(opt, model, 2)
    if order == "model first":
        other_model, other = how((model, opt))
    else:
        other, other_model = how((opt, model))
    train(opt, model, 3)
    assert not np.array_equal(other_model.kernel[...], model.kernel[...])
    train(other, other_model, 3)
    same_weights(model, other_model)
    close(other.get_slot(other_model.kernel, "m")[...], opt.get_slot(model.kernel, "m")[...])


@pytest.mark.parametrize("rule", [optax.sgd, optax.adam])
def test_a_gradient_that_autodiff_has_summed_is_refused(rule: Any):
    opt = CrossShardOptimizer(rule(0.1))
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(w: Any, x: Any) -> Any:
        gradients = jax.grad(lambda w: (w["layers"]["kernel"] * x).sum())(w)
        return opt.update(gradients, opt.init(w), w)[0]

    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("shards")), out_specs=P())
    with pytest.raises(crossshard.DoubleReductionError) as caught:
        run({"layers": {"kernel": jnp.ones(3)}}, jnp.ones((8, 3)))
    message = str(caught.value)
    for part in ("`layers/kernel`", "f32[3]", "axis 'shards'", "8 shards", "8 times too large"):
        assert part in message
    assert 'incoming="summed"' in message
    assert "crossshard.value_and_grad" in message


def test_grouped_parameters_are_held_per_shard_and_reading_shows_it():
    w, shared = param(np.zeros(3)), nnx.Variable(jnp.ones(2))
    opt = CrossShardOptimizer(optax.sgd(0.1, 0.9), group_assignment=[[0, 1], [2, 3]])

    @crossshard.shard(num_shards=4)
    def step(x: jax.Array) -> Any:
        return opt.minimize(lambda: (w[...] * x * shared[...].sum()).sum(), var_list=[w])

    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    for _ in range(3):
        step(x)
    assert crossshard.is_per_shard(w)
    assert not crossshard.is_per_shard(shared)
    value = np.asarray(w.get_value())
    assert value.shape == (4, 3)
    close(value[0], value[1])
    close(value[2], value[3])
    assert np.abs(value[0] - value[2]).max() > 0.1
    assert opt.get_slot(w, "momentum").get_value().shape == (4, 3)


# The substrate.


def test_contexts_do_not_nest_and_end_also_after_an_exception():
    assert crossshard.get_shard_context() is None
    with crossshard.shard_context(4) as context:
        assert crossshard.get_shard_context() is context
        assert context.number_of_shards == 4
        with pytest.raises(NotImplementedError), crossshard.shard_context(2):
            pass
        assert crossshard.get_shard_context() is context
    with pytest.raises(ZeroDivisionError), crossshard.shard_context(4):
        _ = 1 / 0
    assert crossshard.get_shard_context() is None


def test_contexts_are_thread_local():
    import threading

    seen = []
    with crossshard.shard_context(4):
        thread = threading.Thread(target=lambda: seen.append(crossshard.get_shard_context()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_outside_of_all_shards_nothing_is_scaled_or_summed():
    opt = sgd()
    with pytest.warns(crossshard.ShardContextWarning):
        updates, _ = opt.update(jnp.float32(3), opt.init(jnp.float32(0)))
    close(updates, -3.0)
    with crossshard.shard_context(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.update(jnp.float32(3), opt.init(jnp.float32(0)))
