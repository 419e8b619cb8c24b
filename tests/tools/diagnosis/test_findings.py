"""What looks wrong, one situation at a time; what this machine lacks is put in its place."""

import os
import socket
import types
from pathlib import Path

import jax
import pytest

import crossshard
from crossshard.tools.diagnosis import machine, processes, settings, versions
from crossshard.tools.diagnosis.report import Devices, Finding

GPUS = Devices("gpu", "NVIDIA H100 80GB HBM3", 8, 8, 1, 0, 85 * 10**9)
TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:"
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
)
CPUS = Devices("cpu", "cpu", 4, 2, 2, 0, None)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No settings but those of the test."""
    jax.devices()  # with the suite's own
    for name in os.environ:
        if name.startswith(("JAX_", "XLA_", "SLURM", "OMPI", "PMI", "GLIBC")) or "proxy" in name:
            monkeypatch.delenv(name)
    return monkeypatch


def sentences(found: object) -> str:
    return "\n".join(f"{each.kind}: {each.sentence}" for each in found)


# Versions.

FINE = {"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8", "libtpu": "0.0.51"}


OTHERS = [
    ({"jaxlib": "0.10.1"}, 'pip install "jax==0.10.2" "jaxlib==0.10.2"'),
    ({"jax-cuda12-plugin": "0.10.1"}, 'pip install "jax[cuda12]==0.10.2"'),
    ({"flax": "0.14.0"}, "flax is 0.14.0, and crossshard supports <0.13,>=0.12.8"),
    ({"jax": "0.9.1", "jaxlib": "0.9.1"}, "jax is 0.9.1, and crossshard supports"),
]


def test_versions():
    assert not list(versions.findings(FINE))
    for other, says in OTHERS:
        assert says in sentences(versions.findings(FINE | other))
    found = versions.installed()
    assert (found["jax"], found["crossshard"]) == (jax.__version__, crossshard.__version__)
    assert not list(versions.findings(found))


# Devices.


@pytest.mark.parametrize(
    ("environment", "has_plugin", "says"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True, "JAX_PLATFORMS=cpu. Unset it"),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, "CUDA_VISIBLE_DEVICES='' hides it"),
        ({}, False, f'the plugin is missing. pip install "jax[cuda12]=={jax.__version__}"'),
        ({}, True, "JAX_PLATFORMS=cuda crossshard doctor says why"),
    ],
)
def test_a_gpu_that_is_not_used(
    environment: dict[str, str],
    has_plugin: bool,
    says: str,
    plain: pytest.MonkeyPatch,
    tmp_path: Path,
):
    plain.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plain.setattr(machine, "_DEV", tmp_path)
    plain.setattr(machine, "_has", lambda name: has_plugin)
    for name, value in environment.items():
        plain.setenv(name, value)
    assert not list(machine._of_unused_accelerators())
    (tmp_path / "nvidiactl").touch()
    assert not list(machine._of_unused_accelerators())
    (tmp_path / "nvidia0").touch()
    assert says in sentences(machine._of_unused_accelerators())
    # Who asks for virtual CPU devices does not want the GPU.
    plain.setenv("JAX_NUM_CPU_DEVICES", "8")
    assert not list(machine._of_unused_accelerators())


def test_virtual_devices_that_jax_has_not_made(plain: pytest.MonkeyPatch):
    eight = machine.look()
    assert not list(settings.findings_about_devices(eight))
    plain.setenv("JAX_NUM_CPU_DEVICES", "4")
    assert "JAX_NUM_CPU_DEVICES says 4 virtual CPU devices, but JAX has made 8" in sentences(
        settings.findings_about_devices(eight)
    )
    assert "JAX uses gpu" in sentences(settings.findings_about_devices(GPUS))
    plain.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert "Set one of the two" in sentences(settings.findings_about_devices(eight))
    plain.setenv("JAX_NUM_CPU_DEVICES", "8")
    assert not list(settings.findings_about_devices(eight))


def test_threads_that_deadlock(plain: pytest.MonkeyPatch):
    eight = machine.look()
    assert not list(machine.findings(eight))
    plain.setenv("NPROC", "4")
    assert "set NPROC=32" in sentences(machine.findings(eight))
    # Again, though the mesh is there already.
    assert "set NPROC=32" in sentences(machine.findings(eight))


def device(kind: str, process: int) -> object:
    return types.SimpleNamespace(device_kind=kind, process_index=process)


def test_devices_of_several_kinds_and_uneven_processes():
    alike = [device("A", 0), device("A", 0), device("A", 1), device("A", 1)]
    assert not list(machine._of_kinds(alike))
    assert "of several kinds, A, B" in sentences(machine._of_kinds([*alike, device("B", 0)]))
    assert "Process 1 has 1 devices and another has 2" in sentences(machine._of_kinds(alike[:3]))


def test_little_shared_memory_for_gpus(plain: pytest.MonkeyPatch):
    of = lambda size: types.SimpleNamespace(f_blocks=size // 4096, f_frsize=4096)
    plain.setattr(os.path, "isdir", lambda path: True)
    plain.setattr(os, "statvfs", lambda path: of(64 * 2**20))
    assert "/dev/shm has 64 MiB" in sentences(machine._of_shared_memory(GPUS))
    plain.setattr(os, "statvfs", lambda path: of(2**33))
    assert not list(machine._of_shared_memory(GPUS))


# Settings.


def test_what_has_a_price(plain: pytest.MonkeyPatch):
    assert not list(settings.notes(GPUS))
    plain.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    plain.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert [each.kind for each in settings.notes(GPUS)] == ["preallocate", "allocator"]
    assert not list(settings.notes(machine.look()))
    with jax.enable_x64(True):
        (note,) = settings.notes(None)
    assert note.sentence.startswith("jax_enable_x64=True: arrays are float64")


def test_processes_on_cpus_want_large_pages(plain: pytest.MonkeyPatch):
    plain.setattr(settings.sys, "platform", "linux")
    assert f"Set GLIBC_TUNABLES={TUNABLES} before" in sentences(settings.notes(CPUS))
    plain.setenv("GLIBC_TUNABLES", TUNABLES)
    assert not list(settings.notes(CPUS))


# The job.

JOB = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
ELSEWHERE = JOB | {"JAX_COORDINATOR_ADDRESS": "10.1.2.3:1234"}


def found_in(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return processes.described_job(5)[1]


RIGHT = [
    *({}, JOB, ELSEWHERE, {"WORLD_SIZE": "1"}),
    # Proxies that are not asked: gRPC reads small letters only.
    ELSEWHERE | {"https_proxy": "http://p:1", "no_proxy": "example.org, 10.1.2.3"},
    ELSEWHERE | {"HTTPS_PROXY": "http://p:1"},
]


@pytest.mark.parametrize("environment", RIGHT)
def test_jobs_that_are_right(environment: dict[str, str], plain: pytest.MonkeyPatch):
    assert not found_in(environment, plain)


@pytest.mark.parametrize(
    ("environment", "kind", "says"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "job", "JAX_NUM_PROCESSES is set, but JAX_COORDINATOR"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "job", "Set all three, or none"),
        ({"WORLD_SIZE": "4"}, "job", "WORLD_SIZE=4 says that there are several processes"),
        (JOB | {"JAX_PROCESS_ID": "two"}, "job", "JAX_PROCESS_ID must be a number from 0"),
        (JOB | {"JAX_PROCESS_ID": "2"}, "job", "is not below JAX_NUM_PROCESSES=2"),
        (JOB | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "job", "must be host:port"),
        (JOB | {"SLURM_STEP_NUM_TASKS": "8"}, "job", "Slurm has started 8 processes"),
        (JOB | {"PMI_SIZE": "4"}, "job", "Set JAX_NUM_PROCESSES=4"),
        (JOB | {"SLURM_STEP_NUM_NODES": "2"}, "address", "no process on another host reaches"),
        (JOB | {"JAX_COORDINATOR_ADDRESS": "no-such-host.invalid:9"}, "address", "as 10.0.0.1:9"),
        (ELSEWHERE | {"http_proxy": "http://p:1"}, "proxy", "set no_proxy=10.1.2.3"),
        (JOB | {"https_proxy": "http://p:1"}, "proxy", "https_proxy is set"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_jobs_that_are_wrong(
    environment: dict[str, str], kind: str, says: str, plain: pytest.MonkeyPatch
):
    (finding,) = found_in(environment, plain)
    assert finding.kind == kind
    assert says in finding.sentence


def test_a_cluster_whose_own_service_fails(plain: pytest.MonkeyPatch):
    def refuse(seconds: float) -> None:
        raise RuntimeError("403 Forbidden\nfor this account")

    plain.setattr(processes, "find_job", refuse)
    job, found = processes.described_job(5)
    assert job.num_processes == 1
    assert sentences(found) == (
        "job: JAX cannot tell the job: 403 Forbidden. Set JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID."
    )


def test_a_host_whose_name_is_a_loopback_address_here(plain: pytest.MonkeyPatch):
    # As Debian writes it into /etc/hosts.
    address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    plain.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [address])
    (finding,) = found_in(JOB | {"JAX_COORDINATOR_ADDRESS": "node7:1234"}, plain)
    assert "node7 is a loopback address here (127.0.1.1)" in finding.sentence
    # One host is enough for all of them.
    assert not found_in({"SLURM_STEP_NUM_NODES": "1"}, plain)


def test_a_job_that_is_described_and_not_joined(plain: pytest.MonkeyPatch):
    for name, value in JOB.items():
        plain.setenv(name, value)
    found = crossshard.doctor(self_test=False)
    assert [each.kind for each in found.findings] == ["alone"]
    assert "Call crossshard.distributed.initialize()" in found.findings[0].sentence
    assert "2, from environment variables; this is 1, not connected, at 127.0.0.1:1234" in str(
        found
    )
