"""--profile: three steps are traced to the output folder."""

import collections
import gzip
import json
import statistics
from pathlib import Path

import jax
import pytest

from tests.examples.byte_lm.small import run


@pytest.mark.deep
def test_a_trace_has_three_steps_on_each_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, "out", "--profile", "--steps", 8, "--shards", 2) == 0
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
