"""The text of a program, read: shapes, groups in every form, loops, source lines."""

import numpy as np
import pytest

import crossshard
from crossshard.errors import ArgumentError
from crossshard.tools.inspection.collectives import Collective, bytes_sent, collectives, executions
from crossshard.tools.inspection.hlo import (
    Array,
    leaves,
    parse,
    parse_groups,
    source_of,
    users_line,
)
from crossshard.tools.inspection.inspect import Communication, report_on

# As XLA writes for GPUs: pairs of start and done, a wrapped reduce-scatter, nested loops.
ASYNCHRONOUS = """HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=4

FileNames
1 "train.py"
2 "other.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=3 end_column=9}
2 {file_name_id=2 function_name_id=1 line=7 end_line=8 column=3 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}


%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b), metadata={op_name="add" stack_frame_id=2}
}

%scattered (s: f32[8]) -> f32[2] {
  %s = f32[8]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[2]{0} reduce-scatter(%s), channel_id=4, replica_groups=[1,4]<=[4], use_global_device_ids=true, dimensions={0}, to_apply=%add
}

%inner_body (i: (s32[], f32[8])) -> (s32[], f32[8]) {
  %i = (s32[], f32[8]{0}) parameter(0)
  %n = s32[] get-tuple-element(%i), index=0
  %v = f32[8]{0} get-tuple-element(%i), index=1
  %permute = f32[8]{0} collective-permute(%v), channel_id=5, source_target_pairs={{0,1},{1,0}}
  ROOT %out = (s32[], f32[8]{0}) tuple(%n, %permute)
}

%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%outer_body (o: (s32[], f32[8])) -> (s32[], f32[8]) {
  %o = (s32[], f32[8]{0}) parameter(0)
  ROOT %inner = (s32[], f32[8]{0}) while(%o), condition=%condition, body=%inner_body, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (p: f32[8], q: bf16[4,4]) -> (f32[8], bf16[4,4], f32[2], f32[32]) {
  %p = f32[8]{0} parameter(0), sharding={replicated}
  %q = bf16[4,4]{1,0} parameter(1)
  %text = s32[] constant(0), metadata={op_name="a %b, (c" stack_frame_id=1}
  %reduce-start = (f32[8]{0}, bf16[4,4]{1,0}) all-reduce-start(%p, %q), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add, metadata={op_name="psum" stack_frame_id=2}
  %reduce-done = (f32[8]{0}, bf16[4,4]{1,0}) all-reduce-done(%reduce-start)
  %gather-start = (f32[8]{0}, f32[32]{0}) all-gather-start(%p), channel_id=2, replica_groups={}, dimensions={0}, metadata={stack_frame_id=1}
  %gather-done = f32[32]{0} all-gather-done(%gather-start)
  %scatter-start = ((f32[8]{0}), f32[2]{0}, s32[]) async-start(%p), calls=%scattered
  %scatter-done = f32[2]{0} async-done(%scatter-start), calls=%scattered
  %state = (s32[], f32[8]{0}) tuple(%text, /*index=1*/%p)
  %loop = (s32[], f32[8]{0}) while(%state), condition=%condition, body=%outer_body, backend_config={"known_trip_count":{"n":"5"}}
  %r = f32[8]{0} get-tuple-element(%reduce-done), index=0
  %t = bf16[4,4]{1,0} get-tuple-element(%reduce-done), index=1
  ROOT %results = (f32[8]{0}, bf16[4,4]{1,0}, f32[2]{0}, f32[32]{0}) tuple(%r, %t, %scatter-done, %gather-done)
}
"""  # noqa: E501


def test_a_module_is_read():
    module = parse(ASYNCHRONOUS)
    assert (module.partitions, module.entry.name) == (4, "main")
    shapes = [str(each) for each in leaves(module.entry.root.shape)]
    assert shapes == ["f32[8]", "bf16[4,4]", "f32[2]", "f32[32]"]
    assert module.entry.instructions["state"].operands == ("text", "p")
    assert module.entry.instructions["text"].operands == ()
    assert "sharding" in module.entry.instructions["p"].attributes
    # Everything is run from the entry.
    names = [run.instruction.name for run in executions(module)]
    assert names.count("reduce-scatter.1") == 1
    assert names.index("p") < names.index("reduce-scatter.1") < names.index("results")


