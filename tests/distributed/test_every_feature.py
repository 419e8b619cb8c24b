"""Every feature over 1, 2 and 4 processes of 1, 2 and 4 devices: as in one process of as many."""

import functools
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.backend import get_backend

import crossshard
from crossshard.tools.inspection.collectives import KINDS
from tests.distributed.features import FEATURES, Job
from tests.processes import join, run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.deep]

SHAPE = (2, 2)
# The other shapes of 1, 2 and 4 processes of 1, 2 and 4 devices, 16 in one process among them.
FURTHER = [(4, 1), (1, 1), (1, 2), (1, 4), (2, 1), (2, 4), (4, 2), (4, 4)]


def run(job: Job, out: Path) -> dict[str, str]:
    """Run all features in turn; write their arrays, and return what went wrong."""
    arrays, failures = {}, {}
    warnings.simplefilter("ignore", crossshard.errors.DivergenceWarning)
    kinds = collectives_of_all_programs() if job.processes > 1 else set[str]()
    for name, function in FEATURES.items():
        # So that a job which waits for ever says in what.
        print(name, file=sys.stderr, flush=True)
        try:
            for path, leaf in jax.tree_util.tree_leaves_with_path(function(job)):
                if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                    leaf = jax.random.key_data(leaf)
                # What is there once per shard is not compared, since no process has all of it.
                if getattr(leaf, "is_fully_addressable", True) or leaf.is_fully_replicated:
                    arrays[name + jax.tree_util.keystr(path)] = np.asarray(leaf)
        except Exception:
            failures[name] = traceback.format_exc()
    np.savez(out.with_suffix(".npz"), collectives=sorted(kinds), **arrays)
    return failures


def collectives_of_all_programs() -> set[str]:
    """The kinds of collectives in what this process will compile; grows with every program."""
    kinds: set[str] = set()
    seen: list[Any] = []

    def look(event: str, _: float, **__: Any) -> None:
        if "backend_compile" not in event:
            return
        # Kept, since a program may be gone when its feature is.
        new = [each for each in get_backend().live_executables() if each not in seen]
        seen.extend(new)
        text = "\n".join(module.to_string() for each in new for module in each.hlo_modules())
        kinds.update(kind for kind in KINDS if f" {kind}(" in text)

    jax.monitoring.register_event_duration_secs_listener(look)
    return kinds


def main(process: int, port: int, out: str, processes: str, devices: str) -> None:
    """One process of the job."""
    join(process, port, int(processes), int(devices))
    job = Job(Path(out).parent, int(processes), int(devices), process)
    Path(out).write_text(json.dumps(run(job, Path(out))))
    if job.processes > 1:
        jax.distributed.shutdown()


def read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return dict(found)


@pytest.fixture(scope="module")
def in_processes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a job of a shape found: in each process its failures and its arrays."""

    @functools.cache
    def started(processes: int, devices: int) -> Any:
        folder = tmp_path_factory.mktemp(f"{processes}x{devices}")
        words = "distributed.test_every_feature", folder, processes, devices
        try:
            told = run_processes(*words, processes=processes, patience=1200)
        except AssertionError as error:
            return error  # so that it is not started again for the next feature
        return [(told[k], read(folder / f"{k}.npz")) for k in range(processes)]

    def found(processes: int, devices: int) -> list[tuple[dict[str, str], dict[str, Any]]]:
        result = started(processes, devices)
        if isinstance(result, Exception):
            raise result
        return result

    return found


@pytest.fixture(scope="module")
def in_one(tmp_path_factory: pytest.TempPathFactory, in_processes: Any) -> Any:
    """What one process with as many devices found."""

    @functools.cache
    def found(shards: int) -> dict[str, np.ndarray]:
        if shards > len(jax.devices()):
            ((failures, arrays),) = in_processes(1, shards)
        else:
            folder = tmp_path_factory.mktemp("one")
            failures = run(Job(folder, 1, shards, 0), folder / "found")
            arrays = read(folder / "found.npz")
        assert not failures, failures
        return arrays

    return found


def check(name: str, processes: int, devices: int, in_processes: Any, in_one: Any) -> None:
    expected = {
        key: value
        for key, value in in_one(processes * devices).items()
        if key.startswith((f"{name}[", f"{name}."))
    }
    for failures, arrays in in_processes(processes, devices):
        assert name not in failures, failures[name]
        compared = expected.keys() & arrays.keys()
        assert compared
        for key in compared:
            exact = not np.issubdtype(expected[key].dtype, np.floating)
            limit = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 1e-6}
            np.testing.assert_allclose(arrays[key], expected[key], **limit, err_msg=key)


def test_processes_on_cpus_reduce_without_gloos_reduce_scatter(in_processes: Any):
    for _, arrays in in_processes(*SHAPE):
        found = set(arrays["collectives"])
        assert {"all-to-all", "all-gather", "all-reduce"} <= found
        assert "reduce-scatter" not in found


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature(name: str, in_processes: Any, in_one: Any):
    check(name, *SHAPE, in_processes, in_one)


@pytest.mark.soak
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(("processes", "devices"), FURTHER)
def test_a_feature_in_a_job_of_another_shape(
    name: str, processes: int, devices: int, in_processes: Any, in_one: Any, soak_steps: int
):
    shapes = FURTHER[: soak_steps // 2000]
    if (processes, devices) not in shapes:
        pytest.skip(f"{len(shapes)} of {len(FURTHER)} shapes for {soak_steps} steps")
    check(name, processes, devices, in_processes, in_one)
