"""The runners: run a step on each shard, with its arrays split and its variables updated."""

import contextlib
import dataclasses
import functools
import inspect
import operator
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import _check, _jax, _mesh
from crossshard._annotations import PyTree
from crossshard._check import is_number
from crossshard.distributed.agreement import processes_of
from crossshard.distributed.watch import PROGRESS, entering
from crossshard.errors import ArgumentError, ArgumentTypeError, NestedContextError
from crossshard.nnx.program import (
    Call,
    Given,
    MissingSlots,
    Outputs,
    Program,
    as_output,
    is_numeric,
    is_stateful,
    is_unsplit,
)
from crossshard.shards.axes import check_num_shards, get_shard_context
from crossshard.shards.batch_axes import spec_along
from crossshard.shards.devices import (
    are_of_all_processes,
    mesh_for,
    mesh_in_force,
    on_every_device,
    own_shards,
    put,
    put_whole,
)

_TRACING = threading.RLock()


def check_axes(input_shard_axes: Any) -> tuple[int | None, ...] | None:
    """Check the argument of a runner about its inputs."""
    axes = input_shard_axes
    if axes is None:
        return None
    is_axis = lambda axis: axis is None or type(axis) is int
    if not isinstance(axes, list | tuple) or not all(map(is_axis, axes)):
        raise ArgumentTypeError(
            f"input_shard_axes must be a list of ints, with None for an input that every shard "
            f"gets whole; got {_check.shown(axes)}."
        )
    return tuple(axes)


def check_outputs(outputs_from_all_shards: Any, output_shard_axes: Any) -> Outputs:
    """Check the arguments of a runner about its outputs."""
    given = outputs_from_all_shards
    flags = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(flag, bool) for flag in flags):
        raise ArgumentTypeError(
            f"outputs_from_all_shards must be bools; got {_check.shown(given)}."
        )
    axes = output_shard_axes
    if axes is None:
        return Outputs(flags)
    if not isinstance(axes, list | tuple) or not all(type(axis) is int for axis in axes):
        raise ArgumentTypeError(
            f"output_shard_axes must be a list of ints; got {_check.shown(axes)}."
        )
    return Outputs(flags, tuple(axes))


def split_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: tuple[int | None, ...] | None,
    mesh: jax.sharding.Mesh,
) -> Call:
    """Put the arrays of a call on the mesh; each of several processes passes its own part."""
    if axes is not None and len(axes) != len(args):
        raise ArgumentError(
            f"input_shard_axes has {len(axes)} entries for {len(args)} inputs; pass one per input."
        )
    leaves: list[jax.Array] = []
    specs: list[PartitionSpec] = []
    unsplit: dict[int, Any] = {}
    places = enumerate(zip(args, axes or (0,) * len(args), strict=True))
    inputs = [(f"input {place}", value, axis) for place, (value, axis) in places]
    # JAX orders the leaves of keyword arguments by name.
    inputs += [(f"input {name!r}", value, 0) for name, value in sorted(kwargs.items())]
    for name, value, _ in inputs[len(args) :]:
        if axes is not None and not is_unsplit(value):
            raise ArgumentError(
                f"input_shard_axes has an entry for each input that is passed by position, and "
                f"none for {name}. Pass it by position."
            )
    first: tuple[str, int] | None = None  # an array that is split, and its number of rows
    for name, value, axis in inputs:
        if is_unsplit(value):
            for leaf in jax.tree.leaves(value, is_leaf=is_stateful):
                unsplit[len(leaves) + len(unsplit)] = leaf
            continue
        # Inputs may differ in length if each has an axis of its own.
        first = first if axes is None else None
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            where = name + jax.tree_util.keystr(path)
            if is_number(leaf):
                _check.array(where, leaf)
            specs.append(_spec(where, leaf, axis, mesh))
            leaves.append(put(leaf, NamedSharding(mesh, specs[-1])))
            if axis is None:
                continue
            first = first or (where, leaves[-1].shape[axis])
            if first[1] != leaves[-1].shape[axis]:
                raise ArgumentError(
                    f"{first[0]} and {where} are both split over the shards, and have {first[1]} "
                    f"and {leaves[-1].shape[axis]} rows. Write input_shard_axes=[...], with an "
                    f"axis for each input if each has rows of its own, or None for an input that "
                    f"every shard gets whole."
                )
    tree = jax.tree.structure((args, kwargs), is_leaf=is_stateful)
    given = Given(list(unsplit.values()), mesh.size)
    return Call(tuple(leaves), tuple(specs), unsplit, tree, given)


