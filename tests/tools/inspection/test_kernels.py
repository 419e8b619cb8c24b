"""The bytes that kernels move besides matrix products: by hand on small programs, ours on GPUs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import crossshard
from crossshard.tools.inspection.hlo import parse
from crossshard.tools.inspection.kernels import kernel_bytes

ROOT = Path(__file__).parents[3]
MATRIX, ROW = 4 * 32 * 32, 4 * 32

PROGRAM = """HloModule jit_step, is_scheduled=true

%fused (a: f32[32,32], b: bf16[32,32], i: s32[]) -> (f32[1,32], f32[32,32]) {
  %a = f32[32,32]{1,0} parameter(0)
  %b = bf16[32,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %wide = f32[32,32]{1,0} convert(%b)
  %zero = s32[] constant(0)
  %row = f32[1,32]{1,0} dynamic-slice(%wide, %i, %zero), dynamic_slice_sizes={1,32}
  %new = f32[32,32]{1,0} dynamic-update-slice(%a, %row, %i, %zero)
  ROOT %both = (f32[1,32]{1,0}, f32[32,32]{1,0}) tuple(%row, %new)
}

%gemm (l: f32[32,32]) -> f32[32,32] {
  %l = f32[32,32]{1,0} parameter(0)
  ROOT %product = f32[32,32]{1,0} dot(%l, %l), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%doubled (d: f32[32,32]) -> f32[32,32] {
  %d = f32[32,32]{1,0} parameter(0)
  ROOT %twice = f32[32,32]{1,0} add(%d, %d)
}

%kept (k: f32[32,32]) -> f32[32,32] {
  ROOT %k = f32[32,32]{1,0} parameter(0)
}

%condition (c: f32[32,32]) -> pred[] {
  %c = f32[32,32]{1,0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p: f32[32,32], q: bf16[32,32], j: s32[], t: pred[]) -> f32[32,32] {
  %p = f32[32,32]{1,0} parameter(0)
  %q = bf16[32,32]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %t = pred[] parameter(3)
  BODY
  ROOT %out = f32[32,32]{1,0} bitcast(%p)
}
"""
LOOP = "while(%p), condition=%condition, body=%doubled"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("bitcast(%p)", 0),
        ("copy(%p)", 2 * MATRIX),
        ("dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 0),
        ("fusion(%p), kind=kOutput, calls=%gemm", 0),
        ("fusion(%p), kind=kLoop, calls=%doubled", 2 * MATRIX),
        (LOOP, 3 * MATRIX),
        (f'{LOOP}, backend_config={{"known_trip_count":{{"n":"5"}}}}', 5 * 3 * MATRIX),
        (f'{LOOP}, metadata={{op_name="jit(f)/if_not_finite/while"}}', 0),
        (
            "conditional(%t, %p, %p), true_computation=%doubled, false_computation=%kept",
            3 * MATRIX,
        ),
        ("all-reduce(%p), replica_groups={}, to_apply=%doubled", 0),
    ],
)
def test_a_kernel_by_hand(body: str, expected: int):
    line = f"%x = f32[32,32]{{1,0}} {body}"
    assert kernel_bytes(parse(PROGRAM.replace("BODY", line))) == expected


def test_of_an_array_that_is_sliced_or_updated_the_slice_counts():
    line = "%x = (f32[1,32]{1,0}, f32[32,32]{1,0}) fusion(%p, %q, %j), kind=kLoop, calls=%fused"
    # The row that is read has 16 bits; it is written twice, once into the matrix.
    assert kernel_bytes(parse(PROGRAM.replace("BODY", line))) == ROW // 2 + 4 + 2 * ROW


def test_a_report_has_them():
    def update(params: jax.Array, gradients: jax.Array) -> jax.Array:
        return optax.apply_updates(params, -0.1 * gradients)

    params = jnp.ones((256, 256))
    report = crossshard.inspect(jax.jit(update).lower(params, params))
    assert report.kernel_bytes == 3 * params.nbytes
    assert f"read and write {report.kernel_bytes:,} B" in str(report)


COMPARED = """
import itertools
import crossshard
from benchmarks import gpus, shapes
models = [shapes.transformer(layers=4), shapes.mlp(),
          shapes.transformer(layers=4, scan=True, checkpoint=True)]
for model, kind in itertools.product(models, ("replicated", "sharded", "params sharded")):
    steps = (gpus.STEPS[f"{who}, {kind}"](gpus.cluster(1), model) for who in ("ours", "by hand"))
    print(kind, *(crossshard.inspect(step).kernel_bytes for step in steps))
"""


@pytest.mark.deep
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs JAX for CUDA"
)
def test_ours_move_what_those_by_hand_move_on_gpus():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", COMPARED]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    rows = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert len(rows) == 9
    for kind, ours, by_hand in rows:
        # The gather of a stacked leaf, cut along its second axis, ends with a transpose.
        assert int(ours) <= 1.015 * int(by_hand), kind
