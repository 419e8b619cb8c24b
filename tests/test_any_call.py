"""Any call with a bad value: it is right, or raises an error of ours that says what was wrong.

The calls are not listed. They are made of the public names, of their parameters, and of one table
of bad values, so that a new function is tried as soon as it is public. What a parameter that must
be given is otherwise is in ``GOOD``, by its name.
"""

import collections
import contextlib
import dataclasses
import decimal
import enum
import functools
import importlib
import inspect
import random
import traceback
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer, TrainStep, make_train_step
from crossshard.errors import CrossshardError
from crossshard.pipeline import Aggregator, Options, Stage
from crossshard.step import StepOptions
from tests.quick import deep
from tests.test_public_surface import PUBLIC, RETURNED


def deleted() -> jax.Array:
    x = jnp.ones((8, 3))
    x.delete()
    return x


# Made anew for each call.
BAD: dict[str, Callable[[], Any]] = {
    repr(value): functools.partial(lambda value: value, value)
    for value in [
        *(None, True, False, 0, -1, 3, 100, 2**31, 10**30, -(10**30), 0.5, 1e300, 1j),
        *(float("nan"), float("inf"), -float("inf"), decimal.Decimal("0.5")),
        *("", "8", "\0", "a\0b", "\ud800", "x" * 10_000, b"8", ..., int),
        *((), (0,), (None,), frozenset(), range(3), slice(None)),
    ]
} | {
    "object()": object,
    "[]": list,
    "{}": dict,
    "[[]]": lambda: [[]],
    "[0]": lambda: [0],
    "['x']": lambda: ["x"],
    "{'x': 'y'}": lambda: {"x": "y"},
    "{0: 1}": lambda: {0: 1},
    "a generator": lambda: (i for i in ["x"]),
    "bytearray": lambda: bytearray(8),
    "float32 nan": lambda: np.float32("nan"),
    "float32 2.5": lambda: np.float32(2.5),
    "an array": lambda: np.ones((8, 3), np.float32),
    "an empty array": lambda: np.ones((0, 3), np.float32),
    "a scalar array": lambda: jnp.float32(1),
    "big-endian": lambda: np.ones((8, 3), ">f4"),
    "masked": lambda: np.ma.masked_array(np.ones((8, 3), np.float32), mask=np.eye(8, 3)),
    "float128": lambda: np.ones((8, 3), np.longdouble),
    "objects": lambda: np.array([[None] * 3] * 8),
    "words": lambda: np.array(["a"] * 8),
    "dates": lambda: np.array(["2020-01-01"] * 8, "datetime64[D]"),
    "records": lambda: np.zeros(8, [("a", "f4")]),
    "complex": lambda: np.ones((8, 3), np.complex64),
    "bools": lambda: np.ones((8, 3), bool),
    "a type of an array": lambda: jax.ShapeDtypeStruct((8, 3), jnp.float32),
    "deleted": deleted,
    "a key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(0), 8),
    "a variable": lambda: nnx.Param(jnp.ones(3)),
    "a module": lambda: nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
    "a state": lambda: a_step().init(jnp.ones(3)),
    "an optimizer": lambda: optax.sgd(0.1),
    "a spec": lambda: jax.sharding.PartitionSpec("x"),
}


def loss_fn(w: jax.Array, batch: jax.Array) -> jax.Array:
    return ((batch @ w) ** 2).mean()


def rows() -> np.ndarray:
    return np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


@functools.cache
def a_step() -> TrainStep:
    return make_train_step(loss_fn, optax.sgd(0.1, 0.9), num_shards=2, donate=False)


@functools.cache
def a_state() -> Any:
    return a_step()(a_step().init(jnp.ones(3)), rows())[0]


def an_optimizer() -> CrossShardOptimizer:
    opt = CrossShardOptimizer(optax.sgd(0.1, 0.9))
    opt.build([W])
    return opt


W = nnx.Param(jnp.ones(3))

