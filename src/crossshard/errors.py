"""Errors and warnings: each message names what was given, why it is refused, and what to write."""

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AxisError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointWarning",
    "CrossshardError",
    "DeadlockWarning",
    "DistributedError",
    "DivergenceError",
    "DivergenceWarning",
    "DoubleReductionError",
    "GroupAssignmentError",
    "IncomingError",
    "LossError",
    "NestedContextError",
    "NestedReductionError",
    "NonfiniteError",
    "ProgramMismatchError",
    "ShardContextError",
    "ShardContextWarning",
    "VariableError",
    "VariableTypeError",
    "WeightUpdateError",
]


class CrossshardError(Exception):
    """The base class of all crossshard errors; a note below the message names the docs' section."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # A class that is derived elsewhere has the section of the one of ours that it derives from.
        ours = next(each for each in type(self).__mro__ if each.__module__ == __name__)
        self.add_note(f"See crossshard's docs/reference/errors.md#{ours.__name__.lower()}")


class ArgumentError(CrossshardError, ValueError):
    """An argument has the right type but an invalid value.

    Mistake: ``shard_context(0)``.  Fix: ``shard_context(1)``.
    """


class ArgumentTypeError(CrossshardError, TypeError):
    """An argument has an invalid type.

    Mistake: ``CrossShardOptimizer(torch.optim.SGD(...))``.
    Fix: ``CrossShardOptimizer(optax.sgd(0.1))``.
    """


class GroupAssignmentError(ArgumentError):
    """A group assignment does not split the shards into disjoint groups of equal size.

    Mistake: ``group_assignment=[[0, 1], [1, 2]]``.  Fix: ``group_assignment=[[0, 1], [2, 3]]``.
    """


class AxisError(ArgumentError):
    """The mesh axis of the shards is ambiguous, or is not bound here.

    Mistake: ``update`` under two manual mesh axes, without ``axis_name``.
    Fix: ``CrossShardOptimizer(opt, axis_name="data")``.
    """


class ShardContextError(CrossshardError, RuntimeError):
    """A call needs a different shard context from the current one.

    Mistake: ``compute_gradients`` under eight shards and ``apply_gradients`` outside of them.
    Fix: both in one step function, run by ``crossshard.shard``.
    """


class NestedContextError(ShardContextError, NotImplementedError):
    """A shard context, or a runner, was entered inside another one.

    Mistake: ``with shard_context(8): with shard_context(2): ...``.
    Fix: leave the outer context first, or use groups to reduce over some of the shards.
    """


class DoubleReductionError(CrossshardError, ValueError):
    """A gradient that autodiff has already summed over the shards was about to be reduced again.

    Mistake: ``jax.grad`` of a replicated parameter under ``shard_map(check_vma=True)``.
    Fix: ``crossshard.grad``, or ``update(..., incoming="summed")``.
    """


class NestedReductionError(CrossshardError, ValueError):
    """A CrossShardOptimizer wraps another one, which would reduce the gradients twice.

    Mistake: ``CrossShardOptimizer(CrossShardOptimizer(optax.sgd(0.1)))``.
    Fix: ``CrossShardOptimizer(optax.sgd(0.1))``.
    """


class NonfiniteError(CrossshardError, FloatingPointError):
    """Gradients are not finite, at more steps in a row than ``nonfinite`` allows.

    Mistake: a batch with NaN, under ``make_train_step(..., nonfinite="raise")``.
    Fix: the batch that the error names; or ``nonfinite="quarantine"``, which leaves its shard out.
    """


class IncomingError(CrossshardError, ValueError):
    """The status of the incoming gradients is unknown, or contradicts their type.

    Mistake: ``apply_gradients`` under MEAN with gradients from ``jax.grad``.
    Fix: gradients from ``compute_gradients``, or ``apply_gradients(..., incoming="local")``;
      ``"reduced"`` if you have summed them yourself.
    """


class VariableError(ArgumentError):
    """A variable cannot be trained, or was not passed to the step that writes it.

    Mistake: a step that reaches a model through a dictionary that the runner does not search.
    Fix: pass the model to the step as an argument.
    """


class VariableTypeError(ArgumentTypeError, VariableError):
    """A value to train is not a variable. It is also a ValueError, as every VariableError is.

    Mistake: ``opt.minimize(loss, var_list=[jnp.ones(3)])``.
    Fix: ``opt.minimize(loss, var_list=[nnx.Param(jnp.ones(3))])``.
    """


class WeightUpdateError(ArgumentError):
    """An optimizer that needs full arrays would be given slices or blocks of them.

    Mistake: ``CrossShardOptimizer(optax.lamb(1e-3), weight_update="sharded")`` in ``shard_map``.
    Fix: ``make_train_step``, which shards it on global arrays; or an elementwise optimizer.
    """


class LossError(ArgumentError):
    """The loss is not a mean over the rows of the batch, so the shards' mean is not the batch's.

    Mistake: a loss with ``x - x.mean(0)``, ``x @ x.T``, or ``sum() / mask.sum()``.
    Fix: ``loss_over="batch"``; for a ratio of two sums ``weight=``; and ``loss_over="shard"``
    where each shard's own loss is meant.
    """


class DistributedError(CrossshardError, RuntimeError):
    """The processes of a job do not find each other.

    Mistake: ``jax.devices()`` before ``crossshard.distributed.initialize()``.
    Fix: ``crossshard.distributed.initialize()`` first.
    """


class ProgramMismatchError(DistributedError):
    """The processes of a mesh are about to run different programs.

    Mistake: ``optax.sgd(0.1 * (1 + jax.process_index()))``.
    Fix: one learning rate in all processes; only the rows of the batch may differ.
    """


class DivergenceError(CrossshardError, RuntimeError):
    """Shards have different copies of an array that all of them should have.

    Mistake: training on with a device whose memory or arithmetic is faulty.
    Fix: remove that device, and restore a checkpoint from before the fault.
    """


class CheckpointError(CrossshardError, RuntimeError):
    """A checkpoint cannot be written or read; those that are complete stay as they are.

    Mistake: ``Checkpoints("/mnt/full", step)`` on a disk without space.
    Fix: a folder on a disk with space.
    """


class CheckpointDamagedError(CheckpointError):
    """A folder has checkpoints, and all of them are damaged.

    Mistake: another program has overwritten files in the folder.
    Fix: restore a copy of the folder, or start again in another one.
    """


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint is from another model or another optimizer, or has other dtypes.

    Mistake: ``restore_latest`` for a step with SGD, from a checkpoint of AdamW.
    Fix: the optimizer that wrote it, another folder, or ``strict=False``.
    """


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped, or a state is from a step with other options."""


class ShardContextWarning(UserWarning):
    """There is no shard context and no bound mesh axis, so one shard is assumed."""


class DivergenceWarning(UserWarning):
    """A shard's copy of an array differed from the majority's, and was replaced by it."""


class DeadlockWarning(UserWarning):
    """A mesh of virtual CPU devices has too few threads and may deadlock."""
