"""--profile: three steps are traced to the output folder."""

import collections
import gzip
import json
import statistics
from pathlib import Path

import jax
import pytest

from examples.byte_lm.__main__ import main
from tests.examples.byte_lm.small import SMALL, small_text


def run(folder: Path, *words: object) -> int:
    given = ["--data", small_text(folder), "--out", folder / "out", *SMALL, "--profile", *words]
    return main(list(map(str, given)))


@pytest.mark.deep
def test_a_trace_has_three_steps_on_each_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, "--steps", 8, "--shards", 2) == 0
    assert "profile" in capsys.readouterr().out
    (written,) = (tmp_path / "out" / "profile").rglob("*.xplane.pb")
    trace = jax.profiler.ProfileData.from_file(str(written))
    often = collections.Counter(
        (stats["device_ordinal"], stats["hlo_op"])
        for plane in trace.planes
        for line in plane.lines
        for stats in (dict(event.stats) for event in line.events)
        if stats.get("hlo_module") == "jit__run"
    )
    assert {device for device, _ in often} == {0, 1}
    assert statistics.mode(often.values()) == 3
    (perfetto,) = (tmp_path / "out" / "profile").rglob("perfetto_trace.json.gz")
    assert json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]


def test_a_run_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, "--steps", 6) == 2
    assert "--profile traces the last three of 7 steps; got --steps 6." in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "out").exists()
