"""``inspect``: a communication report on a lowered or compiled step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax

from crossshard._annotations import PyTree
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools.inspection.collectives import collectives
from crossshard.tools.inspection.find_trained import find_trained
from crossshard.tools.inspection.hlo import Module, parse
from crossshard.tools.inspection.mesh_axes import Axes, axes_of, mesh_axes, within_shard
from crossshard.tools.inspection.parameters import Parameters, named_bytes
from crossshard.tools.inspection.pieces import Pieces, input_pieces
from crossshard.tools.inspection.replicas import joined_devices
from crossshard.tools.inspection.report import Communication, Memory
from crossshard.tools.inspection.slices import with_slices


class HoldsLowered(Protocol):
    """What ``nnx.jit(step).lower(…)`` returns."""

    @property
    def lowered(self) -> jax.stages.Lowered:
        """JAX's own."""


class HoldsCompiled(Protocol):
    """What ``nnx.jit(step).lower(…).compile()`` returns."""

    @property
    def compiled(self) -> jax.stages.Compiled:
        """JAX's own."""


Program: TypeAlias = (
    jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled | HoldsLowered | HoldsCompiled
)


class HasLower(Protocol):
    """A function of ``jax.jit`` or ``nnx.jit``, or a ``TrainStep``."""

    def lower(self, *args: Any, **kwargs: Any) -> Program:
        """The program for these arguments."""


def inspect(program: Program, parameters: PyTree | int | None = None) -> Communication:
    """Report every collective of a compiled step, its bytes, and the lower bound.

    It works for any JAX step. N shards that average gradients of P bytes of parameters each send at
    least 2(N−1)/N · P. An all-reduce of the gradients sends that; so does a reduce-scatter of the
    gradients with an all-gather of the parameters, before or after the update. P is counted in the
    parameters' dtype, so sending a wider dtype raises the ratio, and the report shows whether the
    step widens them or XLA, which for CPUs widens 16 bits.

    The parameters are found from the program: a reduction depends on them, and an output of the
    same shape, dtype and layout depends on that reduction and directly on them. Pass ``parameters``
    if this fails (gradients as inputs, a loss that is linear in a parameter) or finds too much (a
    target network that is in the loss and follows the parameters). If a program has several steps,
    in a loop or unrolled, the bound counts each.

    N is the number of devices that keep a copy of a parameter and have different data among the
    program's inputs. Devices over which layers are split are one shard, and P is one device's
    slice. Experts that are on fewer devices than the other layers have their own bound, and all
    bounds are added. Of parameters that rest in parts the bound counts what is sent: the dtypes of
    gathers and sums if they have fewer bits, and twice what is gathered twice, as
    ``jax.checkpoint`` does.

    Of a conditional, the branch that sends most counts; a loop of unknown length counts once. What
    ``nonfinite=`` sends only where a gradient is not finite does not count.

    Args:
      program: a ``jax.stages.Lowered`` or ``Traced``, which is compiled, or a ``Compiled``; also
        those of ``nnx.jit``.
      parameters: the parameters of one device, as a pytree of arrays or ``jax.ShapeDtypeStruct`` or
        as a number of bytes, if they cannot be found in the program.

    Returns:
      The report: print it, read its attributes, or call ``to_json()``.

    Raises:
      ArgumentTypeError: ``program`` is not a lowered or compiled step, or the parameters are not
        arrays.
      ArgumentError: the program has no text, or text that is not HLO.

    >>> import jax, jax.numpy as jnp
    >>> report = inspect(jax.jit(lambda w: w - 0.1 * w).lower(jnp.zeros(3)))
    >>> report.collectives, report.bytes_sent, report.memory.argument
    ((), 0, 12)
    """
    compiled = _compiled(program)
    text = compiled.as_text()
    if text is None:
        raise ArgumentError("The compiled program has no HLO text; compile it again.")
    return report_on(
        with_slices(parse(text)),
        input_pieces(compiled),
        [each.is_fully_replicated for each in jax.tree.leaves(compiled.output_shardings)],
        None if parameters is None else named_bytes(parameters),
        _memory(compiled),
        mesh_axes(compiled),
    )


