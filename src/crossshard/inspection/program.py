"""``inspect``: from what JAX calls a lowered or compiled step to a report on it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.inspection.collectives import collectives
from crossshard.inspection.hlo import Module, parse
from crossshard.inspection.layout import Layout, input_layouts
from crossshard.inspection.parameters import Parameters, named_bytes
from crossshard.inspection.replicas import joined_devices
from crossshard.inspection.report import Communication, Memory
from crossshard.inspection.trained import find_trained


def inspect(program: Any, parameters: Any = None) -> Communication:
    """Every collective of a step's program, what it sends, and the least that it must.

    It reads the program alone, so it serves any step: ours, or one that knows nothing of us. N
    shards that average gradients of P bytes of parameters each send at least 2(N−1)/N · P, which
    an all-reduce of the gradients sends, and a reduce-scatter of them with an all-gather of the
    new parameters does too; parameters that are stored in parts are gathered first, at the same
    price. P is counted in the parameters' own dtype: sending them wider shows in the ratio, and
    the report says whether the step widens them or XLA, which for CPUs does with 16 bits.

    Which inputs are the parameters is told by what becomes of them: a reduction depends on them,
    and an output of their shape, dtype and layout depends on that reduction, and on them directly
    as well. Where that does not hold, as in a step that is given its gradients or whose loss is
    linear in a parameter, or where it says too much, as of a target network that is in the loss
    and follows the parameters, name them. Of several steps in one program, in a loop or written
    out, the bound counts each.

    N is how many devices keep a parameter the same and see different data, as far as that is among
    the program's inputs. Where layers are split over some devices, these are one shard, and P is
    one device's part. Experts that lie on fewer devices than the layers around them have a bound of
    their own, and all are added up.

    Both branches of a conditional are counted, and a loop of unknown length as one run of it.

    Args:
      program: a ``jax.stages.Lowered`` or ``Traced``, which is compiled, or a ``Compiled``; those
        of ``nnx.jit`` as well.
      parameters: what is kept the same, once: as arrays or ``jax.ShapeDtypeStruct`` in a pytree or
        as a number of bytes, where it is not to be told from the program. Of parameters stacked
        for each device that is one device's, of layers split over devices one device's part.

    Returns:
      The report: print it, read its attributes, or take ``to_json()``.

    Raises:
      ArgumentTypeError: what is given is not a program, or the parameters are not arrays.
      ArgumentError: the program has no text to read, or text that is not HLO.

    >>> import jax, jax.numpy as jnp
    >>> report = inspect(jax.jit(lambda w: w - 0.1 * w).lower(jnp.zeros(3)))
    >>> report.collectives, report.bytes_sent, report.memory.argument
    ((), 0, 12)
    """
    compiled = _compiled(program)
    text = compiled.as_text()
    if text is None:
        raise ArgumentError("The compiled program gives no text to read; compile it afresh.")
    return report_on(
        parse(text),
        input_layouts(compiled),
        [each.is_fully_replicated for each in jax.tree.leaves(compiled.output_shardings)],
        None if parameters is None else named_bytes(parameters),
        _memory(compiled),
    )


def report_on(
    module: Module,
    inputs: Sequence[Layout],
    outputs: Sequence[bool],
    parameters: Mapping[str | None, int] | None = None,
    memory: Memory | None = None,
) -> Communication:
    """The report on a program that has been read.

    Args:
      module: the program.
      inputs: per input, which piece each device holds.
      outputs: per output, whether all devices hold the same of it.
      parameters: their bytes by dtype, where they are not to be told from the program.
      memory: the compiler's own numbers.
    """
    found = collectives(module)
    devices = module.partitions * module.replicas
    trained = find_trained(module, inputs, outputs)
    if trained:
        most = max(trained, key=lambda each: each.bytes)
    else:
        sending = (each.groups for each in found if each.bytes_sent)
        most = Parameters(None, 0, joined_devices(sending, devices))
    if parameters is not None:
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
    """Whether this is a program that JAX, or Flax around it, has traced, lowered or compiled."""
    stages = jax.stages.Lowered | jax.stages.Compiled | jax.stages.Traced
    return isinstance(_unwrapped(step), stages)


def program_of(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A step lowered for its arguments, or the program that it is already.

    Args:
      step: a function, with ``jax.jit`` or without, or anything that has ``lower``; or a program,
        without arguments.
      args: what to lower the step for, as arrays or ``jax.ShapeDtypeStruct``.
      kwargs: what else.

    Raises:
      ArgumentTypeError: the step is not a step, or a program is given arguments.
    """
    if is_program(step):
        if args or kwargs:
            raise ArgumentTypeError(
                f"A step takes arguments; {type(step).__name__} is a program that has its own "
                f"already, so leave out the {len(args) + len(kwargs)} given."
            )
        return step
    # A string has a method lower, too.
    if hasattr(step, "lower") and not isinstance(step, str):
        return step.lower(*args, **kwargs)
    if not callable(step):
        raise ArgumentTypeError(
            "A step is a function, anything with a method lower, or a lowered or compiled program; "
            f"got {type(step).__name__}."
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
