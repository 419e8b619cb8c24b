"""Processes that would run different steps: all are told before the first sum, and which is odd."""

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning

import crossshard
from crossshard import CrossShardOptimizer, _jax
from tests.distributed.jobs import PATIENCE, launch

PROCESSES = 3
W = {"b": np.ones(40, np.float32), "w": np.ones((64, 40), np.float32)}
X = np.ones((3, 64), np.float32)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return (jnp.tanh(batch["x"] @ params["w"] + params["b"]) ** 2).mean()


def other_constant(params: Any, batch: Any) -> jax.Array:
    return 1.001 * loss_fn(params, batch)


def with_noise(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    return loss_fn(params, batch) * jax.random.uniform(rng)


def with_collectives(*names: str) -> dict[str, Any]:
    """A loss with a sum or a maximum of something over the shards, in this order."""
    collectives = {"sum": jax.lax.psum, "max": jax.lax.pmax}

    def loss(params: Any, batch: Any) -> jax.Array:
        own = jax.lax.stop_gradient(params["b"].sum())
        return loss_fn(params, batch) + sum(0 * collectives[name](own, "shards") for name in names)

    return {"loss": loss, "loss_over": "shard"}


def _as_it_lies(mesh: Any, args: Any, out: Any) -> Any:
    return mesh, jnp.tanh, args[0].sharding, (args[0].sharding,)


def _scaled_as_it_lies(scale: float, mesh: Any, args: Any, out: Any) -> Any:
    return mesh, lambda x: scale * jnp.tanh(x), args[0].sharding, (args[0].sharding,)


def _in_python(x: Any) -> Any:
    return np.tanh(x)


# Each as cuDNN's attention is: an operation that its own code partitions, and its derivative.
def _partitioned(function: Any, partition: Any, *static: float) -> Callable[[Any], jax.Array]:
    operation = custom_partitioning(function, static_argnums=tuple(range(len(static))))
    operation.def_partition(partition=partition, sharding_rule="i j -> i j")
    run = jax.custom_vjp(functools.partial(operation, *static))
    run.defvjp(lambda x: (run(x), x), lambda x, c: (c / jnp.cosh(x) ** 2,))
    return run


_own_tanh = _partitioned(jnp.tanh, _as_it_lies)
_scaled_tanh, _other_tanh = (
    _partitioned(lambda scale, x: scale * jnp.tanh(x), _scaled_as_it_lies, scale)
    for scale in (1.0, 1.5)
)


@jax.custom_jvp
def _tanh_in_python(x: jax.Array) -> jax.Array:
    return jax.pure_callback(_in_python, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@_tanh_in_python.defjvp
def _(x: Any, tangents: Any) -> Any:
    return _tanh_in_python(*x), tangents[0] / jnp.cosh(x[0]) ** 2


def of_operation(tanh: Any, constant: float = 1.0) -> Any:
    """A loss whose lowered text names Python objects by their addresses."""
    return lambda params, batch: (
        constant * (tanh(batch["x"] @ params["w"] + params["b"]) ** 2).mean()
    )


def printing(params: Any, batch: Any) -> jax.Array:
    loss = loss_fn(params, batch)
    jax.debug.print("the loss is {}", loss)
    jax.debug.callback(lambda _: None, loss)
    io_callback(lambda _: None, None, jax.lax.stop_gradient(loss))
    return loss


def run(
    loss: Any = loss_fn,
    optimizer: Any = None,
    *,
    params: Any = None,
    x: Any = X,
    entries: Any = None,
    rng: Any = 0,
    order: int = 1,
    axis: str = "shards",
    **options: Any,
) -> None:
    """Build a step, and take one."""
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[::order]), (axis,), axis_types=(jax.sharding.AxisType.Auto,)
    )
    step = crossshard.make_train_step(
        loss, optimizer or optax.sgd(0.1, momentum=0.9), mesh=mesh, **options
    )
    step(step.init(params or W, rng), {"x": x[:1], **(entries or {})})


def of(optimizer: Any) -> dict[str, Any]:
    return {"optimizer": optimizer}


SGD = optax.sgd(0.1)
PLAIN = of(CrossShardOptimizer(SGD))


def over_batch(tanh: Any, constant: float = 1.0) -> dict[str, Any]:
    return {"loss": of_operation(tanh, constant), "loss_over": "batch"}


