"""The speed of this machine: what is measured, and what is read between the measured points."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard.plans.estimate import on_this_machine
from crossshard.plans.machine import Machine, measured

SENT = [(1e5, 1e-4), (1e7, 1e-3), (1e8, 1e-1)]
MACHINE = Machine(
    devices=4,
    products=[(1e3, 1e-6), (1e9, 1e-1)],
    memory=[(1e3, 1e-6), (1e9, 1e-1)],
    fresh=[(1e3, 1e-6), (1e9, 1.0)],
    operation=1e-9,
    transcendental=1e-8,
    kernel=1e-6,
    collectives={"all-reduce": SENT, "all-gather": [(1e5, 2e-4), (1e8, 2e-1)]},
    call=1e-4,
    array=1e-5,
)


@pytest.mark.parametrize(
    ("kind", "sent", "seconds"),
    [
        ("all-reduce", 1e7, 1e-3),
        # Rates, 1e9 and 1e10 bytes a second, are geometric means halfway between two sizes.
        ("all-reduce", 1e6, 1e6 / math.sqrt(1e9 * 1e10)),
        # The rate of the largest holds above it.
        ("all-reduce", 1e9, 1.0),
        # None takes less than the smallest: most of that is the start.
        ("all-reduce", 4, 1e-4),
        # A kind that is not measured takes as long as an all-gather.
        ("collective-permute", 1e8, 2e-1),
    ],
)
def test_the_time_of_a_collective_by_hand(kind, sent, seconds):
    assert MACHINE.collective_seconds(kind, sent) == pytest.approx(seconds)


def test_the_rates_of_all_devices():
    assert MACHINE.flops == pytest.approx(4e10)
    assert MACHINE.memory_bandwidth == pytest.approx(4e10)


def test_a_collective_in_a_loop_counts_as_often_as_it_runs():
    mesh = jax.make_mesh((4,), ("shards",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def three(xs):
        return lax.scan(lambda total, x: (total + lax.psum(x, "shards"), None), xs[0], xs)[0]

    run = jax.jit(jax.shard_map(three, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    sent = crossshard.inspect(run.lower(jnp.ones((3, 250_000)))).collectives
    found = on_this_machine(MACHINE, [], [], sent, arrays=0, fresh=0)
    # Of 1 MB, 3/4 twice, three times.
    assert found.communication == pytest.approx(3 * MACHINE.collective_seconds("all-reduce", 1.5e6))


@pytest.mark.deep
def test_this_machine():
    machine = measured(2)
    assert machine.devices == 2
    points = [machine.products, machine.memory, machine.fresh, *machine.collectives.values()]
    assert set(machine.collectives) == {"all-reduce", "reduce-scatter", "all-gather"}
    assert all(work > 0 and seconds > 0 for each in points for work, seconds in each)
    # A time in other units than seconds would be out of these.
    assert 1e7 < machine.flops < 1e14
    assert 1e7 < machine.memory_bandwidth < 1e13
    others = dataclasses.asdict(machine)
    assert all(others[name] > 0 for name in ("operation", "transcendental", "kernel"))
    assert all(others[name] >= 0 for name in ("call", "array"))
