"""Programs for several slices of a TPU: what goes between them is counted as a collective."""

import numpy as np
import pytest

from crossshard.tools.inspection.hlo import parse
from crossshard.tools.inspection.inspect import report_on
from crossshard.tools.inspection.report import Communication

TWO, FOUR = "{1,2}x{0:3}", "{1,2,3,4}x{0:3}"
# As XLA writes them for v5e:2x2 (jaxlib 0.10.2), without layouts and settings.
SENT = (
    "channel_id={channel}, is_host_transfer=true, frontend_attributes={{"
    '_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_host_transfer_rendezvous="{name}",_xla_megascale_target={target},'
    '_xla_megascale_transfer_type="{kind}"}}'
)


def program(kind: str, given: str, result: str, target: str, work: str = "") -> str:
    """A program that sends its parameter, works, and returns what it receives."""
    target = target if target.startswith("{{") else f'"{target}"'
    sent = SENT.format(channel=1, name="exchange.7_0", target=target, kind=kind)
    return f"""HloModule exchange, is_scheduled=true, num_partitions=4

ENTRY %main (p: {given}) -> {result} {{
  %p = {given} parameter(0)
  %token = token[] after-all()
  %recv = ({result}, u32[], token[]) recv(%token), {sent}
  %send = ({given}, u32[], token[]) send(%p, %token), {sent}
  %send-done = token[] send-done(%send), channel_id=1, is_host_transfer=true
{work}  %recv-done = ({result}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %found = {result} get-tuple-element(%recv-done), index=0
}}
"""


def report(text: str, axes: tuple[tuple[str, int], ...] = ()) -> Communication:
    return report_on(parse(text), axes=axes)


A, HALF, TWICE = "f32[4096,512]", "f32[2048,512]", "f32[8192,512]"
MIB = 2**20
CASES = {
    "all-reduce of two": ("ALL_REDUCE", A, A, TWO, 8, 2),
    "all-reduce of four": ("ALL_REDUCE", A, A, FOUR, 12, 4),
    "reduce-scatter of two": ("REDUCE_SCATTER", A, HALF, TWO, 4, 2),
    "reduce-scatter of four": ("REDUCE_SCATTER", A, "f32[1024,512]", FOUR, 6, 4),
    "all-gather of two": ("ALL_GATHER", A, TWICE, TWO, 8, 2),
    "all-gather of four": ("ALL_GATHER", A, "f32[16384,512]", FOUR, 24, 4),
    "all-to-all of two": (
        *("ALL_TO_ALL", A, A),
        "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}",
        *(4, 2),
    ),
    "collective-permute of two": (
        *("ONE_TO_ONE", A, A),
        "{{100003->200000},{200003->100000}}",
        *(8, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_the_collective(name: str):
    kind, given, result, target, mebibytes, size = CASES[name]
    found = report(program(kind, given, result, target))
    (each,) = found.collectives
    assert each.kind == name.split(" of ")[0]
    assert each.bytes_sent == mebibytes * MIB
    assert each.group_size == size
    assert found.bytes_sent == mebibytes * MIB
    assert found.devices == 4 * size


def test_the_groups_are_of_the_devices_of_all_slices():
    (each,) = report(program("ALL_REDUCE", A, A, FOUR)).collectives
    np.testing.assert_array_equal(each.groups, np.arange(16).reshape(4, 4).T)
    (each,) = report(program(*CASES["collective-permute of two"][:4])).collectives
    assert each.groups == ((3, 4), (7, 0))
    (each,) = report(program("ALL_REDUCE", A, A, "{1,3}x{0,2}")).collectives
    assert each.groups == ((0, 8), (2, 10))


@pytest.mark.parametrize(
    ("axes", "along"),
    [((("slice", 2), ("chip", 4)), "slice"), ((("shards", 8),), "shards")],
    ids=str,
)
def test_they_have_an_axis_of_the_mesh(axes: tuple[tuple[str, int], ...], along: str):
    assert report(program("ALL_REDUCE", A, A, TWO), axes).bytes_by_axes == {along: 8 * MIB}


def test_what_is_computed_meanwhile_hides_it():
    dot = "dot(%p, %p), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    work = f"  %square = f32[512,512] {dot}\n  %sine = f32[512,512] sine(%square)\n"
    (each,) = report(program("ALL_REDUCE", A, A, TWO, work)).collectives
    assert each.asynchronous
    assert (each.matrix_products, each.other_kernels) == (1, 1)


def test_each_slice_does_the_same_within():
    inside = (
        "  %sum = f32[4096,512] all-reduce(%p), channel_id=2, replica_groups={{0,1},{2,3}}, "
        "use_global_device_ids=true\n"
    )
    first, second = report(program("ALL_REDUCE", A, A, TWO, inside)).collectives
    assert {len(first.groups), len(second.groups)} == {4}
    assert second.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_other_transfers_to_hosts_are_none():
    text = program("ALL_REDUCE", A, A, TWO).replace("xla_megascale_transfer_type", "other")
    assert report(text).collectives == ()
    assert report(text).devices == 4
