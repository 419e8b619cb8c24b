"""Bytes over each kind of link, counted on rings by hand."""

import dataclasses

import pytest

from crossshard.tools.inspection.collectives import Collective
from crossshard.tools.planning.plan import bytes_by_link
from crossshard.tools.planning.topology import GPUS


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


def test_a_gpu_is_described_with_its_own_memory():
    for gpu in GPUS.values():
        assert f"device_memory_size: {gpu.memory}\n" in gpu.target()
