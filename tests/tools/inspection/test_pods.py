"""Steps for pods and clusters: bytes by hand, and by `inspect`.

data/make_sent.py says what the programs are, and has compiled those that are kept there. Where
libtpu or JAX for CUDA is installed they are compiled anew, and read whole.
"""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

from crossshard.tools.inspection.collectives import collectives
from crossshard.tools.inspection.hlo import parse
from crossshard.tools.inspection.inspect import report_on
from tests.tools.command import program
from tests.tools.steps import moved, summed

DATA = Path(__file__).parent / "data"

TPUS = {"v5e:4x4": 16, "v5e:16x16": 256, "v6e:8x8": 64, "v5p:4x4x4": 64, "v5p:16x16x16": 4096}
GPUS = {"h100:1x8": 8, "h100:128x8": 1024}
ALL = TPUS | GPUS
PROGRAMS = ["replicated", "sharded", "plain"]


MATRICES = 4 * (512 * 1024 + 1024 * 1024 + 1024 * 1024)
# An array that is not split, and the loss, which is in its bucket.
TINY = 4 * (512 + 1)


def by_hand(topology: str, program: str) -> float:
    n = ALL[topology]
    if program == "replicated":
        return summed(n, MATRICES + TINY)
    if program == "sharded":
        sent = 2 * moved(n, MATRICES) + summed(n, TINY)
        # In two stages of 64. A slice has five rows of 128 at the end, and XLA for TPUs, which
        # scatters sixteen or more, makes the second stage an all-reduce of what the first has left.
        return sent + moved(64, MATRICES / 64) * (topology == "v5p:16x16x16")
    # XLA for TPUs gathers over 64 chips or more by a sum of zeros and the device's own piece.
    gathered = summed if topology in TPUS and n >= 64 else moved
    return summed(n, 4 * 512 * 384) + gathered(n, 4 * n * 16 * 256)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("topology", ALL)
def test_what_was_compiled_before(topology: str, program: str):
    text = (DATA / f"sent_{topology.replace(':', '_')}_{program}.hlo").read_text()
    read = sum(each.bytes_sent + each.scalar_bytes_sent for each in collectives(parse(text)))
    assert read == pytest.approx(by_hand(topology, program), rel=1e-12)


# Programs of v5e:4x4 in full, as data/make.py compiled them.


def kinds(text: str) -> list[str]:
    return [each.kind for each in collectives(parse(text)) if each.bytes_sent]


def test_an_all_reduce_fused_with_its_slice_is_a_reduce_scatter():
    text = (DATA / "v5e_4x4_axis.hlo").read_text()
    assert " all-reduce(%pad" in text
    assert " reduce-scatter(" not in text
    assert kinds(text).count("reduce-scatter") == 2
    # The same outside of such a fusion.
    assert "reduce-scatter" not in kinds(text.replace("kind=kCustom", "kind=kLoop"))
    report = report_on(parse(text), 32 * 2**20)
    assert (report.devices, report.shards) == (16, 16)
    assert report.ratio == pytest.approx(1.025, rel=1e-4)
    assert report.scalar_bytes_sent == pytest.approx(8, rel=0.1)
    # Every reduction has a line.
    reductions = [each for each in report.collectives if each.kind != "collective-permute"]
    assert all((each.source or "").startswith("step.py:") for each in reductions)


def test_an_asynchronous_chain_of_fusions_is_one_collective():
    text = (DATA / "v5e_4x4_exchanges.hlo").read_text()
    assert text.count(" all-gather(") == 3
    found = {each.kind: each for each in collectives(parse(text))}
    assert len(found) == len(collectives(parse(text))) == 4
    # It runs beside a loop, which hides it, and is not repeated by it.
    assert not found["all-gather"].in_loop
    assert found["all-gather"].bytes_sent == 15 * 16 * 1024 * 4
    assert found["all-gather"].behind == found["collective-permute"].behind == "matrix products"
    assert not found["all-reduce"].asynchronous
    assert not found["all-to-all"].asynchronous
    assert found["all-reduce"].in_loop
    # As make.py wrote it; XLA does not note it for TPUs.
    assert found["all-reduce"].times == 5


# Where libtpu or JAX for CUDA is installed.


def is_there(*plugins: str) -> bool:
    return any(importlib.util.find_spec(each) for each in plugins)


needs_tpu = pytest.mark.skipif(not is_there("libtpu"), reason="libtpu is not installed")
needs_cuda = pytest.mark.skipif(
    not is_there("jax_cuda12_plugin", "jax_cuda13_plugin"), reason="JAX for CUDA is not installed"
)


@pytest.mark.parametrize(
    "topologies",
    [pytest.param(TPUS, marks=needs_tpu), pytest.param(GPUS, marks=needs_cuda)],
    ids=["tpus", "gpus"],
)
def test_what_is_compiled_now(tmp_path: Path, topologies: dict[str, int]):
    program(str(DATA / "make_sent.py"), str(tmp_path), *topologies)
    for topology, name in itertools.product(topologies, PROGRAMS):
        path = tmp_path / f"sent_{topology.replace(':', '_')}_{name}"
        report = json.loads(path.with_suffix(".json").read_text())
        hand = pytest.approx(by_hand(topology, name), rel=1e-12)
        assert report["devices"] == ALL[topology]
        assert report["bytes_sent"] + report["scalar_bytes_sent"] == hand, path


OF_PARTS = """
import json, sys
import crossshard
from benchmarks import gpus
from benchmarks.shapes import blocks

name, model = "ours, params sharded", blocks(2, scan=True, checkpoint=True)
mesh = gpus.mesh_of(sys.argv[1])
report = crossshard.inspect(gpus.STEPS[name](mesh, model), parameters=model.params)
print(json.dumps([report.bytes_sent / gpus.least(name, mesh.size, model), report.hidden_share]))
"""


@needs_tpu
@pytest.mark.parametrize(
    ("topology", "hidden"),
    [("v5e:4x4", 0.9), ("v5e:16x16", 0.3), ("v6e:8x8", 0.7), ("v5p:4x4x4", 0.7)],
)
def test_parts_go_round_beside_products(topology: str, hidden: float):
    out = program("-c", OF_PARTS, topology)
    ratio, share = json.loads(out.splitlines()[-1])
    print(f"{topology}: {ratio:.3f} of the bound, {share:.0%} behind products")
    assert ratio <= 1.05
    assert share >= hidden