def _spec(where: str, leaf: Any, axis: int | None, mesh: jax.sharding.Mesh) -> PartitionSpec:
    if not is_numeric(leaf):
        raise ArgumentTypeError(
            f"{where} holds arrays and a {type(leaf).__name__}, which cannot be split over the "
            f"shards. Pass it as an argument of its own."
        )
    shape = np.shape(leaf)
    if axis is None:
        return PartitionSpec()
    if not shape:
        raise ArgumentError(
            f"{where} is a scalar, which cannot be split over {mesh.size} shards. Pass it to "
            f"every shard with None in input_shard_axes."
        )
    if not -len(shape) <= axis < len(shape):
        raise ArgumentError(f"{where} has shape {shape} and no axis {axis} to split along.")
    is_own = getattr(leaf, "is_fully_addressable", True)
    shards = len(own_shards(NamedSharding(mesh, PartitionSpec(mesh.axis_names)), mesh.size))
    shards = shards if is_own else mesh.size
    if shape[axis] % shards:
        of_process = "" if shards == mesh.size else " of this process"
        raise ArgumentError(
            f"{where} has shape {shape}: axis {axis} has length {shape[axis]}, which does not "
            f"divide evenly over {shards} shards{of_process}."
        )
    return spec_along(axis % len(shape), mesh.axis_names)


class ShardedFunction:
    """A step function that runs on each shard; ``shard`` and ``batch_parallel`` return it.

    Like ``jax.jit``, it compiles once for each structure of the variables and shapes of the arrays;
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
        axes: tuple[int | None, ...] | None,
        outputs: Outputs,
    ):
        functools.update_wrapper(self, computation)
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
        watched = entering("step") if self._is_watched else contextlib.nullcontext()
        with self._alone(), watched:
            program, call = self._program(args, kwargs)
            return program(call)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise inside another step or where there are no shards; then keep other threads out."""
        outer = get_shard_context()
        if outer is not None:
            raise NestedContextError(
                f"A runner over {self._mesh.size} shards was called inside a shard context of "
                f"{outer.number_of_shards}. Call it outside; or call the function itself."
            )
        if not self._is_here:
            raise ArgumentError(
                f"This step has no device of process {jax.process_index()}, and every process of "
                f"the job calls a step. Pass num_shards={len(jax.devices())}."
            )
        if not _jax.at_top_level():
            raise NestedContextError(
                f"A runner over {self._mesh.size} shards was called inside jax.jit, jax.shard_map, "
                f"nnx.jit or the like, and writes variables: call it outside; or call the function "
                f"itself."
            )
        # While one thread traces, the variables hold tracers.
        with _TRACING, _mesh.in_place_of_the_users_mesh(self._mesh):
            yield

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Call]:
        """Return the program for these arguments, and the arguments on the mesh."""
        before: list[tuple[Any, Any]] = []
        while True:
            call = split_arguments(args, kwargs, self._axes, self._mesh)
            for optimizer in call.given.optimizers:
                optimizer._share_out(self._mesh.size)
            try:
                program = self._programs.get(call.key())
            except (TypeError, ValueError) as error:
                raise ArgumentTypeError(
                    f"A step is compiled for the values that it is given and the attributes of its "
                    f"modules, and one of these cannot be compared ({error}). Write a string, a "
                    f"tuple or a frozen dataclass of such."
                ) from error
            if program is None:
                try:
                    program = Program(self._computation, self._mesh, self._outputs, call)
                except MissingSlots as missing:
                    missing.make()
                    continue
                except BaseException:
                    # What is refused leaves the variables as they were.
                    for variable, value in before:
                        variable.set_raw_value(value)
                    raise
                self._programs[call.key(lasting=True)] = program
            spread = program.spread(call)
            if not spread:
                return program, call
            before += spread

    def __get__(self, instance: object, owner: type | None = None) -> object:
        """Bind the step to an instance, which becomes its first input, as methods do."""
        return self if instance is None else types.MethodType(self, instance)


