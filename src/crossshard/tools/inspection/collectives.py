"""The collectives of a program: what a shard sends, how often, and what runs meanwhile."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator

from crossshard.step.rebuild import RARE_SCOPES
from crossshard.tools.inspection.hlo import (
    Array,
    Computation,
    Groups,
    Instruction,
    Module,
    groups_of,
    leaves,
    source_of,
)

# The bytes that a shard in a group of n sends for an operand, with the optimal algorithm. The
# operand of an all-gather is 1/n of its output.
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

# Attributes that name a called computation. to_apply also names reducers, which do not communicate.
CALLS = ("calls", "to_apply")
BRANCHES = ("branch_computations", "true_computation", "false_computation")
_LOOP = ("condition", "body")
_ALL = (*CALLS, *BRANCHES, *_LOOP)

# Ops that may stand between a loop's counter and its use.
_COPIES = {"copy", "copy-start", "copy-done", "bitcast", "reshape"}

_DOTS = {"dot", "ragged-dot", "scaled-dot", "convolution"}
# Matrix products and convolutions of the libraries that XLA calls: __cublas$gemm,
# __cublas$lt$matmul, __cudnn$convForward, __cudnn$fmhaSoftmax, __onednn$matmul.
_PRODUCT_CALL = re.compile(r"gemm|matmul|fmha|\$conv", re.IGNORECASE)
# Custom calls with which XLA for TPUs marks buffers and asynchronous collectives.
_MARKS = {
    *("AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone"),
    *("PrepareAsyncCallStart", "PrepareAsyncCallDone"),
}
# Instructions that run nothing.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("add-dependency", "opt-barrier", "partition-id", "replica-id", "send", "recv"),
}
# A call-start runs a computation on a SparseCore of a TPU.
_ASYNC = {"async-start", "call-start"}
_CALLING = {"fusion", "call", "while", "conditional", *_ASYNC}

_NOTHING, KERNEL, PRODUCT = range(3)


def bytes_sent(kind: str, group_size: int, operand: float) -> float:
    """Return the bytes that one of ``group_size`` shards sends, given those of its operand.

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
        another library, never in crossshard. For combined collectives XLA keeps one line.
      op_name: JAX's name of the operation.
      in_loop: whether it runs in a loop.
      in_branch: whether it runs in only one branch of a conditional, or only in few steps, in which
        a gradient is not finite or copies are compared.
      times: how often it runs if its branch is taken; ``None`` if the length of a loop is unknown,
        and the bytes are then those of one iteration.
      widened: whether the compiler widens the sum, as XLA for CPUs does with 16 bits.
      asynchronous: whether other work can run while it is under way.
      matrix_products: the number of matrix products and convolutions that are scheduled while it is
        under way; a fusion or a loop that holds one counts as one.
      other_kernels: the number of other kernels that are scheduled meanwhile.
      name: the HLO name of the instruction.
      axes: the mesh axes along which it sends; empty if the mesh is unknown.
      within_shard: whether it only sends along axes that do not split the batch: tensor
        parallelism, which the lower bound does not cover.
      counted: whether it is in the report's totals. Of a conditional, only the branch that sends
        most is; collectives that only run where a gradient is not finite are not.

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
    def behind(self) -> str:
        """What hides it: ``matrix products``, ``other kernels`` or ``nothing``."""
        if self.matrix_products:
            return PRODUCTS
        return KERNELS if self.other_kernels else NOTHING

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of the operands, each once."""
        return tuple(dict.fromkeys(operand.dtype for operand in self.operands))


# What a program executes, and how often.


@dataclasses.dataclass(frozen=True)
class Execution:
    """One executed instruction."""

    instruction: Instruction
    computation: Computation
    caller: Instruction | None = None  # the instruction that calls it; None in the entry
    around: Computation | None = None  # the computation of the caller
    in_loop: bool = False
    # The conditionals around it, outermost first, each with the number of the branch.
    branches: tuple[tuple[str, int], ...] = ()
    times: int | None = 1  # in one call of the program; None if a loop's length is unknown
    rare: bool = False  # only in few steps, such as those in which a gradient is not finite


def executions(module: Module, at: Execution | None = None) -> Iterator[Execution]:
    """Yield all instructions that can execute, in order, including all branches of a conditional.

    Args:
      module: the program.
      at: an execution of the computation to begin with; the entry by default.
    """
    at = at or Execution(module.entry.root, module.entry)
    for instruction in at.computation.instructions.values():
        run = dataclasses.replace(at, instruction=instruction)
        yield run
        # The end of an asynchronous computation repeats its name.
        if instruction.opcode.endswith(("-update", "-done")):
            continue
        rare = at.rare or is_rare(instruction)
        inner = dataclasses.replace(run, caller=instruction, around=at.computation, rare=rare)
        for computation in called_computations(module, instruction, CALLS):
            yield from executions(module, dataclasses.replace(inner, computation=computation))
        branches = called_computations(module, instruction, BRANCHES)
        for number, computation in enumerate(branches):
            taken = (*at.branches, (instruction.name, number))
            branch = dataclasses.replace(inner, computation=computation, branches=taken)
            yield from executions(module, branch)
        if instruction.opcode == "while":
            # The loop of rare steps has one iteration, or none.
            starts_rare = rare and not at.rare
            trips = 1 if starts_rare else trip_count(module, at.computation, instruction)
            times = None if trips is None or at.times is None else at.times * trips
            inner = dataclasses.replace(inner, in_loop=at.in_loop or not starts_rare, times=times)
            for computation in called_computations(module, instruction, _LOOP):
                yield from executions(module, dataclasses.replace(inner, computation=computation))


def is_rare(instruction: Instruction) -> bool:
    """Return whether this is a loop or a conditional that runs only in few steps."""
    scopes = (instruction.quoted("metadata", "op_name") or "").split("/")
    # Only the loop or the conditional itself, since all that runs in it names the scope, too.
    return not RARE_SCOPES.isdisjoint(scopes) and instruction.opcode in ("while", "conditional")


def called_computations(
    module: Module, instruction: Instruction, attributes: tuple[str, ...] = _ALL
) -> list[Computation]:
    """Return the computations that an instruction runs, including all branches and loops."""
    names = [name for attribute in attributes for name in instruction.called(attribute)]
    return [module.computations[name] for name in names]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Return the trip count of a ``while`` in this computation, or ``None`` if unknown.

    XLA annotates it on CPUs and GPUs. On TPUs it is found from the counter: an element of the carry
    with a constant start, increment and limit.
    """
    config = loop.attributes.get("backend_config", "")
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', config):
        return int(known[1])
    carry = _unchanged(computation, loop.operands[0])
    (condition,) = (module.computations[name] for name in loop.called("condition"))
    (body,) = (module.computations[name] for name in loop.called("body"))
    test, after = condition.root, body.root
    if carry.opcode != "tuple" or after.opcode != "tuple":
        return None
    if test.opcode != "compare" or test.attributes.get("direction") != "LT":
        return None
    counter = _element(condition, test.operands[0])
    if counter is None:
        return None

    def value(inside: Computation, name: str) -> int | None:
        """Return the value of an instruction in the condition or body, if it is constant."""
        element = _element(inside, name)
        if element is None:
            return _constant(inside, name)
        if _element(body, after.operands[element]) != element:
            return None
        return _constant(computation, carry.operands[element])

    added = _unchanged(body, after.operands[counter])
    steps = [name for name in added.operands if _element(body, name) != counter]
    if added.opcode != "add" or len(steps) != 1:
        return None
    start = _constant(computation, carry.operands[counter])
    limit, step = value(condition, test.operands[1]), value(body, steps[0])
    if start is None or limit is None or step is None or step < 1:
        return None
    return max(0, math.ceil((limit - start) / step))


