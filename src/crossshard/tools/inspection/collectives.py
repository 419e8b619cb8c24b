"""The collectives of a program, and the bytes that a shard sends for each."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from crossshard.tools.inspection.execution import Execution, executions
from crossshard.tools.inspection.groups import Groups, groups_of
from crossshard.tools.inspection.hlo import Array, Module, leaves
from crossshard.tools.inspection.overlap import Overlaps
from crossshard.tools.inspection.source import source_of

# The bytes that a shard in a group of n sends for an operand, with the optimal algorithm. An
# all-gather's operand is 1/n of its output.
_BYTES_SENT: dict[str, Callable[[int, float], float]] = {
    "all-reduce": lambda n, operand: 2 * (n - 1) * operand / n,
    "reduce-scatter": lambda n, operand: (n - 1) * operand / n,
    "all-gather": lambda n, operand: (n - 1) * operand,
    "all-to-all": lambda n, operand: (n - 1) * operand / n,
    "ragged-all-to-all": lambda n, operand: (n - 1) * operand / n,
    "collective-permute": lambda _, operand: operand,
    "collective-broadcast": lambda _, operand: operand,
}

KINDS = tuple(_BYTES_SENT)

# What a collective is hidden behind.
PRODUCTS, KERNELS, NOTHING = "matrix products", "other kernels", "nothing"

# Ops allowed between an all-reduce and the slice fused with it.
_UNCHANGED = {"get-tuple-element", "bitcast", "copy", "reshape", "transpose"}


def bytes_sent(kind: str, group_size: int, operand: float) -> float:
    """The bytes that one shard sends for a collective.

    Args:
      kind: one of ``KINDS``.
      group_size: the number of participants; one shard sends nothing.
      operand: the bytes of the shard's operand.

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
      operands: the arrays that a shard sends; several if XLA combined collectives.
      groups: the groups of participating device indices; for a permute, (source, target) pairs.
      group_size: the size of the largest group; 1 if nothing moves.
      bytes_sent: the bytes that one shard sends for arrays, in one call of the program.
      scalar_bytes_sent: the bytes that it sends for scalars: losses and metrics.
      source: the ``file:line`` that it comes from, if known: the first in user code, else in
        another library, never in crossshard. Of combined collectives XLA keeps the line of one.
      op_name: JAX's name of the operation.
      in_loop: whether it runs in a loop.
      in_branch: whether it runs in only one branch of a conditional, or only in steps in which a
        gradient is not finite.
      times: how often it runs if its branch is taken; ``None`` if the length of a loop is unknown,
        and the bytes are then those of one iteration.
      widened: whether the compiler widens the sum, as XLA for CPUs does with 16 bits.
      asynchronous: whether other work can run while it is under way.
      matrix_products: the number of matrix products and convolutions that are scheduled while it is
        under way; a fusion or a loop that holds one counts as one.
      other_kernels: the number of other kernels that are.
      name: the HLO name of the instruction.
      axes: the mesh axes along which it sends; empty if the mesh is unknown.
      within_shard: whether it only sends along axes that do not split the batch: tensor
        parallelism, which the lower bound does not cover.
      counted: whether the report's totals have it: of a conditional, the branch that sends most,
        and not what is sent only in steps in which a gradient is not finite.

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
    asynchronous: bool
    matrix_products: int
    other_kernels: int
    name: str
    axes: tuple[str, ...] = ()
    within_shard: bool = False
    counted: bool = True

    @property
    def combined(self) -> int:
        """The most collectives that XLA may have combined; operands of one call count, too."""
        # The operands of an all-to-all are one array.
        return 1 if "to-all" in self.kind else len(self.operands)

    @property
    def behind(self) -> str:
        """What hides it: ``matrix products``, ``other kernels`` or ``nothing``."""
        if self.matrix_products:
            return PRODUCTS
        return KERNELS if self.other_kernels else NOTHING

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of the operands, each once."""
        return tuple(dict.fromkeys(operand.dtype for operand in self.operands))


def collectives(module: Module) -> tuple[Collective, ...]:
    """The collectives of a program, in order of execution."""
    overlaps = Overlaps(module, KINDS)
    runs = list(_runs_of_collectives(module))
    found = [(run, _read(run, kind, module, overlaps.of(run))) for run, kind in runs]
    counted = {id(each) for _, each in _most((run, x) for run, x in found if not run.rare)}
    return tuple(dataclasses.replace(each, counted=id(each) in counted) for _, each in found)


def _most(
    found: Iterable[tuple[Execution, Collective]], depth: int = 0
) -> list[tuple[Execution, Collective]]:
    """Those that run if every conditional takes the branch that sends most.

    Args:
      found: the collectives of one branch, or of all, with their executions.
      depth: the number of conditionals around the branch.
    """
    kept: list[tuple[Execution, Collective]] = []
    conditionals: dict[str, dict[int, list[tuple[Execution, Collective]]]] = {}
    for run, each in found:
        if len(run.branches) == depth:
            kept.append((run, each))
        else:
            name, number = run.branches[depth]
            conditionals.setdefault(name, {}).setdefault(number, []).append((run, each))
    sent = lambda branch: (
        sum(each.bytes_sent for _, each in branch),
        sum(each.scalar_bytes_sent for _, each in branch),
    )
    for branches in conditionals.values():
        kept += max((_most(each, depth + 1) for each in branches.values()), key=sent)
    return kept


def _runs_of_collectives(module: Module) -> Iterator[tuple[Execution, str]]:
    """The collective instructions with their kinds; an asynchronous one counts once."""
    seen: set[str] = set()
    for run in executions(module):
        kind = _kind(run)
        if kind is None:
            continue
        # On TPUs an asynchronous collective is repeated in every fusion that overlaps it. Such a
        # chain is one collective, counted at its start.
        chain = run.instruction.quoted("frontend_attributes", "chain_id")
        if chain is not None:
            link = f"{chain} {kind} {run.instruction.attributes.get('channel_id')}"
            if link in seen and not _starts_chain(run):
                continue
            seen.add(link)
        yield run, kind


def _starts_chain(run: Execution) -> bool:
    return any(
        run.instruction.name in each.operands and "AsyncCollectiveStart" in each.rest
        for each in run.computation.instructions.values()
        if each.opcode == "custom-call"
    )


def _kind(run: Execution) -> str | None:
    opcode = run.instruction.opcode.removesuffix("-start")
    if opcode == "all-reduce" and _is_fused_scatter(run):
        return "reduce-scatter"
    return opcode if opcode in _BYTES_SENT else None


def _is_fused_scatter(run: Execution) -> bool:
    """Whether this all-reduce is fused with its slice, which is a reduce-scatter on TPUs.

    Without the fusion it sends the bytes of a full all-reduce.
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