def shard(
    computation: Callable[..., PyTree] | None = None,
    inputs: list[PyTree] | None = None,
    num_shards: int = 1,
    input_shard_axes: Sequence[int | None] | None = None,
    outputs_from_all_shards: bool | Sequence[bool] = True,
    output_shard_axes: Sequence[int] | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> PyTree:
    """Run a computation on each shard, on its slice of the inputs, inside a shard context.

    With a computation, it is run now on ``inputs``, like ``tf.compat.v1.tpu.shard``. Without one,
    ``shard`` returns a decorator, and the decorated function takes the inputs as arguments. NNX
    modules, variables and optimizers among the inputs are passed to every shard and updated
    afterwards: replicated if they are equal on all shards after the step, otherwise as
    ``[shards, …]`` (see ``is_per_shard``). A step cannot read or write any other variables.

    Args:
      computation: the function of one shard.
      inputs: a list of its arguments. Arrays and pytrees of arrays are split; modules, variables,
        optimizers and other values are passed to every shard. If there are several processes, each
        passes its own part of the arrays, and all pass the same other values.
      num_shards: the number of shards, one per device.
      input_shard_axes: for each positional input the axis along which its arrays are split, or
        ``None`` to pass them whole; axis 0 of all by default, which then have equally many rows.
      outputs_from_all_shards: whether each output is joined over the shards, or taken from the
        first; one bool or one per output.
      output_shard_axes: for each output the axis to join along; axis 0 by default. Scalars are
        stacked.
      mesh: the mesh; all its axes count as shards, and its size is the number of shards. If
        ``None``, the mesh that ``jax.set_mesh`` has set around this call if it has ``num_shards``
        devices, or else a new mesh with an axis ``"shards"``.

    Returns:
      The outputs, with the structure that the computation returned.

    Raises:
      ArgumentError: a number of shards below 1 or above the number of devices; an axis that does
        not divide evenly; arrays of different lengths; lists of the wrong length.
      ArgumentTypeError: ``inputs`` is not a list, or is missing.
      NestedContextError: called inside a shard context.
      VariableError: the computation reads or writes a variable that is not below its arguments.

    >>> import jax.numpy as jnp
    >>> shard(lambda x: x.sum(), [jnp.arange(4.0)], num_shards=1)
    Array([6.], dtype=float32)
    """
    outputs = check_outputs(outputs_from_all_shards, output_shard_axes)
    axes, number = check_axes(input_shard_axes), check_num_shards(num_shards)
    where = mesh_for(number, mesh_in_force(number) if mesh is None else mesh)
    if computation is None:
        if inputs is not None:
            raise ArgumentTypeError("shard got inputs and no computation. Pass both, or neither.")
        return lambda function: ShardedFunction(_check_callable(function), where, axes, outputs)
    if inputs is not None and not isinstance(inputs, list):
        raise ArgumentTypeError(
            f"inputs must be a list with one item per argument of the computation; got "
            f"{type(inputs).__name__}."
        )
    run = _runner(computation, where, axes, outputs)
    if inputs is None:
        _check_takes_none(computation, number)
    return run(*(inputs or []))


def _runner(computation: Any, *options: Any) -> ShardedFunction:
    """Return the runner of a computation, cached so that not every call compiles."""
    if not isinstance(_check_callable(computation), types.FunctionType):
        return _cached(computation, *options)
    # Cached on the function, so that the runners are freed with it.
    known: dict[Any, Any] = vars(computation).setdefault("__crossshard_runners__", {})
    if options not in known:
        known[options] = ShardedFunction(computation, *options)
    return known[options]


_cached = functools.lru_cache(maxsize=8)(ShardedFunction)


def batch_parallel(
    computation: Callable[..., PyTree] | None = None,
    inputs: list[PyTree] | None = None,
    num_shards: int = 1,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> PyTree:
    """Run a computation on each shard, with all inputs split and all outputs joined along axis 0.

    See ``shard``.

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
      inputs: one list of arguments per replica. Arrays must have the same shapes in all lists, and
        other values must be the same object. ``None`` means one replica without arguments.
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
    run = _runner(_OnOneRow(_check_callable(computation)), where, None, Outputs())
    joined = jax.tree.map(on_every_device, run(*stacked))
    row = lambda replica: functools.partial(_mesh.of_rows, operator.itemgetter(replica))
    return [jax.tree.map(row(replica), joined) for replica in range(len(lists))]


@dataclasses.dataclass(frozen=True)
class _OnOneRow:
    """Runs a computation on the single row of each array, and returns outputs with a single row."""

    computation: Callable[..., Any]

    def __call__(self, *rows: Any) -> Any:
        own = [row if is_unsplit(row) else jax.tree.map(lambda x: x[0], row) for row in rows]
        return jax.tree.map(lambda x: x[None], as_output(self.computation(*own)))


def rewrite(computation: Callable[..., PyTree], inputs: list[PyTree] | None = None) -> PyTree:
    """Run a computation on one shard, inside a shard context.

    >>> import jax.numpy as jnp
    >>> rewrite(lambda x: x + 1, [jnp.float32(1)])
    Array(2., dtype=float32)
    """
    whole = [None] * len(inputs) if isinstance(inputs, list) else None
    return shard(computation, inputs, input_shard_axes=whole, outputs_from_all_shards=False)


def _stack(place: int, values: tuple[Any, ...], rows: NamedSharding) -> Any:
    """Stack the arrays of all replicas, which every process passes; keep other values."""
    first = values[0]
    if is_unsplit(first):
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


def _check_takes_none(computation: Callable[..., Any], number: int) -> None:
    """Raise ArgumentTypeError if a computation without inputs takes some."""
    try:
        signature = inspect.signature(computation)
    except ValueError:  # of a function in C
        return
    try:
        signature.bind()
    except TypeError:
        name = getattr(computation, "__name__", "computation")
        raise ArgumentTypeError(
            f"shard({name}, num_shards={number}) runs {name} now, which takes {signature}, and got "
            f"no inputs. For a function to be called later write shard(num_shards={number})"
            f"({name}); or pass inputs, a list of its arguments."
        ) from None


def _check_callable(computation: Any) -> Callable[..., Any]:
    if not callable(computation) or inspect.isclass(computation):
        raise ArgumentTypeError(
            f"The computation must be a function; got {_check.shown(computation)}."
        )
    return computation
