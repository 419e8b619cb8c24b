"""The sum over all devices: right values pass, and each kind of wrong ones is named."""

import dataclasses
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import crossshard
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools.diagnosis import doctor as diagnosis

SMALL = (4_000,)


def kinds(found: crossshard.tools.Diagnosis) -> list[str]:
    return [each.kind for each in found.findings]


def test_sums_of_each_size_are_right():
    found = crossshard.doctor(sizes=(4_000, 100_000))
    assert found.ok, found.findings
    assert [(each.kind, each.right) for each in found.tests] == [("all-reduce", True)] * 2
    # By hand, for 8 devices: each sends 7/8 of the array, twice for a sum that all get.
    assert [each.bytes_sent for each in found.tests] == [7000, 175_000]
    assert [each.size for each in found.tests] == [4_000, 100_000]
    assert all(each.bandwidth == each.bytes_sent / each.seconds for each in found.tests)
    assert found.mesh == {"shards": 8}
    assert found.devices == dataclasses.replace(
        found.devices, platform="cpu", number=8, local=8, processes=1, process=0
    )
    assert json.loads(found.to_json())["tests"][0]["kind"] == "all-reduce"
    assert "all-reduce  4.00 kB  7.00 kB" in str(found)
    assert str(found).endswith("Nothing looks wrong.")


def rounded(x, axis):
    return _psum(x.astype(jnp.bfloat16), axis).astype(x.dtype)


def one_twice(x, axis):
    return _psum(x, axis) + jnp.where(lax.axis_index(axis) == 5, 1, 0)


_psum = lax.psum
WRONG = {
    "not summed": lambda x, axis: x,
    "rounded to 16 bits": rounded,
    "wrong on one shard": one_twice,
    "another shard's": lambda x, axis: _psum(jnp.where(lax.axis_index(axis) == 3, 0, x), axis),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lax, "psum", WRONG[name])
    found = crossshard.doctor(sizes=SMALL)
    assert kinds(found) == ["wrong values"]
    assert "The all-reduce of 4.00 kB is wrong" in found.findings[0].sentence
    assert [each.right for each in found.tests] == [False]
    assert "WRONG" in str(found)
    if name == "wrong on one shard":
        assert "on shard 5" in found.findings[0].sentence


def test_float32_has_room_for_the_sums_on_every_number_of_shards():
    for shards in (1, 2, 8, 1000, 4096, 60_000):
        numbers, marks = diagnosis._values(100_000, shards)
        total = shards * numbers + marks.sum()
        assert total.max() <= 2**24
        assert np.array_equal(total.astype(np.float32), total)


def test_a_sum_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch):
    plain = diagnosis._all_reduce

    def hangs(mesh: Any, length: int) -> Any:
        return plain(mesh, length) if length == 100 else time.sleep(5)

    monkeypatch.setattr(diagnosis, "_all_reduce", hangs)
    found = crossshard.doctor(sizes=(400, 4_000, 8_000), timeout=3)
    assert (found.stuck, kinds(found)) == (True, ["stuck"])
    assert "The all-reduce of 4.00 kB has not ended in 3 seconds" in found.findings[0].sentence
    assert [each.size for each in found.tests] == [400]


def test_a_sum_that_fails_is_named(monkeypatch: pytest.MonkeyPatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: no route\nmore")

    monkeypatch.setattr(diagnosis, "_all_reduce", fails)
    (finding,) = crossshard.doctor(sizes=SMALL).findings
    assert finding.sentence == "The all-reduce of 4.00 kB failed: UNAVAILABLE: no route."


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"sizes": 4_000}, ArgumentTypeError, "sizes must be a sequence of bytes"),
        ({"sizes": ("4 MB",)}, ArgumentTypeError, "sizes must be a number; got '4 MB'"),
        ({"timeout": 0}, ArgumentError, "timeout must be above 0; got 0"),
    ],
)
def test_refusals_and_no_self_test_at_all(options, error, said, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diagnosis, "_test", None)
    with pytest.raises(error, match=said):
        crossshard.doctor(**options)
    assert crossshard.doctor(self_test=False).tests == ()


def test_a_coordinator_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: str) -> None:
        raise RuntimeError("UNAVAILABLE")

    monkeypatch.setattr(diagnosis._jax, "told_below", fail)
    assert diagnosis._late(3, processes=1) == ""
    assert diagnosis._late(3, processes=2) == ", and the coordinator does not answer"