# By the name of a parameter, or of a function's parameter where the name means something else.
GOOD: dict[str, Callable[[], Any]] = {
    "loss_fn": lambda: loss_fn,
    "optimizer": lambda: optax.sgd(0.1),
    "opt": lambda: optax.sgd(0.1),
    "num_shards": lambda: 2,
    "params": lambda: jnp.ones(3),
    "state": a_state,
    "batch": rows,
    "batches": lambda: [rows()],
    "metric_fn": lambda: lambda w, batch: batch @ w,
    "predict_fn": lambda: lambda w, batch: batch @ w,
    "loss": lambda: lambda: (W[...] ** 2).sum(),
    "grads_and_vars": lambda: [(jnp.ones(3), W)],
    "var_list": lambda: [W],
    "CrossShardOptimizer.compute_gradients.var_list": lambda: [W],
    "CrossShardOptimizer.minimize.var_list": lambda: [W],
    "Checkpoints.restore.step": lambda: 1,
    "Checkpoints.restore_params.step": lambda: 1,
    "var": lambda: W,
    "variable": lambda: nnx.Param(jnp.ones(3)),
    "node": lambda: nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
    "name": lambda: "momentum",
    "total": lambda: jnp.float32(3),
    "count": lambda: jnp.float32(3),
    "dtype": lambda: "int8",
    "x": lambda: jnp.ones((2, 3)),
    "concat_dimension": lambda: 0,
    "split_dimension": lambda: 0,
    "split_count": lambda: 2,
    "source_target_pairs": lambda: [[0, 1], [1, 0]],
    "num_devices": lambda: 2,
    "fun": lambda: lambda w: (w**2).sum(),
    "function": lambda: lambda x: x,
    "computation": lambda: lambda *x: x[0],
    "verify.batch": lambda: (jnp.ones(3), rows()),
    "ShardedFunction.__call__.args": lambda: (rows(),),
    "replicate.inputs": lambda: [[rows()], [rows()]],
    "rewrite.inputs": lambda: [rows()],
    "shard.inputs": lambda: [rows()],
    "batch_parallel.inputs": lambda: [rows()],
    "shard.computation": lambda: lambda *x: x[0],
    "batch_parallel.computation": lambda: lambda *x: x[0],
    "program": lambda: a_step().lower(a_state(), rows()),
    "lowered": lambda: a_step().lower(a_state(), rows()),
    "mesh": lambda: a_step().mesh,
    "step": a_step,
    "device": lambda: jax.devices()[0],
    "folder": lambda: FOLDER[0],
    "array": lambda: jnp.ones((2, 3)),
    "index": lambda: 0,
    "values": lambda: jnp.ones((2, 3)),
    "value": lambda: jnp.ones(3),
    "topology": lambda: "cpu:2",
    "topology.name": lambda: "cpu:2",
    "number_of_shards": lambda: 2,
    "TrainStep.own_rows.rows": lambda: 8,
}
# Whatever the folder is called in which it lies.
PACKAGE = Path(crossshard.__file__).parent
# What a call needs besides, to be quick.
ALSO: dict[str, dict[str, Any]] = {
    "doctor": {"sizes": (8,)},
}
# A folder with a checkpoint, and its Checkpoints.
FOLDER: list[Any] = []
# Whose methods are called, and on what.
ON: dict[type, Callable[[], Any]] = {
    CrossShardOptimizer: an_optimizer,
    TrainStep: a_step,
    crossshard.Checkpoints: lambda: FOLDER[1],
    crossshard.nnx.ShardedFunction: lambda: crossshard.shard(num_shards=2)(lambda x: x),
}
# Called by the package, and what it calls them with.
OF_STAGES = {*vars(Stage), *vars(Aggregator)}
HANDED_OUT = """
    Collective Communication CrossShardState Diagnosis Divergence Fault FewBitsState Flops Gradients
    LeafReport NonfiniteOrigin NonfiniteState Options Peers PerShardArray Placement Plan
    StageContext StepOptions TrainState Verification
    Aggregator.__init__ ShardedFunction.__init__ Stage.__init__ TrainStep.__init__
""".split()


@dataclasses.dataclass(frozen=True)
class Target:
    """A function, constructor or method, and its parameters."""

    name: str
    call: Callable[..., Any]
    parameters: dict[str, inspect.Parameter]


