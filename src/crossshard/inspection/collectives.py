"""Every collective of a program, and the bytes that a shard sends for it."""

import dataclasses
from collections.abc import Callable, Iterator

from crossshard.inspection.execution import Execution, executions
from crossshard.inspection.groups import Groups, groups_of
from crossshard.inspection.hlo import Array, Module, Shape, leaves
from crossshard.inspection.source import source_of

# What a shard in a group of n sends for an operand of so many bytes, by the best algorithm there
# is. It is not the rule for the result: an all-gather's operand is one n-th of what it gives.
_BYTES_SENT: dict[str, Callable[[int, int], float]] = {
    "all-reduce": lambda n, operand: 2 * (n - 1) * operand / n,
    "reduce-scatter": lambda n, operand: (n - 1) * operand / n,
    "all-gather": lambda n, operand: (n - 1) * operand,
    "all-to-all": lambda n, operand: (n - 1) * operand / n,
    "ragged-all-to-all": lambda n, operand: (n - 1) * operand / n,
    "collective-permute": lambda _, operand: operand,
    "collective-broadcast": lambda _, operand: operand,
}

KINDS = tuple(_BYTES_SENT)

# What may stand between an all-reduce and the slice that is fused with it.
_UNCHANGED = {"get-tuple-element", "bitcast", "copy", "reshape", "transpose"}


def bytes_sent(kind: str, group_size: int, operand: int) -> float:
    """What one shard sends for a collective.

    Args:
      kind: one of ``KINDS``.
      group_size: how many shards it joins; one shard sends nothing.
      operand: the bytes that the shard puts in.

    >>> bytes_sent("all-reduce", 8, 1024), bytes_sent("all-gather", 8, 128)
    (1792.0, 896)
    """
    return _BYTES_SENT[kind](group_size, operand) if group_size > 1 else 0


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, on one device.

    Attributes:
      kind: ``all-reduce``, ``reduce-scatter``, ``all-gather``, ``all-to-all``,
        ``ragged-all-to-all``, ``collective-permute`` or ``collective-broadcast``.
      operands: what a shard puts in: several arrays where XLA has combined collectives.
      groups: the devices that it joins, by their place in the program; of a permute, the pairs of
        source and target.
      group_size: how many devices the largest group has, and 1 where nothing moves.
      bytes_sent: what one shard sends for the arrays, in one call of the program.
      scalar_bytes_sent: what it sends beside for operands of one element: losses and metrics.
      source: the ``file:line`` that it comes from, where the program says it: the first that is
        the user's, or else another library's, and never ours. Where XLA has combined several, it
        has kept the line of one.
      op_name: the name that JAX gave the operation.
      in_loop: whether it is run within a loop.
      in_branch: whether it is run in one branch of a conditional only.
      times: how often it is run, where its branch is taken; none where the length of a loop is not
        known, and then the bytes are those of one run.
      widened: whether the compiler sums in more bits than it was told to, as XLA for CPUs does
        with 16.
      name: what XLA calls the instruction.

    >>> import jax, jax.numpy as jnp
    >>> import crossshard
    >>> mesh = jax.make_mesh((1,), ("shards",))
    >>> spec = jax.sharding.PartitionSpec()
    >>> step = jax.shard_map(lambda w: jax.lax.psum(w, "shards"), mesh=mesh, in_specs=spec,
    ...                      out_specs=spec, check_vma=False)
    >>> for each in crossshard.inspect(jax.jit(step).lower(jnp.ones(3))).collectives:
    ...     print(each.kind, *each.operands, each.bytes_sent)
    all-reduce f32[3] 0.0
    """

    kind: str
    operands: tuple[Array, ...]
    groups: Groups
    group_size: int
    bytes_sent: float
    scalar_bytes_sent: float
    source: str | None
    op_name: str | None
    in_loop: bool
    in_branch: bool
    times: int | None
    widened: bool
    name: str

    @property
    def combined(self) -> int:
        """How many collectives XLA has made this one of, at most: those of one call count, too."""
        # The operands of an exchange are parts of one array.
        return 1 if "to-all" in self.kind else len(self.operands)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of the operands, each once."""
        return tuple(dict.fromkeys(operand.dtype for operand in self.operands))