def report_on(
    module: Module,
    inputs: Sequence[Pieces],
    outputs: Sequence[bool],
    parameters: Mapping[str | None, int] | None = None,
    memory: Memory | None = None,
    axes: Axes = (),
) -> Communication:
    """The report on a parsed program.

    Args:
      module: the program.
      inputs: for each input, the piece that each device holds.
      outputs: for each output, whether it is replicated.
      parameters: their bytes by dtype, if given.
      memory: the compiler's memory analysis.
      axes: the axes of the program's mesh.
    """
    devices = module.devices
    trained, data = find_trained(module, inputs, outputs)
    found = tuple(
        dataclasses.replace(
            each, axes=axes_of(each.groups, axes), within_shard=within_shard(each.groups, data)
        )
        for each in collectives(module)
    )
    if trained:
        most = max(trained, key=lambda each: each.bytes)
    else:
        sending = (each.groups for each in found if each.bytes_sent)
        most = Parameters(None, 0, joined_devices(sending, devices))
    found_bytes = {each.dtype: each.bytes for each in trained}
    if parameters is not None and parameters not in (
        found_bytes,
        {None: sum(found_bytes.values())},
    ):
        trained = tuple(
            dataclasses.replace(most, dtype=dtype or most.dtype, bytes=total)
            for dtype, total in parameters.items()
        )
    return Communication(
        collectives=found,
        devices=devices,
        shards=most.shards,
        parameters=trained,
        memory=memory,
    )


def is_program(step: Any) -> bool:
    """Whether this is a traced, lowered or compiled program of JAX or Flax."""
    stages = jax.stages.Lowered | jax.stages.Compiled | jax.stages.Traced
    return isinstance(_unwrapped(step), stages)


def program_of(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
    """A step lowered for its arguments, or the program itself.

    Args:
      step: a function, with ``jax.jit`` or without, or anything that has ``lower``; or a program,
        without arguments.
      args: the arguments to lower the step with, as arrays or ``jax.ShapeDtypeStruct``.
      kwargs: the keyword arguments.

    Raises:
      ArgumentTypeError: ``step`` cannot be lowered, or a program is passed with arguments.
    """
    if is_program(step):
        if args or kwargs:
            raise ArgumentTypeError(
                f"A step takes arguments; {type(step).__name__} is a program that already has its "
                f"own, so leave out the {len(args) + len(kwargs)} given."
            )
        return step
    # Strings also have a method lower.
    if hasattr(step, "lower") and not isinstance(step, str | bytes | bytearray):
        return step.lower(*args, **kwargs)
    if not callable(step):
        raise ArgumentTypeError(
            "A step is a function, an object with a method lower, or a lowered or compiled "
            f"program; got {type(step).__name__}."
        )
    return jax.jit(step).lower(*args, **kwargs)


def _unwrapped(program: Any) -> Any:
    # Flax wraps what JAX lowers and compiles.
    return getattr(program, "compiled", getattr(program, "lowered", program))


def _compiled(program: Any) -> jax.stages.Compiled:
    inner = _unwrapped(program)
    if isinstance(inner, jax.stages.Traced):
        inner = inner.lower()
    if isinstance(inner, jax.stages.Lowered):
        inner = inner.compile()
    if not isinstance(inner, jax.stages.Compiled):
        name = getattr(program, "__name__", None)
        raise ArgumentTypeError(
            "inspect takes a lowered or compiled step, such as "
            f"jax.jit({name or 'step'}).lower(*args); got {type(program).__name__}"
            f"{f' {name}' if name else ''}."
        )
    return inner


def _memory(compiled: jax.stages.Compiled) -> Memory | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        temp=stats.temp_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
    )
