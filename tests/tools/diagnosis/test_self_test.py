"""The self-test of collectives: right values pass, and each kind of wrong ones is named."""

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
from crossshard.tools.diagnosis import deadline, self_test
from crossshard.tools.diagnosis.collective_programs import CollectiveProgram

KINDS = ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"]
SMALL = (4_000,)


def kinds(found: crossshard.tools.Diagnosis) -> list[str]:
    return [each.kind for each in found.findings]


def test_all_collectives_are_run_and_right():
    found = crossshard.doctor(sizes=(4_000, 100_000))
    assert found.ok, found.findings
    assert [each.kind for each in found.tests] == [kind for kind in KINDS for _ in range(2)]
    assert all(each.right for each in found.tests)
    # By hand, for 8 devices: each sends 7/8 of the array, twice for a sum that all get.
    sent = {each.kind: each.bytes_sent for each in found.tests if each.size == 4_000}
    assert list(sent.values()) == [7000, 3500, 3500, 3500, 4000]
    assert found.mesh == {"shards": 8}
    assert found.devices == dataclasses.replace(
        found.devices, platform="cpu", number=8, local=8, processes=1, process=0
    )
    assert json.loads(found.to_json())["tests"][0]["kind"] == "all-reduce"
    assert "all-reduce          4.00 kB  7.00 kB" in str(found)
    assert str(found).endswith("Nothing looks wrong.")


def rounded(x, axis):
    return _psum(x.astype(jnp.bfloat16), axis).astype(x.dtype)


def one_twice(x, axis):
    return _psum(x, axis) + jnp.where(lax.axis_index(axis) == 5, 1, 0)


_psum, _gather, _permute, _scatter = lax.psum, lax.all_gather, lax.ppermute, lax.psum_scatter
another_part = lambda x, axis, tiled: jnp.roll(_scatter(x, axis, tiled=tiled), 1)
another_order = lambda x, axis, tiled: jnp.roll(_gather(x, axis, tiled=tiled), x.size)
backwards = lambda x, axis, pairs: _permute(x, axis, [(b, a) for a, b in pairs])
WRONG = {
    "not summed": ("all-reduce", "psum", lambda x, axis: x),
    "rounded to 16 bits": ("all-reduce", "psum", rounded),
    "wrong on one shard": ("all-reduce", "psum", one_twice),
    "another part": ("reduce-scatter", "psum_scatter", another_part),
    "another order": ("all-gather", "all_gather", another_order),
    "not exchanged": ("all-to-all", "all_to_all", lambda x, axis, *_: x),
    "the other way round": ("collective-permute", "ppermute", backwards),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named(name: str, monkeypatch: pytest.MonkeyPatch):
    kind, function, wrong = WRONG[name]
    monkeypatch.setattr(lax, function, wrong)
    found = crossshard.doctor(sizes=SMALL)
    assert kinds(found) == ["wrong values"]
    assert f"The {kind} of 4.00 kB is wrong" in found.findings[0].sentence
    assert [each.kind for each in found.tests if not each.right] == [kind]
    assert "WRONG" in str(found)
    if name == "wrong on one shard":
        assert "on shard 5" in found.findings[0].sentence


def test_float32_has_room_for_the_sums_on_every_number_of_shards():
    from crossshard.tools.diagnosis.collective_programs import _Values

    for shards in (1, 2, 8, 1000, 4096, 60_000):
        total = _Values(shards).total(0, 100_000)
        assert total.max() <= 2**24
        assert np.array_equal(total.astype(np.float32), total)


def test_on_cpus_each_collective_stands_beside_a_copy_in_memory():
    found = crossshard.doctor(sizes=(1_000_000,))
    assert "  memory copy  part  " in str(found)
    assert all(each.expected > 1e7 for each in found.tests)


def test_a_collective_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch):
    compiled = CollectiveProgram.compiled

    def hangs(program: CollectiveProgram, *rest: Any) -> Any:
        runs = compiled(program, *rest)
        return (lambda _: time.sleep(5)) if program.kind == "all-gather" else runs

    monkeypatch.setattr(CollectiveProgram, "compiled", hangs)
    found = crossshard.doctor(sizes=SMALL, timeout=3)
    assert (found.stuck, kinds(found)) == (True, ["stuck"])
    assert "The all-gather of 4.00 kB has not ended in 3 seconds" in found.findings[0].sentence
    assert [each.kind for each in found.tests] == KINDS[:2]


def test_a_collective_that_fails_is_named(monkeypatch: pytest.MonkeyPatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: no route\nmore")

    monkeypatch.setattr(self_test, "_tested", fails)
    (finding,) = crossshard.doctor(sizes=SMALL).findings
    assert finding.sentence == "The all-reduce of 4.00 kB failed: UNAVAILABLE: no route"


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"sizes": 4_000}, ArgumentTypeError, "sizes must be a sequence of bytes"),
        ({"sizes": ("4 MB",)}, ArgumentTypeError, "sizes must be a number; got '4 MB'"),
        ({"timeout": 0}, ArgumentError, "timeout must be above 0; got 0"),
    ],
)
def test_refusals_and_no_self_test_at_all(options, error, said, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(self_test, "run", None)
    with pytest.raises(error, match=said):
        crossshard.doctor(**options)
    assert crossshard.doctor(self_test=False).tests == ()


def test_a_coordinator_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: str) -> None:
        raise RuntimeError("UNAVAILABLE")

    monkeypatch.setattr(deadline._jax, "processes_of_job", lambda: (2, 1))
    monkeypatch.setattr(deadline._jax, "tell_again", fail)
    assert deadline.late("The all-reduce", 3, 5.0) == (
        "The all-reduce has not ended in 5 seconds, and the coordinator does not answer. See what "
        "process 0 does."
    )
