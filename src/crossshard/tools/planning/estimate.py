"""The estimated time of a step, from its work and the published figures of a chip."""

from collections.abc import Iterable, Sequence
from typing import Any

from crossshard.tools.inspection.collectives import NOTHING, Collective
from crossshard.tools.planning import links
from crossshard.tools.planning.chips import Chip
from crossshard.tools.planning.products import Product
from crossshard.tools.planning.report import Seconds


def estimate(
    chip: Chip,
    products: Iterable[Product],
    bytes_moved: int,
    collectives: Iterable[Collective],
    devices: Sequence[Any],
) -> Seconds:
    """A step on accelerators at their published peaks.

    Matrix products, memory and the communication that is scheduled beside other work take place at
    once, and the rest of the communication after them.
    """
    compute = sum(each.times * each.flops / chip.peak(each.dtype) for each in products)
    memory = bytes_moved / chip.memory_bandwidth
    hidden = exposed = 0.0
    for each in collectives:
        if each.bytes_sent:
            taken = links.seconds(each, devices, chip)
            hidden += taken * (each.behind != NOTHING)
            exposed += taken * (each.behind == NOTHING)
    step = max(compute, memory, hidden) + exposed
    return Seconds(compute, memory, hidden + exposed, hidden, step)