def expanded(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function, with each option in place of ``**options``."""
    found = {}
    for name, each in inspect.signature(function).parameters.items():
        if name in ("self", "cls"):
            continue
        if each.kind is each.VAR_KEYWORD and name == "options":
            declared = StepOptions if "make_train" in function.__qualname__ else Options
            for option in typing.get_type_hints(declared):
                found[option] = inspect.Parameter(option, each.KEYWORD_ONLY, default=None)
        elif each.kind is not each.VAR_KEYWORD:
            found[name] = each
    return found


def targets() -> Iterator[Target]:
    """Every public function, constructor and method that takes anything."""
    seen = set()
    for module, names in PUBLIC.items():
        for name in names.split():
            thing = getattr(importlib.import_module(module), name)
            if id(thing) in seen or not callable(thing) or name in (*HANDED_OUT, *RETURNED):
                continue
            seen.add(id(thing))
            if not inspect.isclass(thing):
                yield Target(name, thing, expanded(thing))
                continue
            if issubclass(thing, (Exception, enum.Enum)):
                continue
            if f"{name}.__init__" not in HANDED_OUT:
                made = thing.__new__ if thing is CrossShardOptimizer else thing.__init__
                yield Target(name, thing, expanded(made))
            for method, function in inspect.getmembers(thing, inspect.isfunction):
                public = not method.startswith("_") or method in ("__call__", "__getitem__")
                if public and method not in OF_STAGES and function.__module__.startswith("cross"):
                    call = lambda *args, m=method, t=thing, **kwargs: getattr(ON[t](), m)(
                        *args, **kwargs
                    )
                    yield Target(f"{name}.{method}", call, expanded(function))


TARGETS = {target.name: target for target in targets() if target.parameters}


def good(target: Target, parameter: str) -> Callable[[], Any] | None:
    for name in (f"{target.name}.{parameter}", parameter):
        if name in GOOD:
            return GOOD[name]
    return None


def within(tree: Any, bad: Any) -> Any:
    """A tree with something bad in place of its first leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([bad, *leaves[1:]])


def try_it(target: Target, parameter: str = "", bad: str = "", *, inside: bool = False) -> None:
    """The call with one bad value, if any, and what is done with what it returns."""
    args: list[Any] = []
    kwargs = dict(ALSO.get(target.name, {}))
    for name, each in target.parameters.items():
        make, takes_many = good(target, name), each.kind is each.VAR_POSITIONAL
        value: Any = make() if make else None
        if name == parameter:
            wrong = BAD[bad]()
            if inside:
                value = within(value, wrong)
            else:
                value = [wrong, *(value or ())[1:]] if takes_many else wrong
        elif make is None or (
            each.default is not each.empty and f"{target.name}.{name}" not in GOOD
        ):
            continue
        if takes_many:
            args += value
        elif each.kind is each.KEYWORD_ONLY or each.default is not each.empty:
            kwargs[name] = value
        else:
            args.append(value)
    name, context = target.name.rpartition(".")[2], contextlib.nullcontext()
    of_shards = getattr(target.call, "__module__", "").startswith("crossshard.collectives")
    if of_shards and not isinstance(target.call, type):
        # On two shards that vmap simulates.
        jax.vmap(lambda _: target.call(*args, **kwargs), axis_name="shards")(jnp.ones(2))
        return
    if name in ("minimize", "apply_gradients", "compute_gradients"):
        context = crossshard.shard_context(1)
        W.set_value(jnp.ones(3))
    with context:
        use(target, target.call(*args, **kwargs))


def use(target: Target, found: Any) -> None:
    """Go on with what a call has returned, as far as a caller would; what is trained is finite."""
    trained: Any = ()
    if isinstance(found, TrainStep):
        state, metrics = found(found.init(jnp.ones(3)), rows())
        trained = state.params, metrics["loss"]
    elif isinstance(found, CrossShardOptimizer):
        step = lambda g: found.update(g, found.init(g), g)[0]
        trained = jax.vmap(step, axis_name="shards")(jnp.ones((2, 3)))
    elif isinstance(found, contextlib.AbstractContextManager):
        with found:
            pass
    elif callable(found) and target.name in ("grad", "value_and_grad", "rowwise"):
        trained = found(jnp.ones(3))
    elif isinstance(found, crossshard.nnx.ShardedFunction):
        found(rows())
    elif target.name.endswith(("minimize", "apply_gradients")):
        trained = W[...]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trained)), "it trains NaN"