# What the odd process passes, and what the others do if it is not what `run` does by itself.
# Nothing here may start JAX, whose processes are connected later.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Optimizers.
    "learning rate": (of(optax.sgd(0.1001, momentum=0.9)), {}),
    "another optimizer": (of(optax.adam(0.1)), {}),
    # Options.
    "reduction": (of(CrossShardOptimizer(optax.sgd(0.1, momentum=0.9), "sum")), {}),
    "groups": (of(CrossShardOptimizer(SGD, group_assignment=[[0], [1], [2]])), PLAIN),
    "weight update": ({"weight_update": "sharded"}, {"weight_update": "replicated"}),
    "wire": ({"reduce_dtype": "bfloat16"}, {}),
    "what is trained": ({"wrt": lambda path, _: "w" in str(path)}, {}),
    "name": (
        of(CrossShardOptimizer(SGD, group_assignment=[[0, 1, 2]], reduction="sum")),
        PLAIN,
    ),
    # Losses.
    "constant": ({"loss": other_constant}, {}),
    "noise": ({"loss": with_noise}, {}),
    "order of collectives": (with_collectives("sum", "max"), with_collectives("max", "sum")),
    # Losses that name Python objects by their addresses.
    "constant beside a partitioner": (over_batch(_own_tanh, 1.001), over_batch(_own_tanh)),
    "partitioner": (over_batch(_own_tanh), over_batch(_scaled_tanh)),
    "argument of a partitioner": (over_batch(_scaled_tanh), over_batch(_other_tanh)),
    "constant beside a callback": (
        {"loss": of_operation(_tanh_in_python, 1.001), "loss_over": "shard"},
        {"loss": of_operation(_tanh_in_python), "loss_over": "shard"},
    ),
    "print": ({"loss": printing}, {}),
    # What they are given.
    "parameters": ({"params": {**W, "b": 2 * W["b"]}}, {}),
    "shape of a parameter": ({"params": {**W, "b": np.ones(1, np.float32)}}, {}),
    "another parameter": ({"params": {**W, "c": W["b"]}}, {}),
    "key": ({"rng": 1}, {}),
    "rows": ({"entries": {"x": np.ones((2, 64), np.float32)}}, {}),
    "dtype of a batch": ({"x": np.ones((3, 64), np.float16)}, {}),
    "a further entry": ({"entries": {"y": np.ones(1, np.float32)}}, {}),
    "order of devices": ({"order": -1}, {}),
    "name of an axis": ({"axis": "data"}, {}),
}
# What all pass alike, and is taken: the addresses differ.
ALIKE: dict[str, dict[str, Any]] = {
    "partitioner": over_batch(_own_tanh),
    "partitioner with an argument": over_batch(_other_tanh),
    "partitioner of a shard": {"loss": of_operation(_own_tanh)},
    "callback": {"loss": of_operation(_tanh_in_python)},
    "callback over the batch": over_batch(_tanh_in_python),
    "prints": {"loss": printing},
    "prints over the batch": {"loss": printing, "loss_over": "batch"},
}
# One of each sort.
FEW = ["constant", "order of collectives", "rows", "argument of a partitioner"]


def main(out: str, *names: str) -> None:
    """One process: what it is told of these kinds."""
    job = crossshard.distributed.initialize()
    found = {}
    for number, name in enumerate(names):
        odd, others = KINDS[name]
        try:
            run(**(odd if job.process_id == number % PROCESSES else others))
            found[name] = "taken"
        except crossshard.CrossshardError as error:
            found[name] = f"{type(error).__name__}: {error}"
    # What is equal is taken, and lowered once.
    run()
    alike = ALIKE if len(names) == len(KINDS) else {"prints": ALIKE["prints"]}
    # Other objects in each process, so that no two have the same addresses.
    held = [object() for _ in range(1000 * job.process_id)]
    for name, passed in alike.items():
        try:
            run(**passed)
        except crossshard.CrossshardError as error:
            found[f"alike: {name}"] = f"{type(error).__name__}: {error}"
    del held
    Path(out, f"{job.process_id}.json").write_text(json.dumps(found))


class Text(NamedTuple):
    """A lowered program with one operation."""

    target: str
    config: str

    def as_text(self) -> str:
        return (
            f"  %1 = stablehlo.custom_call @{self.target}(%0) {{api_version = 2 : i32, "
            f'backend_config = "{self.config}", mhlo.backend_config = {{index = 1 : ui64}}}}\n'
            f"  %cst = stablehlo.constant dense<[{self.config!r}]>\n"
        )


@pytest.mark.parametrize(
    ("target", "one", "other"),
    [
        ("CustomSPMDPartitioning", "140219", "139965"),
        ("InspectSharding", r"\\10\\05@<\\22", r"\\20\\05@<"),
        ("xla_python_cpu_callback", "140219", "139965"),
        ("xla_ffi_partitioned_python_gpu_callback", "140219", "139965"),
    ],
)
def test_an_address_is_left_out_and_nothing_else(target: str, one: str, other: str):
    found, others = (
        _jax.without_addresses(cast(Any, Text(target, config))).splitlines()
        for config in (one, other)
    )
    assert found[0] == others[0]
    assert "an address" in found[0]
    assert "index = 1" in found[0]
    assert found[1] != others[1]


@pytest.mark.parametrize("target", ["tpu_custom_call", "lapack_spotrf_ffi", "my_callback"])
def test_the_configuration_of_another_operation_counts(target: str):
    texts = [Text(target, config) for config in ("140219", "139965")]
    assert [_jax.without_addresses(cast(Any, text)) for text in texts] == [
        text.as_text() for text in texts
    ]


def test_an_operation_is_told_by_what_partitions_it():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("shards",))

    def text(tanh: Any) -> str:
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("shards"))
        lowered = jax.jit(lambda x: tanh(x), in_shardings=split).lower(np.ones((2, 4)))
        return _jax.without_addresses(lowered)

    assert "test_programs._as_it_lies" in text(_own_tanh)
    assert text(_own_tanh) == text(_own_tanh)
    assert len({text(tanh) for tanh in (_own_tanh, _scaled_tanh, _other_tanh)}) == 3


@pytest.mark.multiprocess
@pytest.mark.deep
@pytest.mark.parametrize("names", [FEW, [*KINDS]], ids=["few", "all"])
def test_the_odd_process_is_named(names: list[str], tmp_path: Path):
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from tests.distributed import test_programs"
    words = [sys.executable, "-c", f"{code} as t; t.main(*sys.argv[1:])", tmp_path, *names]
    process = launch("-n", PROCESSES, "--", *words)
    output = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    told = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(PROCESSES)]
    wrong = {}
    for number, name in enumerate(names):
        first, *others = (each[name] for each in told)
        named = re.search(f"process {number % PROCESSES} (differs|passed)", first)
        if first == "taken" or not named or others != [first] * len(others):
            wrong[name] = [each[name] for each in told]
    assert not wrong
    assert [{key for key in each if key.startswith("alike: ")} for each in told] == [set()] * 3
