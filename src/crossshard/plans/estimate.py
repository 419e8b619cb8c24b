"""Estimated times of a step, from its work and the figures of the machine."""

from collections.abc import Iterable, Sequence
from typing import Any

from crossshard.inspection.collectives import NOTHING, Collective
from crossshard.plans import links
from crossshard.plans.chips import Chip
from crossshard.plans.kernels import Kernel
from crossshard.plans.machine import Machine
from crossshard.plans.products import Product
from crossshard.plans.report import Seconds


def on_chips(
    chip: Chip,
    products: Iterable[Product],
    kernels: Iterable[Kernel],
    collectives: Iterable[Collective],
    devices: Sequence[Any],
) -> Seconds:
    """A step on accelerators at their published peaks.

    Matrix products, memory and the communication that is scheduled beside other work take place at
    once, and the rest of the communication after them.
    """
    compute = sum(each.times * each.flops / chip.peak(each.dtype) for each in products)
    memory = sum(each.times * each.bytes for each in kernels) / chip.memory_bandwidth
    hidden = exposed = 0.0
    for each in collectives:
        if each.bytes_sent:
            taken = links.seconds(each, devices, chip)
            hidden += taken * (each.behind != NOTHING)
            exposed += taken * (each.behind == NOTHING)
    step = max(compute, memory, hidden) + exposed
    return Seconds(compute, memory, hidden + exposed, hidden, 0.0, step)


def on_this_machine(
    machine: Machine,
    products: Iterable[Product],
    kernels: Iterable[Kernel],
    collectives: Iterable[Collective],
    arrays: float,
    fresh: int,
) -> Seconds:
    """A step on the CPU devices of this machine, at the speed that was measured.

    Cores compute, move memory and communicate one after the other.

    Args:
      machine: its speed.
      products: those of one device.
      kernels: those of one device; the time of products is not counted again.
      collectives: of the program.
      arrays: the arrays that the program takes and returns.
      fresh: the bytes of temporaries and results of one device, for which a call takes memory.
    """
    compute = calls = communication = 0.0
    memory = machine.fresh_seconds(fresh)
    for product in products:
        work = machine.product_seconds(product.flops)
        moved = machine.memory_seconds(product.bytes)
        compute += product.times * work if work > moved else 0
        memory += product.times * moved if moved >= work else 0
    for each in kernels:
        calls += each.times * machine.kernel
        plain = each.operations - each.transcendental
        work = plain * machine.operation + each.transcendental * machine.transcendental
        moved = 0.0 if each.is_product else machine.memory_seconds(each.bytes)
        compute += each.times * work if work > moved else 0
        memory += each.times * moved if moved >= work else 0
    for one in collectives:
        if one.group_size > 1:
            times = one.times or 1
            sent = (one.bytes_sent + one.scalar_bytes_sent) / times
            communication += times * machine.collective_seconds(one.kind, sent)
    calls += machine.call + arrays * machine.array
    step = compute + memory + communication + calls
    return Seconds(compute, memory, communication, 0.0, calls, step)