def test_asynchronous_collectives_count_once_and_loops_multiply():
    found = {each.name: each for each in collectives(parse(ASYNCHRONOUS))}
    kinds = [each.kind for each in found.values()]
    assert kinds == ["all-reduce", "all-gather", "reduce-scatter", "collective-permute"]
    reduced, scattered, permute = (
        found[name] for name in ("reduce-start", "reduce-scatter.1", "permute")
    )
    assert (reduced.dtypes, reduced.groups) == (("f32", "bf16"), ((0, 1), (2, 3)))
    assert reduced.bytes_sent == 32 + 32
    assert (scattered.bytes_sent, scattered.groups) == (24, ((0, 1, 2, 3),))
    # A loop within a loop.
    assert (permute.in_loop, permute.times, permute.bytes_sent) == (True, 15, 15 * 32)
    unknown = ASYNCHRONOUS.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    permute = collectives(parse(unknown))[-1]
    assert (permute.in_loop, permute.times, permute.bytes_sent) == (True, None, 32)


def sources(text: str) -> list[str | None]:
    found = {each.name: each.source for each in collectives(parse(text))}
    return [found[x] for x in ("reduce-start", "gather-start", "reduce-scatter.1", "permute")]


OURS = crossshard.__file__.removesuffix("__init__.py")
FLAX = "/home/me/env/lib/python3.12/site-packages/flax/nnx/nn/normalization.py:7"


def test_source_lines_and_those_of_what_has_none():
    # Of the scatter, its own reducer is what still has a line.
    assert sources(ASYNCHRONOUS) == ["other.py:7", "train.py:12", "other.py:7", None]
    # A name that looks like metadata, and paths with quotes.
    text = ASYNCHRONOUS.replace("{stack_", '{op_name="stack_frame_id=2" stack_')
    text = text.replace('"other.py"', r'"my \"other\".py"')
    assert sources(text)[0] == 'my "other".py:7'
    # Callers in both ways of counting them, of which XLA of today's is one more than the number:
    # frame 1 calls 2, which is ours.
    for first, second in ((1, 2), (0, 1)):
        text = ASYNCHRONOUS.replace('"other.py"', f'"{OURS}optimizer/pipeline.py"')
        text = text.replace("id=1 parent_frame_id=1", f"id=1 parent_frame_id={first}")
        text = text.replace("id=2 parent_frame_id=1", f"id=2 parent_frame_id={second}")
        text = text.replace("metadata={stack_frame_id=1}", "metadata={stack_frame_id=2}")
        assert sources(text)[1] == "train.py:12"


LINES = {
    ("/home/me/train.py:3",): "/home/me/train.py:3",
    (FLAX, "/home/me/model.py:5", "/home/me/train.py:3"): "/home/me/model.py:5",
    (f"{OURS}optimizer/pipeline.py:1", "/home/me/train.py:3"): "/home/me/train.py:3",
    ("/lib/python3.12/site-packages/crossshard/x.py:1", "train.py:3"): "train.py:3",
    ("/usr/lib/python3.12/contextlib.py:81", "train.py:3"): "train.py:3",
    # What is installed and is not one of these libraries may well be the user's.
    ("/lib/python3.12/site-packages/ours/m.py:1",): "/lib/python3.12/site-packages/ours/m.py:1",
    # Where no line is the user's it is another library's, and never ours.
    (f"{OURS}optimizer/pipeline.py:1", FLAX): FLAX,
    (f"{OURS}optimizer/pipeline.py:1",): None,
}


def test_the_first_line_of_the_users():
    assert {lines: source_of(lines) for lines in LINES} == LINES
    assert users_line([FLAX]) is users_line([]) is None


def test_what_is_not_a_module_is_refused():
    for text in ("", "module {}", "HloModule x\n"):
        with pytest.raises(ArgumentError, match="program's text"):
            parse(text)
    with pytest.raises(ArgumentError, match=r"runs as 2 replicas.*jax\.shard_map"):
        parse(ASYNCHRONOUS.replace("replica_count=1", "replica_count=2"))


WIDTHS = {
    Array("f32", (3, 4)): 48,
    Array("bf16", (3,)): 6,
    Array("pred", (3,)): 3,
    Array("s4", (3,)): 2,
    Array("f8e4m3fn", (5,)): 5,
    Array("c64", ()): 8,
    Array("token", ()): 0,
}


def test_bytes_of_an_array():
    assert {array: array.bytes for array in WIDTHS} == WIDTHS


GROUPS = {
    "{}": (),
    "{{0,1},{2,3}}": ((0, 1), (2, 3)),
    "{{0}, {1}}": ((0,), (1,)),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['s'=4] {'s'}": ((0, 1, 2, 3),),
    "mesh['a'=2,'b'=4] {'a'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=2,'b'=4] {'b'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    # As explicit groups of the same program of an older JAX.
    "mesh['a'=2,'b'=4] {'b','a'}": ((0, 4, 1, 5, 2, 6, 3, 7),),
    "mesh['a'=2,'b'=2,'c'=2] {'b','a'}": ((0, 4, 2, 6), (1, 5, 3, 7)),
    "mesh['a'=1,'b'=2] {'a'}": ((0,), (1,)),
    "mesh['a'=8] {'a':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=8] {'a':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['a'=8] {'a':(2)4}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=2,'b'=2], device_ids=([4]) {'b'}": ((0, 1), (2, 3)),
    "mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}": ((3, 1), (2, 0)),
}


