"""``inspect``: from what JAX calls a lowered or compiled step to a report on it."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.inspection.collectives import collectives
from crossshard.inspection.hlo import Module, parse
from crossshard.inspection.parameters import find_trained, joined_devices, parameter_bytes
from crossshard.inspection.report import Communication, Memory


def inspect(program: Any, parameters: Any = None) -> Communication:
    """Every collective of a step's program, what it sends, and the least that it must.

    It reads the program alone, so it serves any step: ours, or one that knows nothing of us. N
    shards that average gradients of P bytes of parameters each send at least 2(N−1)/N · P, which
    an all-reduce of the gradients sends, and a reduce-scatter of them with an all-gather of the
    new parameters does too; parameters that are stored in parts are gathered first, at the same
    price. P is counted in the parameters' own dtype: sending them wider shows in the ratio. XLA for
    CPUs does so by itself with parameters of 16 bits and fewer.

    Which inputs are the parameters is told by what becomes of them: a reduction depends on them,
    and an output of their shape, dtype and layout depends on that reduction, and on them directly
    as well. Where that does not hold, as in a step that is given its gradients or whose loss is
    linear in a parameter, or where it says too much, as of a target network that is in the loss
    and follows the parameters, name them. N is how many devices the collectives between a
    parameter and its new value join, so where layers are split over devices, too, it counts these.

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
      ArgumentTypeError: what is given is no program, or the parameters are no arrays.
      ArgumentError: the program has no text to read, or text that is no HLO.

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
        _parts(compiled),
        _replicated(compiled.output_shardings),
        None if parameters is None else parameter_bytes(parameters),
        _memory(compiled),
    )


def report_on(
    module: Module,
    inputs: Sequence[int],
    outputs: Sequence[bool],
    parameters: int | None = None,
    memory: Memory | None = None,
) -> Communication:
    """The report on a program that has been read.

    Args:
      module: the program.
      inputs: per input, into how many different parts it is cut over the devices.
      outputs: per output, whether all devices hold the same of it.
      parameters: their bytes, where they are not to be told from the program.
      memory: the compiler's own numbers.
    """
    found = collectives(module)
    devices = module.partitions * module.replicas
    trained = find_trained(module, inputs, outputs)
    if parameters is None and trained is not None:
        parameters = trained.bytes
    sending = (each.groups for each in found if each.bytes_sent)
    return Communication(
        collectives=found,
        devices=devices,
        shards=trained.shards if trained else joined_devices(sending, devices),
        parameter_bytes=parameters,
        parameter_dtypes=trained.dtypes if trained else (),
        memory=memory,
    )


def _compiled(program: Any) -> jax.stages.Compiled:
    # Flax wraps what JAX lowers and compiles.
    inner = getattr(program, "compiled", getattr(program, "lowered", program))
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


def _parts(compiled: jax.stages.Compiled) -> list[int]:
    """Per input that the program uses, into how many different parts the devices hold it."""
    infos, tree = jax.tree.flatten(compiled.args_info)
    shardings = tree.flatten_up_to(compiled.input_shardings)
    return [
        math.prod(info.shape) // max(1, math.prod(sharding.shard_shape(info.shape)))
        for info, sharding in zip(infos, shardings, strict=True)
        # JAX has None for an argument that the program does not use.
        if sharding is not None
    ]


def _replicated(shardings: Any) -> list[bool]:
    return [each.is_fully_replicated for each in jax.tree.leaves(shardings)]


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
