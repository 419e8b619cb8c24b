"""Processes: what says which processes train together, and where it contradicts itself."""

import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping

from crossshard import _jax
from crossshard.distributed.addresses import split_address
from crossshard.distributed.job import ADDRESS, NUMBER, OWN, Job, find_job
from crossshard.errors import ArgumentError
from crossshard.tools.diagnosis.deadline import LateError, within
from crossshard.tools.diagnosis.report import Finding

# What gRPC reads; in capitals it does not.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
# How many processes a launcher has started, as it says itself.
_STARTED = (
    ("SLURM_STEP_NUM_TASKS", "Slurm"),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI"),
    ("PMI_SIZE", "MPICH"),
    ("WORLD_SIZE", "torchrun"),
)


def described_job(seconds: float) -> tuple[Job, list[Finding]]:
    """The job that the environment describes, and what is wrong with the description.

    Args:
      seconds: how long a cluster's own service may take to answer.
    """
    try:
        job = within(seconds + 1, lambda: find_job(seconds))
    except LateError:
        why = f"The cluster's own service has not said in {seconds:g} seconds which processes"
        return Job(), [Finding("job", f"{why} train together. {_SET_THEM}")]
    except ArgumentError as error:
        return Job(), [Finding("job", str(error))]
    except Exception as error:  # whatever a cluster's detection raises
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return Job(), [
            Finding("job", f"JAX cannot tell the job: {first.rstrip('.'):.300}. {_SET_THEM}")
        ]
    return job, list(_findings(job, os.environ))


_SET_THEM = f"Set {ADDRESS}, {NUMBER} and {OWN}."


def not_connected(job: Job) -> Iterator[Finding]:
    """That several processes are described, and this one works alone."""
    if job.num_processes > 1 and not _jax.has_coordinator():
        yield Finding(
            "alone",
            f"{job.found_in} says that {job.num_processes} processes train together, but this one "
            f"has not met the others and trains alone. Call crossshard.distributed.initialize() "
            f"before the first JAX operation.",
        )


def _findings(job: Job, environ: Mapping[str, str]) -> Iterator[Finding]:
    if job.num_processes == 1 and environ.get(ADDRESS) and job.found_in == "nothing":
        yield Finding(
            "job",
            f"{ADDRESS} is set, but {NUMBER} and {OWN} are not, so this process works alone. Set "
            f"all three, or none.",
        )
    for name, launcher in _STARTED:
        number = environ.get(name, "")
        if number.isdecimal() and int(number) > 1 and int(number) != job.num_processes:
            yield Finding(
                "job",
                f"{launcher} has started {number} processes ({name}), but {job.found_in} says "
                f"{job.num_processes}. Set {NUMBER}={number}, or unset {NUMBER}, {OWN} and "
                f"{ADDRESS}.",
            )
    if not 0 <= job.process_id < job.num_processes:
        yield Finding(
            "job",
            f"{OWN}={job.process_id} is not below {NUMBER}={job.num_processes}: processes are "
            f"numbered from 0.",
        )
    if job.num_processes == 1 or job.coordinator_address is None:
        return
    try:
        host, port = split_address(job.coordinator_address)
    except ArgumentError as error:
        yield Finding("job", str(error))
        return
    yield from _of_proxies(host, environ)
    yield from _of_loopback(host, port, _hosts(environ))


def _of_proxies(host: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    name = next((each for each in _PROXIES if environ.get(each)), None)
    excepted = (environ.get("no_grpc_proxy") or environ.get("no_proxy") or "").split(",")
    is_excepted = any(each.strip() and host.endswith(each.strip()) for each in excepted)
    if name and not is_excepted:
        yield Finding(
            "proxy",
            f"{name} is set, so JAX asks a proxy for the coordinator at {host}, and aborts when "
            f"that does not answer. Unset it, or set no_proxy={host}.",
        )


def _of_loopback(host: str, port: int, hosts: int | None) -> Iterator[Finding]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        is_loopback = ipaddress.ip_address(str(found[0][4][0])).is_loopback
    except (OSError, ValueError):
        yield Finding(
            "address",
            f"The coordinator's host {host!r:.100} is not known here. Set {ADDRESS} to an address "
            f"of process 0's host, as 10.0.0.1:{port}.",
        )
        return
    is_meant = host == "localhost" or re.fullmatch(r"127\.[\d.]+|::1", host) is not None
    if is_loopback and (hosts is None or hosts > 1) and not (is_meant and hosts is None):
        where = f"{hosts} hosts" if hosts else "more than one host"
        yield Finding(
            "address",
            f"The coordinator's host {host} is a loopback address here ({found[0][4][0]}), which "
            f"no process on another host reaches, if there is {where}. Set {ADDRESS} to the "
            f"address of an interface of process 0's host, as 10.0.0.1:{port}.",
        )


def _hosts(environ: Mapping[str, str]) -> int | None:
    """How many hosts there are, as far as a launcher says."""
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    if nodes.isdecimal():
        return int(nodes)
    total, here = (environ.get(f"OMPI_COMM_WORLD_{each}", "") for each in ("SIZE", "LOCAL_SIZE"))
    if total.isdecimal() and here.isdecimal() and int(here) > 0:
        return -(-int(total) // int(here))
    return None