# A target, its parameter, what is bad, and whether that is within something good.
Call: TypeAlias = tuple[str, str, str, bool]


def calls() -> Iterator[Call]:
    """Every parameter of every target with every bad value."""
    functions = {bad for bad, value in BAD.items() if callable(value())}
    for target in TARGETS.values():
        for name in target.parameters:
            make = good(target, name)
            # What the caller's own function raises, or is, is the caller's.
            annotation = str(target.parameters[name].annotation)
            is_function = "Callable" in annotation or target.name == "plan"
            for bad in BAD:
                if is_function and bad in functions:
                    continue
                yield target.name, name, bad, False
                if make is not None and name in ("state", "batch", "params", "batches"):
                    yield target.name, name, bad, True


OF_PARAMETERS: dict[tuple[str, str], list[Call]] = {}
for one in calls():
    OF_PARAMETERS.setdefault(one[:2], []).append(one)


def outcome(target: str, parameter: str, bad: str, inside: bool) -> str:
    """``"right"`` or ``"refused"``; raises any other error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            try_it(TARGETS[target], parameter, bad, inside=inside)
        except CrossshardError:
            return "refused"
        except Exception as error:
            if is_of_a_function_of_ours(error):
                return "right"
            raise
    return "right"


def is_of_a_function_of_ours(error: Exception) -> bool:
    """Whether a loss, or another function of ``GOOD``, has raised an error of its own."""
    names = [
        frame.name
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == __file__ or Path(frame.filename).is_relative_to(PACKAGE)
    ]
    return names[-1] in ("loss_fn", "<lambda>")


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    FOLDER.append(tmp_path_factory.mktemp("checkpoints"))
    memory = {"memory": FOLDER[0] / "memory", "memory_every": 1}
    kept = jax.config.jax_compilation_cache_dir
    # A call may make a folder, and keep programs there from then on.
    with (
        contextlib.chdir(tmp_path_factory.mktemp("here")),
        crossshard.Checkpoints(FOLDER[0], a_step(), **memory) as checkpoints,
    ):
        checkpoints.save(a_state(), score=0.5)
        checkpoints.wait()
        FOLDER.append(checkpoints)
        yield
    jax.config.update("jax_compilation_cache_dir", kept)
    FOLDER.clear()


def test_every_parameter_that_must_be_given_has_a_good_value():
    without = [
        f"{target.name}.{name}"
        for target in TARGETS.values()
        for name, each in target.parameters.items()
        if each.default is each.empty
        and each.kind is not each.VAR_POSITIONAL
        and good(target, name) is None
    ]
    assert without == []


def test_every_method_has_something_to_be_called_on():
    of_methods = {name.partition(".")[0] for name in TARGETS if "." in name}
    assert of_methods == {kind.__name__ for kind in ON}


@pytest.mark.parametrize("name", TARGETS)
def test_with_good_values_it_returns(name: str):
    """Else a bad value may be refused for what is bad beside it."""
    try_it(TARGETS[name])


def wrong(calls: Iterable[Call]) -> list[str]:
    """The calls that raise an error that is not ours, or train what is not finite."""
    outcomes, found = collections.Counter(), []
    for call in calls:
        try:
            outcomes[outcome(*call)] += 1
        except Exception as error:
            found.append(f"{call}: {type(error).__name__}: {error!s:.200}")
    print(f"{outcomes.total()} calls: {dict(outcomes)}")
    return found


@pytest.mark.parametrize("number", [2, deep(16)])
def test_some_calls(number: int):
    # Of each parameter as many, so that none is left out.
    some = random.Random(0)
    every = OF_PARAMETERS.values()
    chosen = [call for of in every for call in some.sample(of, min(len(of), number))]
    assert len(chosen) >= 150 * number
    assert wrong(chosen) == []
