"""What runs while an asynchronous collective is under way, from the scheduled program."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from crossshard.tools.inspection.execution import Execution, called_computations
from crossshard.tools.inspection.hlo import Computation, Instruction, Module

_PRODUCTS = {"dot", "ragged-dot", "scaled-dot", "convolution"}
# What the libraries that XLA calls name theirs: __cublas$gemm, __cublas$lt$matmul,
# __cudnn$convForward, __cudnn$fmhaSoftmax, __onednn$matmul.
_PRODUCT_CALL = re.compile(r"gemm|matmul|fmha|\$conv", re.IGNORECASE)
# Custom calls with which XLA for TPUs marks buffers and asynchronous collectives.
_MARKS = {
    *("AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone"),
    *("PrepareAsyncCallStart", "PrepareAsyncCallDone"),
}
# Instructions that run nothing.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("add-dependency", "opt-barrier", "partition-id", "replica-id", "send", "recv"),
}
# A call-start runs a computation on a SparseCore of a TPU.
_ASYNC = {"async-start", "call-start"}
_CALLING = {"fusion", "call", "while", "conditional", *_ASYNC}

_NOTHING, _KERNEL, _PRODUCT = range(3)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What is scheduled between the start and the end of an asynchronous collective.

    Attributes:
      matrix_products: the number of matrix products and convolutions, of fusions that hold one, and
        of loops that do.
      other_kernels: the number of other kernels, and of loops.
    """

    matrix_products: int = 0
    other_kernels: int = 0


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """The instructions of a computation, in order.

    Attributes:
      place: of each instruction, by name.
      ends: the name of the end of each asynchronous instruction.
      products: the number of matrix products before each place.
      kernels: the number of other kernels before each place.
      chains: the last place of each asynchronous chain of XLA for TPUs.
    """

    place: Mapping[str, int]
    ends: Mapping[str, str]
    products: Sequence[int]
    kernels: Sequence[int]
    chains: Mapping[str, int]


class Overlaps:
    """What runs while the collectives of a program are under way.

    Args:
      module: the program.
      kinds: the opcodes of collectives, which are not kernels of the step.
    """

    def __init__(self, module: Module, kinds: Iterable[str]) -> None:
        self._module = module
        self._collectives = frozenset(kinds)
        self._schedule = functools.cache(self._schedule_of)
        self._most_of = functools.cache(self._most)

    def of(self, run: Execution) -> Overlap | None:
        """What runs beside a collective; ``None`` if it is synchronous."""
        start, computation = run.instruction, run.computation
        caller, around = run.caller, run.around
        chain = start.quoted("frontend_attributes", "chain_id")
        if caller is not None and around is not None:
            if caller.opcode in _ASYNC:
                start, computation = caller, around
            elif caller.opcode == "fusion" and chain is not None:
                schedule = self._schedule(around.name)
                return _between(schedule, schedule.place[caller.name], schedule.chains.get(chain))
        if not start.opcode.endswith("-start") or _is_sync(run.instruction) or _is_sync(start):
            return None
        schedule = self._schedule(computation.name)
        end = schedule.ends.get(start.name)
        return _between(
            schedule, schedule.place[start.name], None if end is None else schedule.place[end]
        )

    def _schedule_of(self, name: str) -> _Schedule:
        computation = self._module.computations[name]
        start_of: dict[str, str] = {}
        ends: dict[str, str] = {}
        chains: dict[str, int] = {}
        work = []
        for place, each in enumerate(computation.instructions.values()):
            if each.opcode.endswith(("-update", "-done")) and each.operands:
                start = start_of.get(each.operands[0], each.operands[0])
                start_of[each.name] = start
                ends[start] = each.name
            chains |= dict.fromkeys(self._chains_in(each), place)
            work.append(self._work(each))
        return _Schedule(
            {name: place for place, name in enumerate(computation.instructions)},
            ends,
            _before(work, _PRODUCT),
            _before(work, _KERNEL),
            chains,
        )

    def _chains_in(self, instruction: Instruction) -> set[str]:
        """The asynchronous chains that a fusion of XLA for TPUs begins, advances or ends."""
        if instruction.opcode != "fusion" or instruction.attributes.get("kind") != "kCustom":
            return set()
        links = (
            inner.quoted("frontend_attributes", "chain_id")
            for computation in called_computations(self._module, instruction)
            for inner in computation.instructions.values()
        )
        return {link for link in links if link is not None}

    def _work(self, instruction: Instruction) -> int:
        opcode = instruction.opcode
        if opcode in _PRODUCTS:
            return _PRODUCT
        if opcode in _CALLING:
            called = called_computations(self._module, instruction)
            return max((self._most_of(each.name) for each in called), default=_NOTHING)
        if opcode == "custom-call":
            target = instruction.attributes.get("custom_call_target", "").strip('"')
            if target in _MARKS:
                return _NOTHING
            return _PRODUCT if _PRODUCT_CALL.search(target) else _KERNEL
        is_end = opcode.endswith(("-update", "-done"))
        if is_end or opcode in FREE or opcode.removesuffix("-start") in self._collectives:
            return _NOTHING
        return _KERNEL

    def _most(self, name: str) -> int:
        computation: Computation = self._module.computations[name]
        return max(map(self._work, computation.instructions.values()), default=_NOTHING)


def _before(work: Sequence[int], kind: int) -> list[int]:
    return list(itertools.accumulate((each == kind for each in work), initial=0))


def _between(schedule: _Schedule, start: int, end: int | None) -> Overlap:
    if end is None:
        return Overlap()
    return Overlap(
        schedule.products[end] - schedule.products[start + 1],
        schedule.kernels[end] - schedule.kernels[start + 1],
    )


def _is_sync(instruction: Instruction) -> bool:
    """Whether XLA for GPUs runs a pair of start and end as one blocking call."""
    return '"is_sync":true' in instruction.attributes.get("backend_config", "")