def is_scalar(array: Array) -> bool:
    """Whether an array has one element at most, and so is left aside."""
    return array.size <= 1


def collectives(module: Module) -> tuple[Collective, ...]:
    """The collectives that a program runs, in order."""
    return tuple(_read(run, kind, module) for run, kind in runs_of_collectives(module))


def runs_of_collectives(module: Module) -> Iterator[tuple[Execution, str]]:
    """The collectives as instructions with their kinds, each once in all its forms."""
    begun: set[str] = set()
    for run in executions(module):
        kind = _kind(run)
        if kind is None:
            continue
        # A TPU carries an asynchronous collective through the fusions that it runs beside, and
        # repeats it in each: the links of such a chain are one collective, which its start is.
        chain = run.instruction.quoted("frontend_attributes", "chain_id")
        if chain is not None:
            link = f"{chain} {kind} {run.instruction.attributes.get('channel_id')}"
            if link in begun and not _starts_chain(run):
                continue
            begun.add(link)
        yield run, kind


def _starts_chain(run: Execution) -> bool:
    return any(
        run.instruction.name in each.operands and "AsyncCollectiveStart" in each.rest
        for each in run.computation.instructions.values()
        if each.opcode == "custom-call"
    )


def operand_shapes(run: Execution, kind: str) -> list[Shape]:
    """The shapes of what a shard puts in, one for each operand."""
    shapes = [run.computation.instructions[name].shape for name in run.instruction.operands]
    # After its input come its output, to be written in place, and offsets and sizes.
    return shapes[:1] if kind == "ragged-all-to-all" else shapes


def _kind(run: Execution) -> str | None:
    opcode = run.instruction.opcode.removesuffix("-start")
    if opcode == "all-reduce" and _is_fused_scatter(run):
        return "reduce-scatter"
    return opcode if opcode in _BYTES_SENT else None


def _is_fused_scatter(run: Execution) -> bool:
    """Whether this all-reduce is a TPU's reduce-scatter: one fusion with the slice after it.

    Outside of such a fusion an all-reduce that is sliced sends all that an all-reduce does.
    """
    caller = run.caller
    if caller is None or caller.opcode != "fusion" or caller.attributes.get("kind") != "kCustom":
        return False
    known = {run.instruction.name}
    for each in run.computation.instructions.values():
        if each.opcode in _UNCHANGED and each.operands[0] in known:
            known.add(each.name)
        if each.opcode == "dynamic-slice" and each.operands[0] in known:
            return True
    return False


def _read(run: Execution, kind: str, module: Module) -> Collective:
    instruction = run.instruction
    operands = [array for shape in operand_shapes(run, kind) for array in leaves(shape)]
    groups = groups_of(instruction, kind, module)
    if kind == "collective-permute":
        moving = any(len(set(pair)) > 1 for pair in groups)
        size = 2 if moving else 1
    else:
        size = max(map(len, groups), default=1)
    # The operands of an exchange are one array, cut into what is for each shard.
    whole = kind == "all-to-all" and len(operands) > 1
    sent = {False: 0.0, True: 0.0}
    for each in operands:
        sent[is_scalar(each) and not whole] += bytes_sent(kind, size, each.bytes)
    times = 1 if run.times is None else run.times
    reducers = [module.computations[name] for name in instruction.called("to_apply")]
    # Where XLA's combined and fused ones have no metadata, their reducers still have.
    origins = [instruction, *filter(None, [run.caller]), *(each.root for each in reducers)]
    origin = next((each for each in origins if module.lines(each)), instruction)
    lines = [line for each in origins for line in module.lines(each)]
    return Collective(
        kind=kind,
        operands=tuple(operands),
        groups=groups,
        group_size=size,
        bytes_sent=times * sent[False],
        scalar_bytes_sent=times * sent[True],
        source=source_of(lines),
        op_name=origin.quoted("metadata", "op_name"),
        in_loop=bool(run.loops),
        in_branch=run.in_branch,
        times=run.times,
        # So XLA names the sum that it has put in place of one of fewer bits.
        widened=any("promoted" in each.name for each in reducers),
        name=instruction.name,
    )
