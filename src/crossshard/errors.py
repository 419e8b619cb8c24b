"""The errors and warnings: each says what was given, why it is refused and what to write."""

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AxisError",
    "CommunicationError",
    "CrossshardError",
    "DeadlockWarning",
    "DoubleReductionError",
    "GroupAssignmentError",
    "IncomingError",
    "NestedContextError",
    "NestedReductionError",
    "ShardContextError",
    "ShardContextWarning",
    "VariableError",
    "WeightUpdateError",
]


class CrossshardError(Exception):
    """Everything that crossshard refuses; catch this to catch all of it."""


class ArgumentError(CrossshardError, ValueError):
    """An argument has the right type and a value that cannot be used.

    Mistake: ``shard_context(0)``.  Mend: ``shard_context(1)``.
    """


class ArgumentTypeError(CrossshardError, TypeError):
    """An argument has a type that cannot be used.

    Mistake: ``CrossShardOptimizer(torch.optim.SGD(...))``.
    Mend: ``CrossShardOptimizer(optax.sgd(0.1))``.
    """


class GroupAssignmentError(ArgumentError):
    """A group assignment does not split the shards into disjoint groups of one size.

    Mistake: ``group_assignment=[[0, 1], [1, 2]]``.  Mend: ``group_assignment=[[0, 1], [2, 3]]``.
    """


class AxisError(ArgumentError):
    """The mesh axis over which the shards lie cannot be told, or is not bound here.

    Mistake: an ``update`` under a mesh of two manual axes, with no axis named.
    Mend: ``CrossShardOptimizer(opt, axis_name="data")``.
    """


class ShardContextError(CrossshardError, RuntimeError):
    """What is asked needs a shard context that is not the one in force.

    Mistake: ``compute_gradients`` under eight shards and ``apply_gradients`` outside of them.
    Mend: both in one step function, run by ``crossshard.shard``.
    """


class NestedContextError(ShardContextError, NotImplementedError):
    """A shard context, or a runner, was entered inside another one.

    Mistake: ``with shard_context(8): with shard_context(2): ...``.
    Mend: leave the outer context first; for a reduction over a part of the shards use groups.
    """


class DoubleReductionError(CrossshardError, ValueError):
    """A gradient that autodiff has already summed over the shards was about to be reduced again.

    Mistake: ``jax.grad`` of a replicated parameter under ``shard_map(check_vma=True)``.
    Mend: ``crossshard.grad``, or ``update(..., incoming="summed")``.
    """


class NestedReductionError(CrossshardError, ValueError):
    """One CrossShardOptimizer stands inside another: the gradients would be reduced twice.

    Mistake: ``CrossShardOptimizer(CrossShardOptimizer(optax.sgd(0.1)))``.
    Mend: ``CrossShardOptimizer(optax.sgd(0.1))``.
    """


class IncomingError(CrossshardError, ValueError):
    """It is not known, or not true, what the incoming gradients already are.

    Mistake: ``apply_gradients`` under MEAN with gradients from ``jax.grad``.
    Mend: gradients from ``compute_gradients``, or ``apply_gradients(..., incoming="local")``.
    """


class VariableError(ArgumentError):
    """A variable cannot be trained, or was not handed to the step that writes it.

    Mistake: a step that reaches a model through a dictionary the runner cannot see.
    Mend: pass the model to the step as an argument.
    """


class CommunicationError(CrossshardError, AssertionError):
    """A step sends more than its test allows.

    Mistake: two ``pmean`` of the same gradients, under ``assert_communication(step, *args)``.
    Mend: one of them.
    """


class WeightUpdateError(ArgumentError):
    """The weight update was to be sharded where its rule can only be run on whole arrays.

    Mistake: ``CrossShardOptimizer(optax.lamb(1e-3), weight_update="sharded")`` in ``shard_map``.
    Mend: ``make_train_step``, which shards it on global arrays; or an elementwise rule.
    """


class ShardContextWarning(UserWarning):
    """No shard context and no mesh axis is in force, so one shard is assumed."""


class DeadlockWarning(UserWarning):
    """A mesh over virtual CPU devices was made with too few threads to be safe."""
