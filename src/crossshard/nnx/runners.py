"""The runners: run a step on each shard, with its arrays split and its variables updated."""

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import _check, _jax, _mesh
from crossshard._annotations import PyTree
from crossshard._check import is_number
from crossshard.distributed.agreement import processes_of
from crossshard.distributed.progress import PROGRESS, entering
from crossshard.errors import ArgumentError, ArgumentTypeError, NestedContextError
from crossshard.nnx.arrays import (
    Arguments,
    ByValue,
    InputAxes,
    Outputs,
    as_output,
    check_input_axes,
    check_outputs,
    is_whole,
    kept,
    split_arguments,
)
from crossshard.nnx.program import Program, Reached
from crossshard.shards.axes import check_num_shards, get_shard_context
from crossshard.shards.devices import (
    are_of_all_processes,
    mesh_for,
    mesh_in_force,
    on_every_device,
    put_whole,
)

_TRACING = threading.RLock()


class ShardedFunction:
    """A step function that runs on each shard, as ``shard`` and ``batch_parallel`` return it.

    Like ``jax.jit``, it compiles once per structure of the variables and shapes of the arrays;
    other Python values that the function reads are constants.

    >>> import jax.numpy as jnp
    >>> double = shard(num_shards=1)(lambda x: 2 * x)
    >>> double(jnp.arange(3.0)), double.number_of_shards
    (Array([0., 2., 4.], dtype=float32), 1)
    """

    def __init__(
        self,
        computation: Callable[..., PyTree],
        mesh: jax.sharding.Mesh,
        axes: InputAxes,
        outputs: Outputs,
        *,
        follows: bool = False,
    ):
        functools.update_wrapper(self, computation)
        self._follows = follows
        self._computation = computation
        self._mesh = mesh
        self._axes = axes
        self._outputs = outputs
        self._is_watched = are_of_all_processes(mesh) or PROGRESS.is_alone
        self._is_here = jax.process_index() in processes_of(mesh)
        self._programs: dict[Any, Program] = {}

    @property
    def number_of_shards(self) -> int:
        """The number of shards that run the function."""
        return self._mesh.size

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run the function on every shard and join the outputs."""
        here = self._on_mesh_in_force()
        if here is not self:
            return here(*args, **kwargs)
        watched = entering("step") if self._is_watched else contextlib.nullcontext()
        with self._alone(), watched:
            program, reached, arguments = self._program(args, kwargs)
            return program(reached, arguments)

    def build(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Prepare the variables for a call with these arguments, and do not run it.

        It creates the slots of optimizers, and stores the variables that will differ between the
        shards as ``[shards, …]``, so that a checkpoint that was saved after a step can be restored
        into new models and optimizers.

        Raises: as for a call.

        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from crossshard import CrossShardOptimizer
        >>> w, opt = nnx.Param(jnp.ones(3)), CrossShardOptimizer(optax.adam(0.1))
        >>> @shard(num_shards=1)
        ... def step(w, opt, x):
        ...     return opt.minimize(lambda: (w * x).sum(), var_list=[w])
        >>> step.build(w, opt, jnp.ones(3))
        >>> opt.get_slot_names()
        ['mu', 'nu']
        """
        here = self._on_mesh_in_force()
        with here._alone():
            program, reached, _ = here._program(args, kwargs)
            program.spread(reached)

    def _on_mesh_in_force(self) -> "ShardedFunction":
        """The same on the mesh that ``jax.set_mesh`` has set, unless it was given one."""
        found = mesh_in_force(self._mesh.size) if self._follows else None
        if found is None or found == self._mesh:
            return self
        return _sharded(self._computation, found, self._axes, self._outputs)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise inside another step or where there are no shards; then keep others out."""
        outer = get_shard_context()
        if outer is not None:
            raise NestedContextError(
                f"A runner over {self._mesh.size} shards was called inside a shard context of "
                f"{outer.number_of_shards}. Call it outside; inside a step, call the function "
                f"itself."
            )
        if not self._is_here:
            raise ArgumentError(
                f"The {self._mesh.size} shards of this step have no device of process "
                f"{jax.process_index()}. Every process of the job calls a step, so pass "
                f"num_shards={len(jax.devices())}, for the devices of all of them; or "
                f"mesh=jax.sharding.Mesh(jax.local_devices(), 'shards'), for a step of its own."
            )
        if not _jax.at_top_level():
            raise NestedContextError(
                f"A runner over {self._mesh.size} shards was called inside jax.jit, jax.vmap, "
                f"jax.shard_map, nnx.jit or the like. It compiles its step itself, and writes "
                f"variables: call it outside; or call the function itself."
            )
        # While one thread traces, the variables hold values of its trace.
        with _TRACING, _mesh.in_place_of_the_users_mesh(self._mesh):
            yield

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Program, Reached, Arguments]:
        """The program for these arguments, what it reaches, and the arguments on the mesh."""
        arguments = split_arguments(args, kwargs, self._axes, self._mesh)
        reached = Reached(arguments.whole.values())
        key = reached.key(), arguments.key()
        program = self._programs.get(key)
        if program is None:
            program = Program(self._computation, self._mesh, self._outputs, reached, arguments)
            # It has made the slots that were missing, and its key is another one then.
            reached = Reached(reached.roots)
            self._programs[kept((reached.key(), arguments.key()))] = program
            if program.spread(reached):
                self._programs[kept((reached.key(), arguments.key()))] = program
        return program, reached, arguments

    def __get__(self, instance: object, owner: type | None = None) -> object:
        """As a method, its first input is the instance."""
        return self if instance is None else types.MethodType(self, instance)


def shard(
    computation: Callable[..., PyTree] | None = None,
    inputs: list[PyTree] | None = None,
    num_shards: int = 1,
    input_shard_axes: Sequence[int | None] | None = None,
    outputs_from_all_shards: bool | Sequence[bool] = True,
    output_shard_axes: Sequence[int] | None = None,
    *,
    batch_axis: PyTree = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> PyTree:
    """Run a computation on each shard, on its slice of the inputs, inside a shard context.

    With a computation, runs it now on ``inputs``, like ``tf.compat.v1.tpu.shard``. Without one,
    returns a decorator; the decorated function takes the inputs as arguments. NNX modules,
    variables and optimizers among them are passed to every shard and updated afterwards: replicated
    if they are equal on all shards after the step, otherwise as ``[shards, …]`` (see
    ``is_per_shard``). A step reads and writes no others.

    Args:
      computation: the function of one shard.
      inputs: a list of its arguments. Arrays and pytrees of arrays are split; modules, variables,
        optimizers and other values are passed to every shard. If there are several processes, each
        passes its own part of the arrays, and the same of all else.
      num_shards: the number of shards, one per device.
      input_shard_axes: for each positional input the axis to split, or ``None`` to pass the full
        array; one may be longer than another.
      outputs_from_all_shards: whether each output is joined over the shards, or taken from the
        first; one bool or one per output.
      output_shard_axes: for each output the axis to join along; axis 0 by default. Scalars are
        stacked.
      batch_axis: the axis of the rows in all arrays, which have as many; or a list with one entry
        per positional input: an axis, ``None`` to pass it in full, or a pytree prefix of the input
        with these.
      mesh: the mesh; all its axes count as shards, and its size is the number of shards. If
        ``None``, the one that ``jax.set_mesh`` has set at a call, if it has as many devices, or
        else one of an axis ``"shards"``.

    Returns:
      The outputs, with the structure that the computation returned.

    Raises:
      ArgumentError: a number of shards below 1 or above the number of devices; an axis that does
        not divide evenly; arrays of different lengths; lists of the wrong length.
      ArgumentTypeError: ``inputs`` is not a list.
      NestedContextError: called inside a shard context.
      VariableError: the computation reads or writes a variable that is not below its arguments.

    >>> import jax.numpy as jnp
    >>> shard(lambda x: x.sum(), [jnp.arange(4.0)], num_shards=1)
    Array([6.], dtype=float32)
    """
    outputs = check_outputs(outputs_from_all_shards, output_shard_axes)
    axes = check_input_axes(input_shard_axes, batch_axis)
    where = mesh_for(check_num_shards(num_shards), mesh)
    if computation is None:
        if inputs is not None:
            raise ArgumentTypeError("shard got inputs and no computation. Pass both, or neither.")
        return lambda function: ShardedFunction(
            _check_callable(function), where, axes, outputs, follows=mesh is None
        )
    if inputs is not None and not isinstance(inputs, list):
        raise ArgumentTypeError(
            f"inputs must be a list with one item per argument of the computation; got "
            f"{type(inputs).__name__}."
        )
    where = where if mesh is not None else mesh_in_force(where.size) or where
    return _sharded(computation, where, axes, outputs)(*(inputs or []))


def _sharded(
    computation: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    axes: InputAxes,
    outputs: Outputs,
    wrap: Callable[[Any], Any] = lambda computation: computation,
) -> ShardedFunction:
    """The runner of a computation, cached per function, or calls would recompile each time."""
    _check_callable(computation)
    how = mesh, axes, outputs, wrap
    if not isinstance(computation, types.FunctionType):
        return _remembered(ByValue(computation), *how)
    # Cached on the function, so that the runners are freed with it.
    known = vars(computation).setdefault("__crossshard_runners__", {})
    if how not in known:
        known[how] = ShardedFunction(wrap(computation), mesh, axes, outputs)
    return known[how]


@functools.lru_cache(maxsize=8)
def _remembered(computation: ByValue, mesh: Any, axes: Any, outputs: Any, wrap: Any) -> Any:
    return ShardedFunction(wrap(computation.value), mesh, axes, outputs)


def batch_parallel(
    computation: Callable[..., PyTree] | None = None,
    inputs: list[PyTree] | None = None,
    num_shards: int = 1,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> PyTree:
    """``shard`` that splits every input, and joins every output, along axis 0.

    >>> import jax.numpy as jnp
    >>> batch_parallel(lambda x: 2 * x, [jnp.arange(3.0)], num_shards=1)
    Array([0., 2., 4.], dtype=float32)
    """
    return shard(computation, inputs, num_shards, mesh=mesh)


def replicate(
    computation: Callable[..., PyTree],
    inputs: list[list[PyTree]] | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> list[PyTree]:
    """Run a computation once per replica, each on its own list of inputs.

    Args:
      computation: the function of one replica.
      inputs: one list of arguments per replica; arrays must have the same shapes in all, and other
        values must be the same object. ``None`` means one replica without arguments.
      mesh: the mesh; its size is the number of replicas.

    Returns:
      A list with each replica's outputs.

    Raises:
      ArgumentError: no replicas, or lists that do not match.
      ArgumentTypeError: ``inputs`` is not a list of lists.

    >>> import jax.numpy as jnp
    >>> replicate(lambda x: x + 1, [[jnp.float32(1)]])
    [Array(2., dtype=float32)]
    """
    lists: Any = [[]] if inputs is None else inputs
    if not isinstance(lists, list) or not all(isinstance(one, list) for one in lists):
        raise ArgumentTypeError(
            f"inputs must be a list with one list of arguments per replica; got "
            f"{_check.shown(inputs)}."
        )
    if not lists or len({len(one) for one in lists}) != 1:
        raise ArgumentError(
            f"inputs must have one list per replica, all of one length; got lengths "
            f"{[len(one) for one in lists]}."
        )
    where = mesh_for(len(lists), mesh_in_force(len(lists)) if mesh is None else mesh)
    if where.size != len(lists):
        raise ArgumentError(f"The mesh has {where.size} devices for {len(lists)} replicas.")
    rows = NamedSharding(where, PartitionSpec(where.axis_names))
    stacked = [_stack(place, values, rows) for place, values in enumerate(zip(*lists, strict=True))]
    joined = _sharded(computation, where, InputAxes(), Outputs(), _of_one_replica)(*stacked)
    joined = jax.tree.map(lambda x: _mesh.on_mesh(on_every_device(x), None), joined)
    # A row of what is split has no type on explicit axes.
    with _mesh.in_place_of_the_users_mesh(_mesh.with_automatic_axes(where)):
        row = lambda r: jax.tree.map(lambda x: _mesh.on_mesh(x[r], where), joined)
        return [row(r) for r in range(len(lists))]


def _of_one_replica(computation: Callable[..., Any]) -> Callable[..., Any]:
    """The computation on one row each of stacked arrays, which returns one row of each output."""

    def run(*rows: Any) -> Any:
        own = [row if is_whole(row) else jax.tree.map(lambda x: x[0], row) for row in rows]
        return jax.tree.map(lambda x: x[None], as_output(computation(*own)))

    return run


def rewrite(computation: Callable[..., PyTree], inputs: list[PyTree] | None = None) -> PyTree:
    """Run a computation on one shard, inside a shard context.

    >>> import jax.numpy as jnp
    >>> rewrite(lambda x: x + 1, [jnp.float32(1)])
    Array(2., dtype=float32)
    """
    if inputs is not None and not isinstance(inputs, list):
        raise ArgumentTypeError(f"inputs must be a list; got {type(inputs).__name__}.")
    return replicate(computation, [inputs or []])[0]


def _stack(place: int, values: tuple[Any, ...], rows: NamedSharding) -> Any:
    """The arrays of all replicas as one, which every process passes; other values as they are."""
    first = values[0]
    if is_whole(first):
        if any(value is not first for value in values):
            raise ArgumentError(
                f"Argument {place} is not an array, so it must be the same object for all replicas."
            )
        return first
    for replica, value in enumerate(values):
        for leaf in filter(is_number, jax.tree.leaves(value)):
            _check.array(f"Argument {place} of replica {replica}", leaf)
    try:
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *values)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"Argument {place} must have the same structure and shapes on all replicas: {error}"
        ) from None
    return jax.tree.map(lambda x: put_whole(x, rows), stacked)


def _check_callable(computation: Any) -> Callable[..., Any]:
    if not callable(computation) or inspect.isclass(computation):
        raise ArgumentTypeError(
            f"The computation must be a function; got {_check.shown(computation)}."
        )
    return computation
