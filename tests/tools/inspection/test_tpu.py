"""TPU programs, as data/make.py compiled them: a reduce-scatter is told from a slice of a sum."""

from pathlib import Path

import pytest

from crossshard.tools.inspection.collectives import collectives
from crossshard.tools.inspection.hlo import parse
from crossshard.tools.inspection.inspect import report_on
from crossshard.tools.inspection.report import Communication

DATA = Path(__file__).parent / "data"

# What data/make.py trains.
PARAMETERS = {
    "v5e_4x4_replicated": 2**19,
    "v5e_4x4_flat": 8 * 2**20,
    "v5e_4x4_axis": 32 * 2**20,
    "v5e_16x16_axis": 32 * 2**20,
    "v5p_4x4x4_flat": 8 * 2**20,
}


def report(name: str) -> Communication:
    return report_on(parse((DATA / f"{name}.hlo").read_text()), {"f32": PARAMETERS.get(name, 0)})


def kinds(name: str) -> list[str]:
    return [each.kind for each in report(name).collectives if each.bytes_sent]


# name: devices, ratio.
STEPS = {
    "v5e_4x4_replicated": (16, 1.0),
    "v5e_4x4_flat": (16, 1.5),
    "v5e_4x4_axis": (16, 1.025),
    "v5e_16x16_axis": (256, 1.0),
    "v5p_4x4x4_flat": (64, 2.0),
}


@pytest.mark.parametrize("name", STEPS)
def test_totals(name: str):
    devices, ratio = STEPS[name]
    read = report(name)
    assert (read.devices, read.shards) == (devices, devices)
    assert read.ratio == pytest.approx(ratio, rel=1e-4)
    assert read.scalar_bytes_sent == pytest.approx(8, rel=0.1)
    # Every reduction has a line.
    reductions = [each for each in read.collectives if each.kind != "collective-permute"]
    assert all((each.source or "").startswith("step.py:") for each in reductions)


def test_one_axis_of_a_mesh_is_scattered_and_all_of_a_flat_one_is_not():
    found = kinds("v5e_16x16_axis")
    assert found == ["reduce-scatter"] * 2 + ["all-reduce"] + ["all-gather"] * 2
    assert kinds("v5e_4x4_flat") == ["all-reduce", "all-gather", "all-gather"]
    # Nor does it gather, over so many shards.
    assert kinds("v5p_4x4x4_flat") == ["all-reduce", "all-reduce"]


def test_an_all_reduce_fused_with_its_slice_is_a_reduce_scatter():
    text = (DATA / "v5e_4x4_axis.hlo").read_text()
    assert " all-reduce(%pad" in text
    assert " reduce-scatter(" not in text
    assert kinds("v5e_4x4_axis").count("reduce-scatter") == 2
    # The same outside of such a fusion.
    apart = collectives(parse(text.replace("kind=kCustom", "kind=kLoop")))
    assert "reduce-scatter" not in {each.kind for each in apart}


def test_an_asynchronous_chain_of_fusions_is_one_collective():
    text = (DATA / "v5e_4x4_exchanges.hlo").read_text()
    assert text.count(" all-gather(") == 3
    found = {each.kind: each for each in collectives(parse(text))}
    assert len(found) == len(collectives(parse(text))) == 4
    # It runs beside a loop, and is not repeated by it.
    assert not found["all-gather"].in_loop
    assert found["all-gather"].bytes_sent == 15 * 16 * 1024 * 4
    assert found["all-reduce"].in_loop
    # As make.py wrote it; XLA does not note it for TPUs.
    assert found["all-reduce"].times == 5