def test_groups_in_every_form():
    assert {text: parse_groups(text) for text in GROUPS} == GROUPS
    for text in ("", "all", "mesh['a'=2], order=(1,0) {'a'}"):
        with pytest.raises(ArgumentError, match="unknown form"):
            parse_groups(text)


PROGRAM = """HloModule jit_step, num_partitions=6

ENTRY %main (p: f32[6]) -> f32[6] {{
  %p = f32[6]{{0}} parameter(0)
  ROOT %c = f32[6]{{0}} {}
}}
"""
EVERYONE = ((0, 1, 2, 3, 4, 5),)
NUMBERED = {
    # Without global ids those of replicas, of which there is one.
    "all-reduce(%p), channel_id=1, replica_groups={{0}}": EVERYONE,
    "all-reduce(%p), channel_id=1, replica_groups={}, use_global_device_ids=true": EVERYONE,
    "all-reduce(%p), channel_id=1, replica_groups={{0,5,1},{4,2,3}}, use_global_device_ids=true":
        ((0, 5, 1), (4, 2, 3)),
    "all-to-all(%p), channel_id=1, replica_groups={{0,2},{1}}": ((0, 2), (1,)),
    "all-to-all(%p), channel_id=1, replica_groups={}": EVERYONE,
    "collective-permute(%p), channel_id=1, source_target_pairs={{0,1}}": ((0, 1),),
    "collective-permute(%p), source_target_pairs={}": (),
    "all-reduce(%p), channel_id=1, use_global_device_ids=true, replica_groups="
    "mesh['a'=3,'b'=2], device_ids=([2,3]T(1,0)) {'b'}": ((0, 3), (1, 4), (2, 5)),
}  # fmt: skip


def only(instruction: str, shape: str = "f32[6]") -> Collective:
    (found,) = collectives(parse(PROGRAM.format(instruction).replace("f32[6]", shape)))
    return found


def test_which_devices_ids_mean():
    assert {instruction: only(instruction).groups for instruction in NUMBERED} == NUMBERED


BYTES = {
    ("all-reduce", 4, 64): 96,
    ("reduce-scatter", 4, 64): 48,
    ("all-gather", 4, 16): 48,
    ("all-to-all", 4, 64): 48,
    ("ragged-all-to-all", 4, 64): 48,
    ("collective-permute", 2, 64): 64,
    ("collective-broadcast", 4, 64): 64,
    ("all-reduce", 1, 64): 0,
    ("all-gather", 1, 64): 0,
    ("collective-permute", 1, 64): 0,
}


def test_bytes_by_hand():
    assert {each: bytes_sent(*each) for each in BYTES} == BYTES
    # A permute that moves nothing sends nothing.
    for pairs in ("{{0,0},{1,1}}", "{}"):
        found = only(f"collective-permute(%p), source_target_pairs={pairs}")
        assert (found.group_size, found.bytes_sent) == (1, 0)


def test_bytes_of_exchanges():
    groups = "channel_id=1, replica_groups={{0,1,2},{3,4,5}}"
    # A ragged one sends its input only; one in tuple form sums its parts, and is one collective.
    found = only(f"ragged-all-to-all(%p, %p, %p, %p, %p, %p), {groups}")
    assert (found.operands, found.bytes_sent) == ((Array("f32", (6,)),), 16)
    found = only(f"all-to-all(%p, %p, %p), {groups}")
    assert (found.bytes_sent, len(found.operands)) == (3 * 24 * 2 / 3, 3)
    # Of single elements it is not a scalar.
    found = only(f"all-to-all(%p, %p, %p), {groups}", "f32[1]")
    assert (found.bytes_sent, found.scalar_bytes_sent) == (8, 0)


