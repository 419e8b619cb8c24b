"""The public names are these and no others: a name that comes or goes shows here."""

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

import crossshard

PUBLIC = {
    "crossshard": """
        Checkpoints CrossShardOptimizer CrossShardState CrossshardError DynamicLossScale Mean
        Nonfinite Reduction Stage TrainState TrainStep all_to_all collective_permute cpu_devices
        cross_replica_sum doctor get_shard_context grad inspect make_train_step merge_shards plan
        rowwise shard shard_context value_and_grad verify
    """,
    "crossshard.checkpoints": "Checkpoints",
    "crossshard.distributed": """
        PROCESS_LOST PROCESS_STALLED Job check_same_program entering initialize keep_programs
    """,
    "crossshard.errors": """
        ArgumentError ArgumentTypeError AxisError CheckpointDamagedError CheckpointError
        CheckpointMismatchError CheckpointWarning CrossshardError DeadlockWarning
        DistributedError DivergenceError DivergenceWarning DoubleReductionError
        GroupAssignmentError IncomingError LossError NestedContextError NestedReductionError
        NonfiniteError
        ProgramMismatchError ShardContextError ShardContextWarning VariableError VariableTypeError
        WeightUpdateError
    """,
    "crossshard.guards": "Divergence",
    "crossshard.nnx": """
        PerShardArray ShardedFunction batch_parallel is_per_shard merge_shards replicate rewrite
        shard
    """,
    "crossshard.pipeline": """
        Aggregator CrossShardState DynamicLossScale FewBitsState GradientStatus Gradients Nonfinite
        NonfiniteState Options PER_SHARD Peers Phase Placement Quantized REPLICATED Stage
        StageContext
    """,
    "crossshard.step": """
        NonfiniteOrigin Prefetch StepOptions TrainState TrainStep make_train_step
    """,
    "crossshard.tf1": """
        CrossShardOptimizer Reduction ShardContext TpuContext all_to_all batch_parallel
        collective_permute cross_replica_sum get_shard_context get_tpu_context replicate rewrite
        shard shard_context tpu_shard_context
    """,
    "crossshard.tools": """
        Array Candidate Collective CollectiveTest Communication Devices Diagnosis Fault Finding
        Flops LeafReport LinkUse Memory MemoryUse Meter Plan Topology Verification count_flops
        doctor inspect peak_flops plan topology verify
    """,
}
EVERYTHING = {
    name: getattr(importlib.import_module(module), name)
    for module, names in PUBLIC.items()
    for name in names.split()
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names(module: str):
    assert sorted(importlib.import_module(module).__all__) == sorted(PUBLIC[module].split())
    # What most programs need. Of the last two a loss cannot do without ``Mean`` if it divides by a
    # count, nor without ``rowwise`` if it sorts its rows; both stand in the loss itself.
    assert len(crossshard.__all__) <= 27
    assert set(crossshard.__all__) <= set(dir(crossshard))


def test_a_name_of_a_module_says_which_one():
    with pytest.raises(AttributeError, match=r"crossshard\.errors\.ArgumentError"):
        getattr(crossshard, "ArgumentError")  # noqa: B009
    with pytest.raises(AttributeError, match="has no attribute 'Argument'"):
        crossshard.Argument  # noqa: B018


def test_every_public_name_says_what_it_is():
    for name, thing in EVERYTHING.items():
        assert inspect.getdoc(thing) or name.isupper(), name
        if inspect.isclass(thing) and not issubclass(thing, (Exception, str)):
            for method, function in inspect.getmembers(thing, inspect.isfunction):
                if not method.startswith("_"):
                    assert inspect.getdoc(function), f"{name}.{method}"


# Types. What is any pytree, or any JSON, is called so: ``PyTree`` and ``Json`` of ``_annotations``.


def test_every_public_function_is_annotated():
    for name, thing in EVERYTHING.items():
        if inspect.isfunction(thing):
            hints: dict[str, Any] = thing.__annotations__
            assert hints.keys() >= {"return", *inspect.signature(thing).parameters}, name


# What is only returned, and has no call of its own.
RETURNED = """
    Array Candidate CollectiveTest Devices Finding GradientStatus Job LinkUse Memory
    MemoryUse Phase Prefetch ShardContext Topology TpuContext
""".split()


def test_every_function_and_class_has_an_example_that_runs():
    without = [
        name
        for name, thing in EVERYTHING.items()
        if not (inspect.isclass(thing) and issubclass(thing, Exception))
        and not name.isupper()
        and name not in RETURNED
        and ">>>" not in (thing.__doc__ or "")
    ]
    assert without == []


def test_importing_loads_neither_flax_nor_orbax_nor_a_tool_nor_does_a_step_of_a_pytree():
    # In an interpreter of its own: here the tests have imported much already.
    script = """
import sys
import jax, jaxtyping, optax
before = set(sys.modules)
import crossshard
new = {name for name in set(sys.modules) - before}
print(sorted({name.split(".")[0] for name in new} - {"crossshard", "jax"}))
print(sorted(name for name in new if name.startswith(("crossshard.tools.", "crossshard.checkp"))))
import jax.numpy as jnp
step = crossshard.make_train_step(lambda w, x: (w * x).mean(), optax.adam(0.1), num_shards=1)
state = step.init({"w": jnp.float32(3)}["w"])
state, metrics = step(state, jnp.ones(4))
step.model(state), step.evaluate(state, [jnp.ones(4)], lambda w, x: w * x), step.describe()
opt = crossshard.CrossShardOptimizer(optax.adam(0.1))
jax.vmap(lambda w: opt.update(w, opt.init(w), w), axis_name="shards")(jnp.ones(2))
print("flax" in sys.modules)
from flax import nnx
model, opt = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), crossshard.CrossShardOptimizer(optax.adam(0.1))
with crossshard.shard_context(1):
    opt.minimize(lambda: model(jnp.ones((1, 3))).sum(), var_list=model)
print(len(nnx.state(opt)["state"]), len(opt.variables()))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:4] == ["[]", "[]", "False", "1 5"]
