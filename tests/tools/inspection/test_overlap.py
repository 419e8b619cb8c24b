"""What collectives are hidden behind, read from scheduled programs as XLA writes them."""

import json
from pathlib import Path

import pytest

from crossshard.tools.inspection.collectives import Collective, collectives
from crossshard.tools.inspection.hlo import parse
from crossshard.tools.inspection.inspect import Communication, report_on

DATA = Path(__file__).parent / "data"

# One array of 1,024 numbers is summed; the tests write into the gap what runs meanwhile.
TEMPLATE = """HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gemm (l: f32[32,32], r: f32[32,32]) -> f32[32,32] {
  %l = f32[32,32]{1,0} parameter(0)
  %r = f32[32,32]{1,0} parameter(1)
  ROOT %inner_product = f32[32,32]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%nested (n: f32[32,32]) -> f32[32,32] {
  %n = f32[32,32]{1,0} parameter(0)
  ROOT %inner = f32[32,32]{1,0} fusion(%n, %n), kind=kCustom, calls=%gemm
}

%tanh_of (t: f32[32,32]) -> f32[32,32] {
  %t = f32[32,32]{1,0} parameter(0)
  ROOT %tanh = f32[32,32]{1,0} tanh(%t)
}

%condition (c: (s32[], f32[32,32])) -> pred[] {
  %c = (s32[], f32[32,32]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%multiplies (m: (s32[], f32[32,32])) -> (s32[], f32[32,32]) {
  %m = (s32[], f32[32,32]{1,0}) parameter(0)
  %mi = s32[] get-tuple-element(%m), index=0
  %mx = f32[32,32]{1,0} get-tuple-element(%m), index=1
  %my = f32[32,32]{1,0} fusion(%mx), kind=kCustom, calls=%nested
  ROOT %mo = (s32[], f32[32,32]{1,0}) tuple(%mi, %my)
}

%scattered (s: f32[32,32]) -> f32[8,32] {
  %s = f32[32,32]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8,32]{1,0} reduce-scatter(%s), GROUPS, dimensions={0}, to_apply=%add
}

ENTRY %main (p: f32[32,32]) -> f32[32,32] {
  %p = f32[32,32]{1,0} parameter(0)
  %one = s32[] constant(1)
  %carry = (s32[], f32[32,32]{1,0}) tuple(%one, %p)
  GAP
  ROOT %q = f32[32,32]{1,0} copy(%p)
}
"""  # noqa: E501

GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
REDUCE = (
    "%start = f32[32,32]{1,0} all-reduce-start(%p), GROUPS, to_apply=%add",
    "%done = f32[32,32]{1,0} all-reduce-done(%start)",
)
GATHER = (
    "%start = (f32[32,32]{1,0}, f32[128,32]{1,0}) all-gather-start(%p), GROUPS, dimensions={0}",
    "%done = f32[128,32]{1,0} all-gather-done(%start)",
)
SCATTER = (
    "%start = ((f32[32,32]{1,0}), f32[8,32]{1,0}, s32[]) async-start(%p), calls=%scattered",
    "%done = f32[8,32]{1,0} async-done(%start), calls=%scattered",
)
# As XLA for TPUs writes what it hands to a SparseCore.
ON_SPARSE_CORE = (
    "%start = ((f32[32,32]{1,0}), f32[8,32]{1,0}, s32[]) call-start(%p), "
    'async_execution_thread="sparsecore", to_apply=%scattered',
    "%done = f32[8,32]{1,0} call-done(%start)",
)
PERMUTE = (
    "%start = (f32[32,32]{1,0}, f32[32,32]{1,0}) collective-permute-start(%p), "
    "channel_id=1, source_target_pairs={{0,1},{1,0}}",
    "%done = f32[32,32]{1,0} collective-permute-done(%start)",
)
PAIRS = {
    "all-reduce": REDUCE,
    "all-gather": GATHER,
    "reduce-scatter": SCATTER,
    "reduce-scatter on a SparseCore": ON_SPARSE_CORE,
    "collective-permute": PERMUTE,
}


def read(*lines: str) -> tuple[Collective, ...]:
    text = TEMPLATE.replace("GAP", "\n  ".join(lines)).replace("GROUPS", GROUPS)
    return collectives(parse(text))


def call(target: str) -> str:
    return f'%k = (f32[32,32]{{1,0}}, s8[64]) custom-call(%p, %p), custom_call_target="{target}"'


