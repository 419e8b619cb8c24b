"""The bench of one GPU: its page, its small form on CPUs, and on a GPU where there is one."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu

PARTS = ["models", "processes", "saves"]


def test_the_page_keeps_what_was_measured_by_hand():
    rows = [
        {"gpus": 8, "step": "ours, sharded", "ms": 159.61, "temporary_gb": 5.5},
        {"gpus": 8, "step": "by hand, sharded", "failed": ["out of memory"]},
    ]
    before = "## Measured by hand\n\nOn another card."
    page = gpu.page({"device": "H100", "versions": "JAX 1", "rows": {"clusters": rows}}, before)
    lines = page.splitlines()
    assert "On H100, with JAX 1." in lines
    assert "| 8 | ours, sharded | 160 | 5.5 | – |" in lines
    assert "| 8 | by hand, sharded | out of memory | out of memory | out of memory |" in lines
    assert page.endswith(f"{before}\n")


def test_bits_and_losses_of_several_jobs_are_compared():
    ended = lambda bits, loss: (0, f'some line\n{{"losses": [1.0, {loss}], "sha256": "{bits}"}}\n')
    same = gpu._compared((1, 2), [[ended("a", 2.0)], [ended("a", 2.0), ended("a", 2.0)]])
    assert same == {"numbers": [1, 2], "same_bits": True, "losses_off": 0.0}
    other = gpu._compared((1, 2), [[ended("a", 2.0)], [ended("a", 2.5), ended("b", 2.5)]])
    assert other == {"numbers": [1, 2], "same_bits": False, "losses_off": 0.5}
    dead = gpu._compared((1, 2), [[(1, "")], [ended("a", 2.0)] * 2])
    assert not dead["same_bits"]
    assert dead["losses_off"] is None


def measured(folder: Path, *words: str) -> dict[str, list[gpu.Row]]:
    gpu.main([*words, "--out", str(folder)])
    assert "# On a real GPU" in (folder / "gpu.md").read_text()
    return dict(json.loads((folder / "gpu.json").read_text())["rows"])


def check(found: dict[str, list[gpu.Row]]) -> None:
    for row in found["models"]:
        assert row["losses_off"] < 1e-2, row
        assert row["ratio"] > 0, row
    *trained, killed = found["processes"]
    for row in trained:
        assert row["same_bits"] or "tuned, one" in row["kernels"], row
        assert row["losses_off"] < 1e-3, row
    assert killed["codes"][-1] == -9
    assert set(killed["codes"][:-1]) == {81}
    assert killed["seconds"] < 30


@pytest.mark.deep
def test_the_small_form_runs_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "NPROC"):
        monkeypatch.delenv(name)
    found = measured(tmp_path, "--quick", "--parts", *PARTS)
    assert found.keys() == set(PARTS)
    check(found)
    assert found["saves"][0]["ours_ms"]


@pytest.mark.gpu
def test_it_runs_on_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "NPROC", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    found = measured(tmp_path)
    check(found)
    assert all(row["mfu"] for row in found["models"])
    assert not any("failed" in row for rows in found.values() for row in rows)