def _read(run: Execution, kind: str, module: Module, beside: tuple[int, int] | None) -> Collective:
    instruction, (products, kernels) = run.instruction, beside or (0, 0)
    shapes = [run.computation.instructions[name].shape for name in instruction.operands]
    # The other operands are the output buffer, offsets and sizes.
    shapes = shapes[:1] if kind == "ragged-all-to-all" else shapes
    operands = [array for shape in shapes for array in leaves(shape)]
    groups = groups_of(instruction, kind, module)
    if kind == "collective-permute":
        moving = any(len(set(pair)) > 1 for pair in groups)
        size = 2 if moving else 1
    else:
        size = max(map(len, groups), default=1)
    # The operands of an all-to-all are one array, split by target.
    is_array = kind == "all-to-all" and len(operands) > 1
    sent = {False: 0.0, True: 0.0}
    for each in operands:
        sent[each.size <= 1 and not is_array] += bytes_sent(kind, size, each.bytes)
    times = 1 if run.times is None else run.times
    reducers = [module.computations[name] for name in instruction.called("to_apply")]
    # Combined and fused collectives lose their metadata, but their reducers keep it.
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
        in_loop=run.in_loop,
        in_branch=bool(run.branches) or run.rare,
        times=run.times,
        # XLA's name of the reducer of a widened sum.
        widened=any("promoted" in each.name for each in reducers),
        asynchronous=beside is not None,
        matrix_products=products,
        other_kernels=kernels,
        name=instruction.name,
    )