RUNS = {
    "nothing": ("nothing", []),
    "what costs nothing": (
        "nothing",
        [
            "%k = f32[1024]{0} bitcast(%p)",
            "%i = s32[] get-tuple-element(%carry), index=0",
            "%c = s32[] constant(7)",
        ],
    ),
    "a mark of a TPU": ("nothing", [call("PrepareAsyncCallStart")]),
    "a collective on a SparseCore": (
        "nothing",
        [line.replace("%start", "%go").replace("%done", "%k") for line in ON_SPARSE_CORE],
    ),
    "another collective": (
        "nothing",
        [
            "%k = f32[32,32]{1,0} all-reduce-start(%p), GROUPS, to_apply=%add",
            "%l = f32[32,32]{1,0} all-reduce-done(%k)",
        ],
    ),
    "a fusion": ("other kernels", ["%k = f32[32,32]{1,0} fusion(%p), calls=%tanh_of"]),
    "a copy": ("other kernels", ["%k = f32[32,32]{1,0} copy(%p)"]),
    "a custom call": ("other kernels", [call("__cudnn$norm")]),
    "a sort": ("other kernels", ["%k = f32[32,32]{1,0} sort(%p), dimensions={0}, to_apply=%add"]),
    "a product": (
        "matrix products",
        ["%k = f32[32,32]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"],
    ),
    "a fused product": ("matrix products", ["%k = f32[32,32] fusion(%p, %p), calls=%gemm"]),
    "a nested product": ("matrix products", ["%k = f32[32,32] fusion(%p), calls=%nested"]),
    "cublas": ("matrix products", [call("__cublas$gemm")]),
    "cublaslt": ("matrix products", [call("__cublas$lt$matmul$f8")]),
    "a convolution of cudnn": ("matrix products", [call("__cudnn$convForward")]),
    "attention of cudnn": ("matrix products", [call("__cudnn$fmhaSoftmax")]),
    "a loop": (
        "matrix products",
        [
            "%k = (s32[], f32[32,32]{1,0}) while(%carry), condition=%condition, body=%multiplies, "
            'backend_config={"known_trip_count":{"n":"3"}}'
        ],
    ),
    "a called computation": (
        "matrix products",
        ["%k = f32[32,32]{1,0} call(%p), to_apply=%nested"],
    ),
}


# Of a wrapped collective it is the inner one that is reported.
NAMES = ("start", "reduce-scatter.1")


@pytest.mark.parametrize("pair", PAIRS)
def test_what_runs_between_start_and_done(pair: str):
    start, done = PAIRS[pair]
    for name, (behind, lines) in RUNS.items():
        found = next(each for each in read(start, *lines, done) if each.name in NAMES)
        assert (found.kind, found.asynchronous) == (pair.split()[0], True), name
        assert found.behind == behind, name


def counts(*lines: str) -> tuple[bool, str, int, int]:
    (found,) = read(*lines)
    return found.asynchronous, found.behind, found.matrix_products, found.other_kernels


def test_what_is_counted():
    start, done = REDUCE
    (product,), (fused,) = RUNS["a product"][1], RUNS["a fused product"][1]
    lines = [line for name in ("a fusion", "cublas", "a product") for line in RUNS[name][1]]
    lines = [line.replace("%k", f"%k{index}") for index, line in enumerate(lines)]
    assert counts(start, *lines, done) == (True, "matrix products", 2, 1)
    # Only what is between.
    assert counts(fused, start, done, fused.replace("%k", "%l")) == (True, "nothing", 0, 0)
    # A pair that blocks is synchronous, and what is synchronous is exposed.
    config = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    alone = "%s = f32[32,32]{1,0} all-reduce(%p), GROUPS, to_apply=%add"
    for lines in ([start + config, product, done + config], [alone, product]):
        assert counts(*lines)[:2] == (False, "nothing")
    # An update on the way belongs to the start.
    start, done = SCATTER
    between = "%go = ((f32[32,32]{1,0}), f32[8,32]{1,0}, s32[]) async-update(%start)"
    assert counts(start, between, product, done.replace("(%start)", "(%go)"))[2] == 1


# Whole programs.


def h100(name: str) -> Communication:
    """Four matrices of a megabyte of numbers on eight H100s, as data/make_gpu.py compiled them."""
    module = parse((DATA / f"h100_8_{name}.hlo").read_text())
    return report_on(module, 4 * 4 * 2**20)


def test_reduce_scatters_hide_behind_the_backward_pass_where_xla_does_not_combine_them():
    report = h100("default")
    (scatter,) = (each for each in report.collectives if each.kind == "reduce-scatter")
    assert (len(scatter.operands), scatter.asynchronous, scatter.matrix_products) == (4, True, 0)
    assert report.hidden_share == report.bytes_behind_matrix_products == 0
    assert report.bytes_behind_other_kernels + report.bytes_exposed == report.bytes_sent
    report, mebibyte = h100("apart"), 2**20
    # Three of four matrices of 4 MiB, of which each GPU sends seven eighths; the last gradient has
    # nothing left to hide behind. The gathers follow the update.
    assert report.bytes_behind_matrix_products == 3 * 3.5 * mebibyte
    assert report.bytes_sent == 2 * 4 * 3.5 * mebibyte
    assert report.hidden_share == 3 / 8
    assert report.hidden_share_of("reduce-scatter") == 3 / 4
    assert report.hidden_share_of("all-gather") == 0
    assert report.hidden_share_of("all-to-all") is None
    sums = report.bytes_behind_other_kernels, report.bytes_exposed
    assert sum(sums) == 5 * 3.5 * mebibyte
    assert "11,010,048 B (38%) behind matrix products" in str(report)
    assert "behind 2 matrix products" in str(report)
    fields = json.loads(report.to_json())
    assert fields["hidden_share"] == 3 / 8
    assert fields["bytes_behind_matrix_products"] == 3 * 3.5 * mebibyte
    assert sum(each["matrix_products"] > 0 for each in fields["collectives"]) == 3
