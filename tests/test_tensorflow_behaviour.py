"""The behaviour of ``tf.compat.v1.tpu.CrossShardOptimizer``: what is kept, mended or refused."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer, Reduction, tf1
from crossshard.errors import (
    ArgumentTypeError,
    IncomingError,
    ShardContextWarning,
    VariableTypeError,
)

ATOL = {"rtol": 0, "atol": 1e-6}


def sgd(**kwargs: Any) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.sgd(1.0), **kwargs)


def param(value: Any = 2.0) -> nnx.Param:
    return nnx.Param(jnp.asarray(value, jnp.float32))


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), **ATOL)


# The constructor.


def test_reductions():
    for given in ("weighted_sum", "sum", Reduction.SUM):
        assert sgd(reduction=given).reduction is Reduction.SUM
    for given in ("weighted_mean", "mean", Reduction.MEAN):
        assert sgd(reduction=given).reduction is Reduction.MEAN
    others = (Reduction.NONE, Reduction.SUM_OVER_BATCH_SIZE, Reduction.SUM_BY_NONZERO_WEIGHTS)
    for refused in (*others, "avg", 1, None):
        with pytest.raises(ValueError, match=r"weighted_sum.*weighted_mean.*received") as caught:
            # Before the optimizer is looked at.
            CrossShardOptimizer("no optimizer", reduction=refused)
        assert repr(refused) in str(caught.value)


def test_reduction_carries_tensorflows_values():
    assert [str(r) for r in Reduction] == [
        "none",
        "weighted_sum",
        "weighted_sum_over_batch_size",
        "weighted_mean",
        "weighted_sum_by_nonzero_weights",
    ]
    assert Reduction.SUM_OVER_NONZERO_WEIGHTS is Reduction.SUM_BY_NONZERO_WEIGHTS


# compute_gradients.


def test_without_a_context_one_shard_is_assumed_with_a_warning():
    w = param()
    with pytest.warns(ShardContextWarning, match="assuming 1 shard"):
        ((gradient, _),) = sgd().compute_gradients(lambda: w[...] * 3, [w])
    close(gradient, 3.0)


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


def test_keywords_of_the_wrapped_optimizer_and_nothing_of_the_callers_is_changed():
    w, data = param(), np.array([1.0, 2.0], np.float32)
    ignored = {"aggregation_method": 2, "colocate_gradients_with_ops": True}
    keywords = ignored | {"gate_gradients": CrossShardOptimizer.GATE_GRAPH, "grad_loss": 8.0}
    with crossshard.shard_context(4):
        for given, expected in (({}, 0.75), (keywords, 6.0)):
            pairs = sgd().compute_gradients(lambda: w[...] * data.sum(), [w], **given)
            close(pairs[0][0], expected)
    assert data.tolist() == [1.0, 2.0]
    close(w[...], 2.0)


def test_gradients_are_local_pairs_and_none_where_the_loss_does_not_reach():
    w, unused = param(), param()

    @crossshard.shard(num_shards=4)
    def step(w: Any, unused: Any, x: jax.Array) -> Any:
        pairs = sgd().compute_gradients(lambda: w[...] * x[0], [w, unused])
        assert isinstance(pairs, list)
        assert pairs[1][0] is None
        assert pairs[1][1] is unused
        return pairs[0][0]

    close(step(w, unused, np.arange(4.0, dtype=np.float32)), np.arange(4) / 4)


def test_without_a_list_there_is_none_outside_of_a_step():
    # Which those are, nothing says outside of a step.
    w = param()
    with crossshard.shard_context(1), pytest.raises(ValueError, match="var_list=model"):
        sgd().compute_gradients(lambda: w[...])


@pytest.mark.parametrize("given", [[jnp.ones(3)], "w", ["w"], [None], {"w": 1}, 3, [object()]])
def test_what_is_no_variable_is_a_type_error_and_a_value_error(given: Any):
    opt, w = sgd(), param()
    loss = lambda: w[...] * 1.0
    with crossshard.shard_context(1):
        for call in (
            lambda: opt.minimize(loss, var_list=given),
            lambda: opt.compute_gradients(loss, given),
            lambda: opt.build(given),
        ):
            with pytest.raises(VariableTypeError, match="list of nnx variables; item 0") as caught:
                call()
            assert isinstance(caught.value, ValueError)
            assert isinstance(caught.value, TypeError)
            assert isinstance(caught.value, ArgumentTypeError)


# apply_gradients.


def test_gradients_are_summed_over_the_group_and_none_passes_through():
    w, unused = param(np.zeros(())), param(5.0)
    opt = sgd(group_assignment=[[0, 2], [1, 3]])

    @crossshard.shard(num_shards=4)
    def step(w: Any, unused: Any, opt: Any, x: jax.Array) -> None:
        opt.apply_gradients(opt.compute_gradients(lambda: w[...] * x[0], [w, unused]))

    step(w, unused, opt, np.arange(4.0, dtype=np.float32))
    close(w.get_value(), [-1.0, -2.0, -1.0, -2.0])
    close(unused.get_value(), 5.0)


def test_gradients_of_unknown_origin_are_refused_under_mean():
    w = param(np.zeros(()))
    opt = sgd()

    def run(incoming: str | None, opt: CrossShardOptimizer = opt) -> Any:
        def step(w: nnx.Param, opt: CrossShardOptimizer, x: jax.Array) -> None:
            opt.apply_gradients([(x[0], w)], incoming=incoming)

        w.set_value(jnp.zeros(()))
        crossshard.shard(num_shards=4)(step)(w, opt, np.arange(4.0, dtype=np.float32))
        return w.get_value()

    with pytest.raises(IncomingError, match="compute_gradients"):
        run(None)
    close(w.get_value(), 0.0)
    close(run("local"), -1.5)
    close(run("scaled"), -6.0)
    close(run(None, sgd(reduction="sum")), -6.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_step_reads_the_loss_that_it_took_without_running_the_model_again(reduction: str):
    model, opt = nnx.BatchNorm(2, momentum=0.9, rngs=nnx.Rngs(0)), sgd(reduction=reduction)
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)

    @crossshard.shard(num_shards=4)
    def step(model: nnx.BatchNorm, opt: CrossShardOptimizer, x: jax.Array) -> Any:
        before = opt.loss
        pairs = opt.compute_gradients(lambda: (model(x) * x).mean(), var_list=model)
        opt.apply_gradients(pairs)
        assert before is None
        return opt.loss

    each = rows.reshape(4, 2, 2)
    for number in (1, 2):
        nnx.update(model, {"scale": jnp.ones(2), "bias": jnp.zeros(2)})
        losses = step(model, opt, rows)
        normal = (each - each.mean(1, keepdims=True)) / np.sqrt(each.var(1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(losses, (normal * each).mean((1, 2)), rtol=1e-4)
        means = (1 - 0.9**number) * each.mean(1)
        np.testing.assert_allclose(model.mean.get_value().array, means, rtol=1e-5)
    assert opt.loss is None  # outside of a step

    w = param(np.ones(2))

    @jax.jit
    def alone(x: jax.Array) -> Any:
        with crossshard.shard_context(1):
            opt.compute_gradients(lambda: (w[...] * x).sum(), var_list=[w])
        return opt.loss

    assert alone(rows) == rows.sum()
    assert opt.loss is None  # and no tracer of that one


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_that_the_step_has_summed_itself_are_applied_as_they_are(reduction: str):
    # As programs do that sum in bfloat16, or clip the sum, and have an optimizer without a wrapper.
    w, opt = param(np.zeros(())), sgd(reduction=reduction)

    @crossshard.shard(num_shards=4)
    def step(w: nnx.Param, opt: CrossShardOptimizer, x: jax.Array) -> None:
        gradient = crossshard.grad(lambda w: w[...] * x[0] / 4)(w)[...]
        gradient = crossshard.cross_replica_sum(gradient.astype(jnp.bfloat16))
        opt.apply_gradients([(gradient.astype(jnp.float32), w)], incoming="reduced")

    step(w, opt, np.arange(4.0, dtype=np.float32))
    close(w.get_value(), -1.5)


def averaged(x: np.ndarray) -> jax.Array:
    """What a variable of this dtype is after a step of -1 along the mean of the rows."""
    w, opt = nnx.Param(jnp.zeros(x.shape[1:], x.dtype)), sgd()
    apply = lambda w, opt, x: opt.apply_gradients([(x[0], w)], incoming="local")
    crossshard.shard(apply, [w, opt, x], num_shards=8)
    assert w.get_value().dtype == x.dtype
    return w.get_value()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_floating_dtypes_are_reduced_in_their_own(dtype: Any):
    # Eight times 20,000 overflows f16 before the division.
    w = averaged(np.full((8, 2), 20_000, np.dtype(dtype)))
    np.testing.assert_allclose(np.asarray(w, np.float32), -20_000, rtol=4e-3)


# The rest.


def test_minimize_takes_tensorflows_arguments_in_their_order():
    import inspect

    names = (
        "loss global_step var_list gate_gradients aggregation_method colocate_gradients_with_ops "
        "name grad_loss"
    ).split()
    assert list(inspect.signature(CrossShardOptimizer.minimize).parameters)[1:] == names


def test_gates_and_kind():
    assert (sgd().GATE_NONE, sgd().GATE_OP, sgd().GATE_GRAPH) == (0, 1, 2)
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


def test_the_wrapped_optimizer_can_be_reached_and_read():
    inner = optax.sgd(0.1)
    opt = CrossShardOptimizer(inner, "sum", group_assignment=[[0, 1]])
    assert opt.inner is inner
    assert (opt.group_assignment, sgd().group_assignment) == ([[0, 1]], None)
    assert "SUM" in repr(opt)
    assert "[[0, 1]]" in repr(opt)
    assert "optax" in repr(opt)


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


def test_contexts_under_their_own_names():
    # The original always has a context; nested ones and numbers below 1 it refuses.
    assert tf1.get_tpu_context().number_of_shards is None
    with tf1.tpu_shard_context(4):
        assert tf1.get_tpu_context().number_of_shards == 4
        assert crossshard.get_shard_context().number_of_shards == 4
        with pytest.raises(NotImplementedError), tf1.tpu_shard_context(number_of_shards=2):
            pass
    assert tf1.get_tpu_context().number_of_shards is None
    with pytest.raises(ValueError, match="at least 1"), tf1.tpu_shard_context(0):
        pass
    assert tf1.cross_replica_sum is crossshard.cross_replica_sum
    assert tf1.Reduction is Reduction


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cross_replica_sum", lambda: tf1.cross_replica_sum(np.float32(3))),
        ("all_to_all", lambda: tf1.all_to_all(np.ones(2, np.float32), 0, 0, 1)),
        ("collective_permute", lambda: tf1.collective_permute(np.float32(3), [[0, 0]])),
    ],
)
def test_a_collective_outside_of_all_shards_warns_of_itself(name: str, call: Any):
    with pytest.warns(ShardContextWarning, match=rf"^{name} should be .* assuming 1 shard") as told:
        call()
    assert len(told) == 1


def test_outside_of_all_shards_nothing_is_scaled_or_summed():
    opt = sgd()
    with pytest.warns(ShardContextWarning):
        updates, _ = opt.update(jnp.float32(3), opt.init(jnp.float32(0)))
    close(updates, -3.0)
    with crossshard.shard_context(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.update(jnp.float32(3), opt.init(jnp.float32(0)))
