"""Bad input gets a sentence: every wrong call with its error's class and what its message names.

Whatever a call does wrong, it leaves the variables, the slots and the contexts as they were.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import sparse
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import (
    CrossShardOptimizer,
    all_to_all,
    collective_permute,
    cross_replica_sum,
)
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    AxisError,
    DoubleReductionError,
    GroupAssignmentError,
    IncomingError,
    NestedContextError,
    NestedReductionError,
    ShardContextError,
    VariableError,
)
from crossshard.nnx import replicate

X = np.arange(24, dtype=np.float32).reshape(8, 3)
PAIRS_OF_SHARDS = [[0, 1], [2, 3], [4, 5], [6, 7]]


class World:
    """What the calls work on, made anew for each."""

    def __init__(self) -> None:
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.w = nnx.Param(jnp.ones(3), name="w")
        self.v = nnx.Param(jnp.ones(3))
        self.whole = nnx.Param(jnp.ones(3, int))
        self.count = nnx.Variable(jnp.array(0))
        self.opt = CrossShardOptimizer(optax.sgd(0.1, momentum=0.9))
        self.opt.build([self.model, self.w, self.v])

    def loss(self) -> jax.Array:
        return (self.w[...] * self.v[...]).sum()

    def look(self) -> Any:
        """Everything that a failed call must leave alone; values by identity."""
        kept = [leaf for _, leaf in nnx.iter_graph(self.model) if isinstance(leaf, nnx.Variable)]
        kept += [self.w, self.v, self.whole, self.count, *self.opt.variables()]
        return (
            [(id(v), id(v.get_raw_value()), dict(v.get_metadata())) for v in kept],
            self.opt.get_slot_names(),
            crossshard.get_shard_context(),
        )


def alone(function: Callable[[World], Any]) -> Callable[[World], Any]:
    """The call in a context of one shard, where nothing warns."""

    def call(world: World) -> Any:
        with crossshard.shard_context(1):
            return function(world)

    return call


def compute(loss: Any = None, var_list: Any = None, **kwargs: Any) -> Callable[[World], Any]:
    """``compute_gradients`` with one thing wrong; callables are given the world."""

    def call(world: World) -> Any:
        given = var_list(world) if callable(var_list) else var_list
        wrong = world.loss if loss is None else loss(world)
        return world.opt.compute_gradients(wrong, [world.w] if given is None else given, **kwargs)

    return alone(call)


def apply(pairs: Callable[[World], Any], **kwargs: Any) -> Callable[[World], Any]:
    return alone(lambda world: world.opt.apply_gradients(pairs(world), **kwargs))


def with_assigned_rate(world: World) -> None:
    opt = CrossShardOptimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    opt.build([world.w])
    opt.state.inner_state.hyperparams["learning_rate"] = 0.5
    opt.minimize(world.loss, var_list=[world.w])


def with_rule(rule: Any) -> Callable[[World], Any]:
    """A whole step with another rule, which cannot have variables for slots."""
    return alone(
        lambda world: CrossShardOptimizer(rule()).minimize(world.loss, var_list=[world.w, world.v])
    )


def in_step(function: Callable[..., Any]) -> Callable[[World], Any]:
    """The call in a step of two shards that is handed the variables and the optimizer."""

    def call(world: World) -> Any:
        step = lambda w, v, opt, x: function(world, x)
        return crossshard.shard(num_shards=2)(step)(world.w, world.v, world.opt, X)

    return call


def on_shards(function: Callable[..., Any], number: int = 8) -> Callable[[World], Any]:
    """The call on each row of X, in shards that vmap simulates."""
    return lambda world: jax.vmap(function, axis_name="shards")(X[:number])


def on_mesh(
    function: Callable[..., Any], *, check_vma: bool = True, axes: tuple[str, ...] = ("shards",)
) -> Callable[[World], Any]:
    """The call on each row of X, in shard_map."""

    def call(world: World) -> Any:
        sizes = (2, 4)[: len(axes)] if len(axes) > 1 else (8,)
        mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
        run = jax.shard_map(
            function, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=check_vma
        )
        return run(X)

    return call


def update(gradient: Any, **kwargs: Any) -> Any:
    options = {key: kwargs.pop(key) for key in ("axis_name", "group_assignment") if key in kwargs}
    opt = CrossShardOptimizer(optax.sgd(1.0), **options)
    return opt.update(gradient, opt.init(jnp.zeros(3)), **kwargs)[0]


def optimizer_of(module: str, name: str) -> Any:
    """An instance of a class that claims to come from another library."""
    return type(name, (), {"__module__": module})()


def run(*args: Any, **kwargs: Any) -> Callable[[World], Any]:
    return lambda world: crossshard.shard(lambda *inputs: inputs[0], *args, **kwargs)


def nested_contexts(world: World) -> None:
    with crossshard.shard_context(8), crossshard.shard_context(2):
        pass


def runner_in_context(world: World) -> None:
    with crossshard.shard_context(8):
        crossshard.shard(lambda x: x, [X], num_shards=2)


def runner_in_runner(world: World) -> None:
    inner = crossshard.shard(num_shards=2)(lambda x: x)
    crossshard.shard(lambda x: inner(x), [X], num_shards=2)


def compute_under_eight_apply_outside(world: World) -> None:
    with crossshard.shard_context(8):
        pairs = world.opt.compute_gradients(world.loss, [world.w])
    with crossshard.shard_context(1):
        world.opt.apply_gradients(pairs)


def eight_shards_and_no_axis(world: World) -> None:
    with crossshard.shard_context(8):
        world.opt.minimize(world.loss, var_list=[world.w])


def a_context_of_three_over_eight(world: World) -> None:
    with crossshard.shard_context(3):
        jax.vmap(update, axis_name="shards")(X)


def an_optimizer_out_of_reach(world: World) -> None:
    hidden = {"opt": CrossShardOptimizer(optax.adam(0.1))}.get
    step = lambda w, v, x: hidden("opt").minimize(world.loss, var_list=[w])
    crossshard.shard(num_shards=2)(step)(world.w, world.v, X)


def differing_on_two_used_on_four(world: World) -> None:
    other = nnx.Param(jnp.zeros(3))

    def differ(variable: nnx.Variable, x: Any) -> None:
        variable[...] = x[0]

    crossshard.shard(num_shards=2)(differ)(other, X)
    crossshard.shard(num_shards=4)(lambda variable, x: None)(other, X)


def vmap_inside_types(x: Any) -> Any:
    return jax.vmap(lambda row: update(row, axis_name="rows"), axis_name="rows")(x)


def bad(name: str, call: Any, error: type, builtin: type, *names: str) -> Any:
    return pytest.param(call, error, builtin, names, id=name)


def new(*args: Any, **kwargs: Any) -> Callable[[World], Any]:
    return lambda world: CrossShardOptimizer(*(args or (optax.sgd(0.1),)), **kwargs)


VALUE = (ArgumentError, ValueError)
TYPE = (ArgumentTypeError, TypeError)
GROUPS = (GroupAssignmentError, ValueError)
VARIABLE = (VariableError, ValueError)
CONTEXT = (ShardContextError, RuntimeError)
NESTED = (NestedContextError, NotImplementedError)

# fmt: off

CONSTRUCTOR = [
    bad("a number for an optimizer", new(3), *TYPE, "int", "(3)", "no init and no update"),
    bad("an uncalled factory", new(optax.adamw), *TYPE, "adamw(learning_rate)", "Call it"),
    bad("nnx.Optimizer",
        lambda world: CrossShardOptimizer(
            nnx.Optimizer(world.model, optax.sgd(0.1), wrt=nnx.Param)),
        *TYPE, "got Optimizer", "Pass its .tx"),
    bad("torch's SGD", new(optimizer_of("torch.optim.sgd", "SGD")), *TYPE,
        "PyTorch's SGD", "optax.sgd"),
    bad("tensorflow's GradientDescentOptimizer",
        new(optimizer_of("tensorflow.python.training.sgd", "GradientDescentOptimizer")),
        *TYPE, "TensorFlow's GradientDescentOptimizer", "optax.sgd"),
    bad("a wrapper in a wrapper", lambda world: CrossShardOptimizer(world.opt),
        NestedReductionError, ValueError, "CrossShardOptimizer(", "twice", "Wrap its .inner"),
    bad("reduction='avg'", new(reduction="avg"), *VALUE, "'avg'", "weighted_sum", "weighted_mean"),
    bad("an empty name", new(name=""), *VALUE, "name must not be empty"),
    bad("name=3", new(name=3), *TYPE, "3 (int)", "string"),
    bad("axis_name=3", new(axis_name=3), *TYPE, "axis_name", "got 3"),
    bad("incoming='nonsense'", new(incoming="nonsense"), *VALUE, "'nonsense'", "'local'"),
    bad("an unknown keyword", new(reductoin="sum"), TypeError, TypeError, "reductoin"),
]

CONTEXTS = [
    *(
        bad(f"{what} of {number!r}", call(number), *error, "num_shards", "at least 1", repr(number))
        for number, error in [
            (0, VALUE), (-3, VALUE), ("x", TYPE), (2.5, TYPE), (True, TYPE), (None, TYPE),
        ]
        for what, call in [
            ("a runner", lambda number: run([X], num_shards=number)),
            ("a context", lambda number: lambda _: crossshard.shard_context(number).__enter__()),
        ]
    ),
    bad("9 shards on 8 devices", run([X], num_shards=9), *VALUE, "9 shards", "there are 8",
        "cpu_devices(9)"),
    bad("contexts nested", nested_contexts, *NESTED, "of 2", "of 8", "leave the outer one"),
    bad("a runner in a context", runner_in_context, *NESTED, "over 2 shards", "of 8"),
    bad("a runner in a runner", runner_in_runner, *NESTED, "over 2 shards", "Call it outside"),
    bad("computed under 8, applied outside", compute_under_eight_apply_outside, *CONTEXT,
        "'w' float32[3]", "under 8 shards", "under 1", "in the same step"),
    bad("8 shards and no axis", eight_shards_and_no_axis, *CONTEXT, "8 shards", "no mesh axis",
        "crossshard.shard(num_shards=8)"),
    bad("a context that contradicts the axis", a_context_of_three_over_eight, *CONTEXT,
        "3 shards", "'shards' (8)"),
    bad("cpu_devices(9) after the start", lambda world: crossshard.cpu_devices(9), *CONTEXT,
        "9 CPU devices", "with 8", "before the first JAX operation"),
]

RUNNERS = [
    bad("an uneven split", run([X], num_shards=3), *VALUE, "input 0", "(8, 3)", "length 8",
        "evenly over 3"),
    bad("axes for other inputs", run([X], num_shards=2, input_shard_axes=[0, 0]), *VALUE,
        "2 entries for 1 inputs", "one per input"),
    bad("inputs of other lengths", run([X, np.concatenate([X, X])], num_shards=2), *VALUE,
        "input 0 and input 1", "rows of its own"),
    bad("an axis that is not there", run([X], num_shards=2, input_shard_axes=[5]), *VALUE,
        "input 0", "no axis 5"),
    bad("3 shards on a mesh of 2", run([X], 3, mesh=jax.make_mesh((2,), "a")), *VALUE, "3", "2"),
    bad("an array and a variable", run([[X, nnx.Param(X)]], num_shards=2), *VALUE, "two arguments"),
    bad("a module as an output", lambda world: crossshard.shard(lambda x: world.model, [X], 2),
        *TYPE, "returned a Linear"),
    bad("inputs that are a tuple", run((X,), num_shards=2), *TYPE, "must be a list", "tuple"),
    bad("a scalar", run([X, 0.1], num_shards=2), *VALUE, "input 1 is a scalar",
        "None in input_shard_axes"),
    bad("an array and a string", run([{"x": X, "mode": "train"}], num_shards=2), *TYPE,
        "input 0['mode']", "str", "of its own"),
    bad("an array and a module",
        lambda world: crossshard.shard(lambda one: None, [{"x": X, "m": world.model}], 2),
        *VALUE, "Linear", "two arguments"),
    bad("an output axis that is not there", run([X], num_shards=2, output_shard_axes=[7]), *VALUE,
        "axis 7", "(4, 3)"),
    bad("a computation that is an array", lambda world: crossshard.shard(X, [X], 2), *TYPE,
        "must be a function"),
    bad("inputs and no computation", lambda world: crossshard.shard(inputs=[X]), *TYPE,
        "no computation"),
    bad("a step without inputs", lambda world: crossshard.shard(lambda x: x, num_shards=2), *TYPE,
        "takes (x)", "shard(num_shards=2)(<lambda>)"),
    bad("an output that is a string", lambda world: crossshard.shard(lambda x: "done", [X], 2),
        *TYPE, "returned a str", "arrays"),
    bad("no replicas", lambda world: replicate(lambda x: x, []), *VALUE, "one list per"),
    bad("replicas of different arity",
        lambda world: replicate(lambda *x: x, [[1.0], [1.0, 2.0]]), *VALUE, "[1, 2]"),
    bad("replicas of different shapes", lambda world: replicate(lambda x: x, [[X], [X[:2]]]),
        *VALUE, "Argument 0", "same structure and shapes"),
    bad("per-shard variables on another number of shards", differing_on_two_used_on_four,
        *VARIABLE, "Param float32[2,3]", "between 2 shards", "runs on 4", "set_value"),
]

COMPUTE = [
    bad("a loss that is an array", compute(lambda world: world.loss()), *TYPE,
        "function without arguments", "lambda:"),
    bad("a loss that is no scalar", compute(lambda world: lambda: world.w[...]), *VALUE,
        "float32[3]", "jnp.mean", "jnp.sum"),
    bad("a loss that is an int", compute(lambda world: lambda: jnp.array(3)), *TYPE,
        "floating scalar", "int32[]"),
    bad("a loss with aux", compute(lambda world: lambda: (world.loss(), 1)), *TYPE, "tuple"),
    bad("no variables", compute(var_list=[]), *VALUE, "No variables to optimize."),
    bad("an int variable", compute(var_list=lambda world: [world.whole]), *VARIABLE,
        "Param int32[3]", "must be floating"),
    bad("a rate that was assigned", alone(with_assigned_rate), *VARIABLE, "0.5 (float)",
        "['learning_rate'][...] = value"),
    bad("the same variable twice", compute(var_list=lambda world: [world.w, world.v, world.w]),
        *VARIABLE, "Param 'w' float32[3]", "twice"),
    bad("variables by name", compute(var_list="w"), *TYPE, "str", "'w'", "list of nnx variables"),
    bad("an array for a variable", compute(var_list=lambda world: [world.w, world.v[...]]), *TYPE,
        "item 1", "nnx"),
    bad("gate_gradients=3", compute(gate_gradients=3), *VALUE, "gate_gradients", "got 3"),
    bad("grad_loss that is no scalar", compute(grad_loss=jnp.ones(3)), *VALUE, "grad_loss",
        "float32[3]"),
]

ONES = jnp.ones(3)

APPLY = [
    bad("no pairs", apply(lambda world: []), *VALUE, "No variables provided."),
    bad("only None", apply(lambda world: [(None, world.w)]), *VALUE,
        "No gradients provided for any variable", "'w' float32[3]"),
    bad("one of one", apply(lambda world: [(1.0,)]), *VALUE, "pair; got (1.0,)"),
    bad("one that is no pair", apply(lambda world: [(ONES, world.w), world.v]), *VALUE, "pair",
        "Param"),
    bad("swapped", apply(lambda world: [(world.w, ONES)]), *VARIABLE, "swapped"),
    bad("given twice", apply(lambda world: [(ONES, world.w), (None, world.w)]), *VARIABLE,
        "'w' float32[3]", "twice"),
    bad("another shape", apply(lambda world: [(jnp.ones(4), world.w)]), *VARIABLE,
        "'w' float32[3]", "shape (4,)"),
    bad("an integer gradient", apply(lambda world: [(jnp.ones(3, int), world.w)]), *TYPE,
        "'w' float32[3]", "int32", "floating"),
    bad("a gradient that is a variable", apply(lambda world: [(world.v, world.w)]), *TYPE,
        "must be an array", "Param"),
    bad("a sparse gradient", apply(lambda world: [(sparse.BCOO.fromdense(ONES), world.w)]), *TYPE,
        "'w' float32[3]", "BCOO", "todense()"),
    bad("global_step=0", apply(lambda world: [(ONES, world.w)], global_step=0), *TYPE,
        "global_step", "got 0", "nnx.Variable(jnp.array(0))"),
    bad("a floating global_step",
        alone(lambda world: world.opt.apply_gradients([(ONES, world.w)], global_step=world.v)),
        *TYPE, "global_step", "float32[3]"),
    bad("incoming='nonsense' in apply_gradients",
        apply(lambda world: [(ONES, world.w)], incoming="nonsense"), *VALUE, "'nonsense'",
        "'scaled'"),
    bad("a rule whose state changes", with_rule(lambda: optax.monitor({"n": optax.tree.norm})),
        *VALUE, "monitor changed its structure", "Optax idiom"),
    bad("a gradient of unknown origin",
        in_step(lambda world, x: world.opt.apply_gradients([(x[0], world.w)])),
        IncomingError, ValueError, "'w' float32[3]", "divided by 2", "incoming='local'",
        "'scaled'", "which is what TensorFlow's", "'reduced' if you have summed them"),
    bad("each shard's own gradient, declared summed",
        in_step(lambda world, x: world.opt.apply_gradients([(x[0], world.w)], incoming="summed")),
        *VARIABLE, "'w' float32[3]", "over all 2", "incoming='summed' or 'reduced': write 'local'"),
    bad("an optimizer out of reach", an_optimizer_out_of_reach, *VARIABLE, "CrossShardOptimizer(",
        "'w' float32[3]", "as arguments"),
]

UPDATE = [
    bad("summed by autodiff", on_mesh(lambda x: update(lax.psum(x[0], "shards"))),
        DoubleReductionError, ValueError, "(f32[3])", "axis 'shards'", "8 shards",
        "8 times too large", "crossshard.value_and_grad", 'incoming="summed"'),
    bad("declared summed and is not", on_mesh(lambda x: update(x, incoming="summed")),
        IncomingError, ValueError, "is varying over", "'shards'", "summed again",
        "this shard's own gradient, write incoming='local'"),
    bad("incoming='summed' with groups",
        on_shards(lambda x: update(x, incoming="summed", group_assignment=PAIRS_OF_SHARDS)),
        IncomingError, ValueError, "over all 8 shards", "groups", "value_and_grad",
        "cannot be recovered from the total"),
    bad("several axes and none named", on_mesh(update, axes=("slice", "shard")),
        AxisError, ValueError, "'slice' (2)", "'shard' (4)", "axis_name="),
    bad("an axis that is not bound", on_mesh(lambda x: update(x, axis_name="data")),
        AxisError, ValueError, "'data'", "'shards' (8)", "axis_name='shards'"),
    bad("an axis of vmap inside check_vma", on_mesh(vmap_inside_types),
        AxisError, ValueError, "'rows'", "check_vma=False"),
    bad("groups for four on eight shards",
        on_shards(lambda x: update(x, group_assignment=[[0, 1], [2, 3]])),
        *GROUPS, "range(8)", "[[0, 1], [2, 3]]"),
    bad("an integer leaf", on_shards(lambda x: update({"a": x, "b": jnp.arange(3)})), *TYPE, "`b`",
        "int32", "floating"),
    bad("a sparse leaf", alone(lambda world: update({"a": sparse.BCOO.fromdense(ONES)})), *TYPE,
        "`a`", "BCOO", "todense()"),
    bad("a wrapper updated in a wrapper's update",
        alone(lambda world: CrossShardOptimizer(optax.chain(optax.sgd(0.1), world.opt)).update(
            ONES, crossshard.CrossShardState(
                inner_state=(optax.sgd(0.1).init(ONES), world.opt.init(ONES))))),
        NestedReductionError, ValueError, "twice", ".inner"),
    bad("a loss that is no scalar, for value_and_grad",
        lambda world: crossshard.grad(lambda w: w)(ONES), *VALUE, "scalar", "(3,)", "jnp.mean"),
    bad("argnums that are not there",
        lambda world: crossshard.grad(lambda w: w.sum(), argnums=1)(ONES), *VALUE, "argument 1",
        "1 positional"),
]

COLLECTIVES = [
    bad("a sum of strings", on_shards(lambda x: cross_replica_sum("x")), *TYPE,
        "cross_replica_sum", "str"),
    bad("a sum of bools", on_shards(lambda x: cross_replica_sum(x > 0)), *TYPE, "bool"),
    bad("a sum over groups that overlap", on_shards(lambda x: cross_replica_sum(x, [[0, 0]])),
        *GROUPS, "more than once"),
    bad("a sum over an axis that is not bound",
        on_shards(lambda x: cross_replica_sum(x, axis_name="data")), AxisError, ValueError,
        "'data'", "'shards' (8)"),
    bad("a count that is not the group's", on_shards(lambda x: all_to_all(x, 0, 0, 3)), *VALUE,
        "split_count", "8", "got 3"),
    bad("a count of a group that is not the group's",
        on_shards(lambda x: all_to_all(x, 0, 0, 8, PAIRS_OF_SHARDS)), *VALUE, "2", "got 8"),
    bad("a dimension that the count does not divide",
        on_shards(lambda x: all_to_all(x, 0, 0, 2, PAIRS_OF_SHARDS)), *VALUE, "split_dimension 0",
        "(3,)", "length 3"),
    bad("a dimension that is not there", on_shards(lambda x: all_to_all(x, 5, 0, 8)), *VALUE,
        "concat_dimension 5", "(3,)"),
    bad("a target out of range", on_shards(lambda x: collective_permute(x, [[0, 8]])), *VALUE,
        "target 8", "0 to 7"),
    bad("a source twice", on_shards(lambda x: collective_permute(x, [[0, 1], [0, 2]])), *VALUE,
        "source twice", "[0, 2]"),
    bad("a target twice", on_shards(lambda x: collective_permute(x, [[0, 1], [2, 1]])), *VALUE,
        "target twice", "[2, 1]"),
    bad("pairs that are no pairs", on_shards(lambda x: collective_permute(x, [[0, 1, 2]])), *TYPE,
        "source_target_pairs", "[0, 1, 2]"),
    bad("a permutation without shards",
        alone(lambda world: collective_permute(X, [[0, 1]])), *VALUE, "target 1", "0 to 0"),
]
# fmt: on

TABLE = [*CONSTRUCTOR, *CONTEXTS, *RUNNERS, *COMPUTE, *APPLY, *UPDATE, *COLLECTIVES]


def test_the_table_is_long_enough():
    assert len({case.id for case in TABLE}) == len(TABLE) >= 45


@pytest.mark.parametrize(("call", "error", "builtin", "names"), TABLE)
def test_a_wrong_call(call: Any, error: type, builtin: type, names: tuple[str, ...]):
    world = World()
    before = world.look()
    with pytest.raises(error) as caught:
        call(world)
    assert isinstance(caught.value, builtin)
    message = str(caught.value)
    for name in names:
        assert name in message
    assert world.look() == before


def test_after_a_wrong_call_the_right_one_works():
    world = World()
    for case in [*APPLY, *COMPUTE]:
        with contextlib.suppress(crossshard.CrossshardError, TypeError):
            case.values[0](world)
    step = in_step(lambda world, x: world.opt.minimize(world.loss, var_list=[world.w]))
    np.testing.assert_array_equal(step(world), [3.0, 3.0])
    np.testing.assert_allclose(world.w[...], 0.9 * np.ones(3), rtol=1e-6)
