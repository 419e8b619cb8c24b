"""The estimated time of a step is counted as by hand."""

import dataclasses

from crossshard.tools.planning.chips import GPUS
from crossshard.tools.planning.estimate import estimate
from crossshard.tools.planning.products import Product
from tests.tools.planning.test_links import CLUSTER, collective

CHIP = GPUS["h100"]
INSIDE = (tuple(range(8)),)


def test_what_takes_longest_and_what_is_exposed_count():
    products = [Product(CHIP.peak("bfloat16"), "bfloat16", 2), Product(67e12, "float64", 1)]
    exposed = collective("all-reduce", INSIDE, 450e9)
    hidden = dataclasses.replace(exposed, bytes_sent=2 * 450e9, matrix_products=1)
    found = estimate(CHIP, products, int(1.5 * CHIP.memory_bandwidth), [exposed, hidden], CLUSTER)
    assert (found.compute, found.memory) == (3, 1.5)
    assert (found.communication, found.hidden) == (3, 2)
    assert found.step == 3 + 1
