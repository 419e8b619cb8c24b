"""``inspect``: from what JAX calls a lowered or compiled step to a report on it."""

from typing import Any

import jax

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.inspection.collectives import collectives
from crossshard.inspection.hlo import parse
from crossshard.inspection.parameters import (
    infer_parameter_bytes,
    joined_shards,
    parameter_bytes,
)
from crossshard.inspection.report import Communication, Memory


def inspect(program: Any, parameters: Any = None) -> Communication:
    """Every collective of a step's program, what it sends, and the least that it must.

    It reads the program alone, so it serves any step: ours, or one that knows nothing of us. N
    shards that average gradients of P bytes of parameters each send at least 2(N−1)/N · P, which
    an all-reduce of the gradients sends, and a reduce-scatter of them with an all-gather of the
    new parameters does too; parameters that are stored in parts are gathered first, at the same
    price. P is counted in the parameters' own dtype: sending them wider shows in the ratio.

    Which inputs are the parameters is told by what becomes of them: a reduction depends on them,
    and there is an output of their shape, dtype and layout that depends on a reduction. Where that
    does not hold, as in a step that is given its gradients, or says too much, as of a frozen
    weight that has the shape of a trained one, name them.

    Both branches of a conditional are counted, and a loop of unknown length as one run of it.

    Args:
      program: a ``jax.stages.Lowered`` or ``Traced``, which is compiled, or a ``Compiled``.
      parameters: one whole copy of the parameters, as arrays or ``jax.ShapeDtypeStruct`` in a
        pytree or as a number of bytes, where they are not to be told from the program.

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
    module = parse(text)
    found = collectives(module)
    devices = module.partitions * module.replicas
    known = (
        infer_parameter_bytes(
            module, _replicated(compiled.input_shardings), _replicated(compiled.output_shardings)
        )
        if parameters is None
        else parameter_bytes(parameters)
    )
    return Communication(
        collectives=found,
        devices=devices,
        shards=joined_shards(found, devices),
        parameter_bytes=known,
        memory=_memory(compiled),
    )


def _compiled(program: Any) -> jax.stages.Compiled:
    if isinstance(program, jax.stages.Traced):
        program = program.lower()
    if isinstance(program, jax.stages.Lowered):
        program = program.compile()
    if not isinstance(program, jax.stages.Compiled):
        name = getattr(program, "__name__", None)
        raise ArgumentTypeError(
            "inspect takes a lowered or compiled step, such as "
            f"jax.jit({name or 'step'}).lower(*args); got {type(program).__name__}"
            f"{f' {name}' if name else ''}."
        )
    return program


def _replicated(shardings: Any) -> list[bool]:
    # JAX has None, which is no leaf, for an argument that the program does not use.
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
