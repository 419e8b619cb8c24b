"""The bench of one GPU: its page, its small form on CPUs, and on a GPU where there is one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from benchmarks import age, gpu, gpus, on_gpu

BY_HAND = "## Measured by hand\n\nOn another card."


def part(*rows: gpu.Row, quick: bool = False, stopped: bool = False) -> dict[str, Any]:
    about = {"device": "H100", "versions": "jax 1", "quick": quick, "stopped": stopped}
    return {**about, "version": "0.1.0", "day": "2026-11-21", "rows": list(rows)}


def test_the_page_has_a_table_for_each_part():
    rows = (
        {"GPUs": 8, "step": "ours, sharded", "ms": 159.61, "GB temporary": 5.5},
        {"GPUs": 8, "step": "by hand, sharded", "failed": "RuntimeError: out of memory"},
    )
    lines = gpu.page({"clusters": part(*rows, stopped=True)}, "").splitlines()
    assert "| 8 | ours, sharded | 159.6 | 5.50 | – |" in lines
    assert "| 8 | by hand, sharded | – | – | RuntimeError: out of memory |" in lines
    told = "On H100, with jax 1. The time was over: what is not here was not measured."
    assert told in lines


def test_what_was_measured_by_hand_stays_until_all_is_measured():
    row = {"ms": 1.0}
    assert BY_HAND in gpu.page({}, BY_HAND)
    every = {name: part(row) for name in gpu.MEASURES}
    assert BY_HAND not in gpu.page(every, BY_HAND)
    assert BY_HAND in gpu.page({**every, "saves": part(row, quick=True)}, BY_HAND)
    del every["saves"]
    assert BY_HAND in gpu.page(every, BY_HAND)


def test_bits_and_losses_of_several_jobs_are_compared():
    ended = lambda bits, loss: (0, f'some line\n{{"losses": [1.0, {loss}], "sha256": "{bits}"}}\n')
    same = gpu._compared((1, 2), [[ended("a", 2.0)], [ended("a", 2.0), ended("a", 2.0)]])
    assert same == {"processes": [1, 2], "same bits": True, "losses differ by": 0.0}
    other = gpu._compared((1, 2), [[ended("a", 2.0)], [ended("a", 2.5), ended("b", 2.5)]])
    assert other == {"processes": [1, 2], "same bits": False, "losses differ by": 0.5}
    dead = gpu._compared((1, 2), [[(1, "ValueError: why\nEnd.")], [ended("a", 2.0)] * 2])
    assert not dead["same bits"]
    assert dead["losses differ by"] is None
    assert dead["failed"] == "ValueError: why"


def test_every_step_of_a_cluster_is_known_and_measured_once():
    steps = [(number, step) for number, steps in gpu._CLUSTERS for step in steps]
    assert len(steps) == len({*steps})
    assert {step for _, step in steps} <= gpus.STEPS.keys()
    assert {number for number, _ in steps} == {8, 32, 256}


def test_a_program_of_other_devices_is_not_measured():
    # Where the topology is not imagined, a single device would pass for many.
    try:
        with pytest.raises(AssertionError, match="The program is of 8 GPUs"):
            on_gpu.cluster(32, "ours, params sharded", quick=True, runs=True)
    finally:
        jax.config.update("jax_mock_gpu_topology", "")


@pytest.fixture
def real_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves to the processes that a test starts the devices that there are."""
    names = ["XLA_FLAGS"]
    if request.node.get_closest_marker("gpu"):
        names += ["JAX_DISABLE_MOST_OPTIMIZATIONS", "NPROC", "JAX_PLATFORMS"]
    for name in names:
        monkeypatch.delenv(name)


def measured(folder: Path, *words: str) -> dict[str, list[gpu.Row]]:
    gpu.main([*words, "--out", str(folder)])
    page = (folder / "gpu.md").read_text()
    assert page.startswith("# On a real GPU\n")
    assert age.of(page)
    return {
        name: part["rows"] for name, part in json.loads((folder / "gpu.json").read_text()).items()
    }


def check_models(rows: list[gpu.Row]) -> None:
    for row in rows:
        assert row["losses differ by"] < 1e-2, row
        assert row["ratio"] > 0, row


def check_processes(rows: list[gpu.Row]) -> None:
    *trained, killed = rows
    for row in trained:
        assert row["same bits"] or "tuned, one" in row["kernels"], row
        assert row["losses differ by"] < 1e-3, row
    assert killed["exit codes"][-1] == -9
    assert set(killed["exit codes"][:-1]) == {81}
    assert killed["seconds"] < 30


def test_no_row_is_begun_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "Machine", lambda: SimpleNamespace(has_gpu=False, kind="cpu"))
    monkeypatch.setitem(gpu.MEASURES, "models", lambda machine, quick: iter([{"ms": 1.0}] * 2))
    assert measured(tmp_path, "--quick", "--minutes", "0") == {"models": [{"ms": 1.0}]}
    assert "The time was over" in (tmp_path / "gpu.md").read_text()


@pytest.mark.deep
@pytest.mark.usefixtures("real_devices")
def test_the_small_form_measures_models(tmp_path: Path):
    check_models(measured(tmp_path, "--quick", "--parts", "models")["models"])


@pytest.mark.usefixtures("real_devices")
@pytest.mark.deep
def test_the_small_form_trains_in_processes_and_saves(tmp_path: Path):
    found = measured(tmp_path, "--quick", "--parts", "processes", "saves")
    check_processes(found["processes"])
    assert found["saves"][0]["ratio"] > 0


@pytest.mark.usefixtures("real_devices")
@pytest.mark.deep
def test_the_programs_of_clusters_are_compiled(tmp_path: Path):
    if "plugin" not in gpu.versions():
        pytest.skip("JAX for CUDA is not installed")
    rows = measured(tmp_path, "--quick", "--parts", "clusters")["clusters"]
    assert all(row["GB of kernels"] > 0 for row in rows), rows


@pytest.mark.usefixtures("real_devices")
@pytest.mark.gpu
def test_models_train_as_with_a_bare_jit_on_this_gpu(tmp_path: Path):
    rows = measured(tmp_path, "--parts", "models")["models"]
    check_models(rows)
    assert all(row["MFU"] is None or 0.05 < row["MFU"] < 1 for row in rows), rows


@pytest.mark.usefixtures("real_devices")
@pytest.mark.gpu
def test_processes_share_this_gpu(tmp_path: Path):
    check_processes(measured(tmp_path, "--parts", "processes")["processes"])
