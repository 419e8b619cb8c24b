"""The public names are these and no others: a name that comes or goes shows here."""

import inspect
import subprocess
import sys

import crossshard

PUBLIC = """
    Checkpoints Collective Communication CrossShardOptimizer CrossShardState Diagnosis
    Divergence
    DynamicLossScale Environment Fault Gradients Incoming LeafReport Nonfinite NonfiniteState
    Optimizer PER_SHARD Placement Plan REPLICATED Reduction ShardContext Stage TrainState TrainStep
    Verification
    all_to_all batch_parallel collective_permute cpu_devices cross_replica_sum doctor
    get_shard_context grad inspect is_per_shard make_train_step plan replicate rewrite set_per_shard
    set_shared shard shard_context value_and_grad verify
    PerShardArray ShardedFunction merge_shards
    ArgumentError ArgumentTypeError AxisError CheckpointDamagedError CheckpointError
    CheckpointMismatchError CheckpointWarning CommunicationError CrossshardError
    DeadlockWarning DistributedError DivergenceError DivergenceWarning WeightUpdateError
    DoubleReductionError GroupAssignmentError IncomingError NestedContextError
    NestedReductionError NonfiniteError ProgramMismatchError ShardContextError ShardContextWarning
    VariableError
""".split()


def test_the_public_names():
    assert sorted(crossshard.__all__) == sorted(PUBLIC)
    assert all(hasattr(crossshard, name) for name in PUBLIC)


def test_every_public_name_says_what_it_is():
    for name in PUBLIC:
        thing = getattr(crossshard, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing) and not issubclass(thing, (Exception, str)):
            for method, function in inspect.getmembers(thing, inspect.isfunction):
                if not method.startswith("_"):
                    assert inspect.getdoc(function), f"{name}.{method}"


def test_every_function_and_class_has_an_example_that_runs():
    for name in PUBLIC:
        thing = getattr(crossshard, name)
        if inspect.isclass(thing) and (issubclass(thing, Exception) or name == "Incoming"):
            continue
        if name not in ("ShardContext", "PER_SHARD", "REPLICATED"):
            assert ">>>" in (thing.__doc__ or ""), name


def test_importing_brings_in_nothing_that_jax_optax_and_flax_do_not():
    # In an interpreter of its own: here the tests have imported much already.
    script = """
import sys
import jax, optax, flax.nnx
before = set(sys.modules)
import crossshard
print(sorted({name for name in set(sys.modules) - before if name.split(".")[0] != "crossshard"}))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
