"""Bytes over each kind of link, counted on rings by hand."""

import dataclasses

import pytest

from crossshard.tools.inspection.collectives import Collective
from crossshard.tools.planning.chips import GPUS, TPUS
from crossshard.tools.planning.links import bytes_by_link, seconds
from crossshard.tools.planning.targets import target


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "gpu"
    coords: tuple[int, ...] = ()
    slice_index: int | None = None


def collective(kind, groups, sent):
    return Collective(
        kind=kind, operands=(), groups=groups, group_size=len(groups[0]), bytes_sent=sent,
        scalar_bytes_sent=0, source=None, op_name=None, in_loop=False, in_branch=False, times=1,
        widened=False, asynchronous=False, matrix_products=0, other_kernels=0, name="",
    )  # fmt: skip


CLUSTER = [Device(i, i // 8) for i in range(32)]
ALL = (tuple(range(32)),)


def test_bytes_over_each_kind_of_link():
    # On a ring over four hosts four of 32 neighbours are on another.
    found = bytes_by_link(collective("all-reduce", ALL, 3200.0), CLUSTER)
    assert found == {"inside a host": 2800.0, "across": 400.0}
    # Groups of a host stay in it, and groups across leave it.
    inside = tuple(tuple(range(8 * host, 8 * host + 8)) for host in range(4))
    assert bytes_by_link(collective("all-gather", inside, 10.0), CLUSTER) == {"inside a host": 10}
    across = tuple(tuple(range(place, 32, 8)) for place in range(8))
    assert bytes_by_link(collective("all-gather", across, 10.0), CLUSTER) == {"across": 10}
    # An all-to-all sends to all.
    found = bytes_by_link(collective("all-to-all", ALL, 31.0), CLUSTER)
    assert found == {"inside a host": pytest.approx(7), "across": pytest.approx(24)}
    # Hosts of a TPU slice are inside it, and slices are not.
    slices = [Device(i, i // 4, "tpu", (i % 4, i // 4, 0), i // 8) for i in range(16)]
    found = bytes_by_link(collective("all-reduce", (tuple(range(16)),), 16.0), slices)
    assert found == {"inside a host": 12, "inside a slice": 2, "across": 2}


def test_the_slowest_link_counts():
    sent = 450e9
    chip = GPUS["h100"]
    inside = (tuple(range(8)),)
    assert seconds(collective("all-reduce", inside, sent), CLUSTER, chip) == 1
    # One of eight bytes leaves the host, at a ninth of the bandwidth.
    both = seconds(collective("all-reduce", ALL, sent), CLUSTER, chip)
    assert both == pytest.approx(450 / 8 / 50)


def test_rings_of_a_torus_that_close_have_twice_the_bandwidth():
    pod = [Device(i, i // 4, "tpu", (i % 16, i // 16, 0)) for i in range(256)]
    row, column = (tuple(range(16)),), (tuple(range(0, 256, 16)),)
    chip = TPUS["v5e"]
    for group in (row, column):
        assert seconds(collective("all-gather", group, 100e9), pod, chip) == 1
    whole = (tuple(range(256)),)
    assert seconds(collective("all-gather", whole, 100e9), pod, chip) == 0.5
    line = (tuple(range(8)),)
    assert seconds(collective("all-gather", line, 100e9), pod, chip) == 2


def test_every_chip_names_its_source():
    for name, chip in {**TPUS, **GPUS}.items():
        assert chip.name == name
        assert len(chip.source) > 20
        assert chip.peak("bfloat16") > 1e14
        assert chip.peak("int8") == chip.peak("float32")
    for name in GPUS:
        assert f"device_memory_size: {GPUS[name].memory}\n" in target(name)