def _unchanged(computation: Computation, name: str) -> Instruction:
    """Return the instruction that a value comes from, through copies."""
    found = computation.instructions[name]
    while found.opcode in _COPIES:
        found = computation.instructions[found.operands[0]]
    return found


def _element(computation: Computation, name: str) -> int | None:
    """Return the index of a value in its computation's parameter, or ``None``."""
    found = _unchanged(computation, name)
    if found.opcode != "get-tuple-element":
        return None
    if computation.instructions[found.operands[0]].opcode != "parameter":
        return None
    return int(found.attributes["index"])


def _constant(computation: Computation, name: str) -> int | None:
    found = _unchanged(computation, name)
    is_int = found.opcode == "constant" and re.fullmatch(r"-?\d+", found.argument)
    return int(found.argument) if is_int else None


# Overlap: what runs while a collective is under way.


class Overlaps:
    """What runs while the collectives of a program are under way, from its schedule."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._schedule = functools.cache(self._schedule_of)

    def of(self, run: Execution) -> tuple[int, int] | None:
        """Count the matrix products and the other kernels that run during a collective.

        A fusion or a loop counts as one. ``None`` if the collective is synchronous.
        """
        start, computation = run.instruction, run.computation
        caller, around = run.caller, run.around
        chain = start.quoted("frontend_attributes", "chain_id")
        if caller is not None and around is not None:
            if caller.opcode in _ASYNC:
                start, computation = caller, around
            elif caller.opcode == "fusion" and chain is not None:
                return self._between(around, caller, chain)
        if start.sent_as is not None:
            return self._between(computation, start, start.rendezvous or "")
        if not start.opcode.endswith("-start") or _is_sync(run.instruction) or _is_sync(start):
            return None
        return self._between(computation, start, start.name)

    def _between(self, computation: Computation, start: Instruction, ended: str) -> tuple[int, int]:
        work, ends = self._schedule(computation.name)
        first = list(computation.instructions).index(start.name) + 1
        meanwhile = work[first : ends.get(ended, first)]
        return meanwhile.count(PRODUCT), meanwhile.count(KERNEL)

    def _schedule_of(self, name: str) -> tuple[list[int], dict[str, int]]:
        """Return what each instruction of a computation runs, and where asynchronous ones end.

        The ends are by the name of the start, by rendezvous, or by a chain id of XLA for TPUs.
        """
        start_of: dict[str, str] = {}
        ends: dict[str, int] = {}
        instructions = self._module.computations[name].instructions
        for place, each in enumerate(instructions.values()):
            if each.opcode == "recv-done":
                ends[instructions[each.operands[0]].rendezvous or ""] = place
            elif each.opcode.endswith(("-update", "-done")) and each.operands:
                start_of[each.name] = start_of.get(each.operands[0], each.operands[0])
                ends[start_of[each.name]] = place
            # A fusion begins, advances or ends a chain.
            if each.opcode == "fusion" and each.attributes.get("kind") == "kCustom":
                for computation in called_computations(self._module, each):
                    for inner in computation.instructions.values():
                        chain = inner.quoted("frontend_attributes", "chain_id")
                        ends |= {} if chain is None else {chain: place}
        return [self.work(each) for each in instructions.values()], ends

    def work(self, instruction: Instruction) -> int:
        """Return what an instruction runs at most: nothing, kernels, or matrix products."""
        opcode = instruction.opcode
        if opcode in _DOTS:
            return PRODUCT
        if opcode in _CALLING:
            called = called_computations(self._module, instruction)
            inner = (self._schedule(each.name)[0] for each in called)
            return max(itertools.chain.from_iterable(inner), default=_NOTHING)
        if opcode == "custom-call":
            target = instruction.attributes.get("custom_call_target", "").strip('"')
            if target in _MARKS:
                return _NOTHING
            return PRODUCT if _PRODUCT_CALL.search(target) else KERNEL
        is_end = opcode.endswith(("-update", "-done"))
        if is_end or opcode in _FREE or opcode.removesuffix("-start") in KINDS:
            return _NOTHING
        return KERNEL


def _is_sync(instruction: Instruction) -> bool:
    """Return whether XLA for GPUs runs a pair of start and end as one blocking call."""
    return '"is_sync":true' in instruction.attributes.get("backend_config", "")


# The collectives of a program.


def collectives(module: Module) -> tuple[Collective, ...]:
    """Return the collectives of a program, in order of execution."""
    overlaps = Overlaps(module)
    runs = list(_runs_of_collectives(module))
    found = [(run, _collective_of(run, kind, module, overlaps.of(run))) for run, kind in runs]
    counted = {
        id(each) for _, each in _in_largest_branches((run, x) for run, x in found if not run.rare)
    }
    return tuple(dataclasses.replace(each, counted=id(each) in counted) for _, each in found)


def _in_largest_branches(
    found: Iterable[tuple[Execution, Collective]], depth: int = 0
) -> list[tuple[Execution, Collective]]:
    """Return the collectives that run if every conditional takes the branch that sends most.

    ``depth`` is the number of conditionals that are around all of them.
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
        kept += max((_in_largest_branches(each, depth + 1) for each in branches.values()), key=sent)
    return kept


def _runs_of_collectives(module: Module) -> Iterator[tuple[Execution, str]]:
    """Yield the collective instructions with their kinds; an asynchronous one only once."""
    seen: set[str] = set()
    for run in executions(module):
        kind = run.instruction.sent_as or run.instruction.opcode.removesuffix("-start")
        if kind == "all-reduce" and _is_fused_scatter(run):
            kind = "reduce-scatter"
        if kind not in _BYTES_SENT:
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


def _is_fused_scatter(run: Execution) -> bool:
    """Return whether this all-reduce is fused with its slice, which is a reduce-scatter on TPUs.

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


def _collective_of(
    run: Execution, kind: str, module: Module, beside: tuple[int, int] | None
) -> Collective:
    instruction, (products, kernels) = run.instruction, beside or (0, 0)
    shapes = [run.computation.instructions[name].shape for name in instruction.operands]
    # The other operands are the output buffer, offsets and sizes; or a token.
    if kind == "ragged-all-to-all" or instruction.sent_as is not None:
        shapes = shapes[:1]
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
