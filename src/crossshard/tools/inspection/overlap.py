"""What runs while an asynchronous collective is under way, from the scheduled program."""

import functools
import itertools
import re
from collections.abc import Iterable

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

    def of(self, run: Execution) -> tuple[int, int] | None:
        """How many matrix products and other kernels run beside a collective.

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
        if not start.opcode.endswith("-start") or _is_sync(run.instruction) or _is_sync(start):
            return None
        return self._between(computation, start, start.name)

    def _between(self, computation: Computation, start: Instruction, ended: str) -> tuple[int, int]:
        work, ends = self._schedule(computation.name)
        first = list(computation.instructions).index(start.name) + 1
        meanwhile = work[first : ends.get(ended, first)]
        return meanwhile.count(_PRODUCT), meanwhile.count(_KERNEL)

    def _schedule_of(self, name: str) -> tuple[list[int], dict[str, int]]:
        """What each instruction of a computation runs, and where what is asynchronous ends.

        Ends are by the name of the start, or by the name of a chain of XLA for TPUs.
        """
        start_of: dict[str, str] = {}
        ends: dict[str, int] = {}
        instructions = self._module.computations[name].instructions.values()
        for place, each in enumerate(instructions):
            if each.opcode.endswith(("-update", "-done")) and each.operands:
                start_of[each.name] = start_of.get(each.operands[0], each.operands[0])
                ends[start_of[each.name]] = place
            # A fusion begins, advances or ends a chain.
            if each.opcode == "fusion" and each.attributes.get("kind") == "kCustom":
                for computation in called_computations(self._module, each):
                    for inner in computation.instructions.values():
                        chain = inner.quoted("frontend_attributes", "chain_id")
                        ends |= {} if chain is None else {chain: place}
        return [self._work(each) for each in instructions], ends

    def _work(self, instruction: Instruction) -> int:
        opcode = instruction.opcode
        if opcode in _PRODUCTS:
            return _PRODUCT
        if opcode in _CALLING:
            called = called_computations(self._module, instruction)
            inner = (self._schedule(each.name)[0] for each in called)
            return max(itertools.chain.from_iterable(inner), default=_NOTHING)
        if opcode == "custom-call":
            target = instruction.attributes.get("custom_call_target", "").strip('"')
            if target in _MARKS:
                return _NOTHING
            return _PRODUCT if _PRODUCT_CALL.search(target) else _KERNEL
        is_end = opcode.endswith(("-update", "-done"))
        if is_end or opcode in FREE or opcode.removesuffix("-start") in self._collectives:
            return _NOTHING
        return _KERNEL


def _is_sync(instruction: Instruction) -> bool:
    """Whether XLA for GPUs runs a pair of start and end as one blocking call."""
    return '"is_sync":true' in instruction.attributes.get("backend_config", "")