# As XLA leaves a loop for TPUs: its length stands in its counter alone.
COUNTED = """HloModule jit_step, num_partitions=2

%condition (c: (s32[], f32[8], s32[])) -> pred[] {
  %c = (s32[], f32[8]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %limit = s32[] LIMIT
  ROOT %test = pred[] compare(%i, %limit), direction=LT
}

%body (b: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %b = (s32[], f32[8]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %v = f32[8]{0} get-tuple-element(%b), index=1
  %k = s32[] get-tuple-element(%b), index=2
  %same = s32[] copy(%k)
  %one = s32[] constant(STEP)
  %next = s32[] add(%one, %j)
  %permute = f32[8]{0} collective-permute(%v), channel_id=5, source_target_pairs={{0,1},{1,0}}
  ROOT %out = (s32[], f32[8]{0}, s32[]) tuple(%next, %permute, KEPT)
}

ENTRY %main (p: f32[8], n: s32[]) -> (s32[], f32[8], s32[]) {
  %p = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %start = s32[] constant(START)
  %ten = s32[] constant(10)
  %begin = s32[] copy(%start)
  %carry = (s32[], f32[8]{0}, s32[]) tuple(%begin, %p, CARRIED)
  ROOT %loop = (s32[], f32[8]{0}, s32[]) while(%carry), condition=%condition, body=%body
}
"""

COUNTS = {
    # limit, start, step, what is carried as the limit and handed on: how often
    ("constant(4)", "0", "1", "%ten", "%same"): 4,
    ("constant(4)", "1", "1", "%ten", "%same"): 3,
    ("constant(5)", "0", "2", "%ten", "%same"): 3,
    ("constant(4)", "6", "1", "%ten", "%same"): 0,
    ("get-tuple-element(%c), index=2", "0", "1", "%ten", "%same"): 10,
    # It changes within the loop, or is given from outside, or the counter stands still.
    ("get-tuple-element(%c), index=2", "0", "1", "%ten", "%next"): None,
    ("get-tuple-element(%c), index=2", "0", "1", "%n", "%same"): None,
    ("constant(4)", "0", "0", "%ten", "%same"): None,
}


@pytest.mark.parametrize("given", COUNTS)
def test_a_loop_is_counted_by_its_counter(given: tuple[str, ...]):
    text = COUNTED
    for name, value in zip(("LIMIT", "START", "STEP", "CARRIED", "KEPT"), given, strict=True):
        text = text.replace(name, value)
    (permute,) = collectives(parse(text))
    assert (permute.in_loop, permute.times) == (True, COUNTS[given])


# Programs for several slices of a TPU: what goes between them is counted as a collective.

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
SLICES = {
    "all-reduce of two": ("ALL_REDUCE", A, A, TWO, 8, 2),
    "all-reduce of four": ("ALL_REDUCE", A, A, FOUR, 12, 4),
    "reduce-scatter of two": ("REDUCE_SCATTER", A, HALF, TWO, 4, 2),
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


@pytest.mark.parametrize("name", SLICES)
def test_between_slices_the_bytes_are_those_of_the_collective(name: str):
    kind, given, result, target, mebibytes, size = SLICES[name]
    found = report(program(kind, given, result, target))
    (each,) = found.collectives
    assert (each.kind, each.group_size) == (name.split(" of ")[0], size)
    assert each.bytes_sent == found.bytes_sent == mebibytes * MIB
    assert found.devices == 4 * size


def test_the_groups_are_of_the_devices_of_all_slices_and_along_an_axis():
    (each,) = report(program("ALL_REDUCE", A, A, FOUR)).collectives
    np.testing.assert_array_equal(each.groups, np.arange(16).reshape(4, 4).T)
    (each,) = report(program(*SLICES["collective-permute of two"][:4])).collectives
    assert each.groups == ((3, 4), (7, 0))
    (each,) = report(program("ALL_REDUCE", A, A, "{1,3}x{0,2}")).collectives
    assert each.groups == ((0, 8), (2, 10))
    for axes in ((("slice", 2), ("chip", 4)), (("shards", 8),)):
        found = report(program("ALL_REDUCE", A, A, TWO), axes)
        assert found.bytes_by_axes == {axes[0][0]: 8 * MIB}
    # Each slice does the same within.
    inside = (
        "  %sum = f32[4096,512] all-reduce(%p), channel_id=2, replica_groups={{0,1},{2,3}}, "
        "use_global_device_ids=true\n"
    )
    _, second = report(program("ALL_REDUCE", A, A, TWO, inside)).collectives
    assert second.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    # Other transfers to hosts are none.
    text = program("ALL_REDUCE", A, A, TWO).replace("xla_megascale_transfer_type", "other")
    assert (report(text).collectives, report(text).devices) == ((), 4)


def test_what_is_computed_meanwhile_hides_it():
    dot = "dot(%p, %p), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    work = f"  %square = f32[512,512] {dot}\n  %sine = f32[512,512] sine(%square)\n"
    (each,) = report(program("ALL_REDUCE", A, A, TWO, work)).collectives
    assert (each.asynchronous, each.matrix_products, each.other_kernels) == (True, 1, 1)
