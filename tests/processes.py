"""Starts the processes of a job on this machine, for tests, and returns what each of them found."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PROCESSES, DEVICES = 2, 2


def join(process: int, port: int, processes: int = PROCESSES, devices: int = DEVICES) -> None:
    """Make this interpreter one process of the job."""
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, processes, process, coordinator_bind_address=address)


def run_processes(
    module: str, folder: Path, *words: object, processes: int = PROCESSES, patience: int = 300
) -> list[Any]:
    """What the ``main`` of a test file wrote down, in each process of a job.

    Args:
      module: the file, such as ``"step.test_processes"``.
      folder: where each process ``k`` writes ``k.json``.
      *words: further arguments of ``main(process, port, out, …)``, which it gets as strings.
      processes: how many.
      patience: the seconds after which the job has failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = dict(os.environ)
    # How these tests compile, but not for how many devices: ``join`` says that.
    flags = [flag for flag in environment["XLA_FLAGS"].split() if "device_count" not in flag]
    environment["XLA_FLAGS"] = " ".join(flags)
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    environment["NPROC"] = "16"
    code = f"import sys; from tests.{module} import main; "
    code += "main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])"
    running = []
    for process in range(processes):
        given = [process, port, folder / f"{process}.json", *words]
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *map(str, given)],
                env=environment,
                # Files, and not pipes: one that is full would stop a process that others wait for.
                stderr=(folder / f"{process}.err").open("w"),
            )
        )
    try:
        for started in running:
            started.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        pass  # reported below, with what it said last
    finally:
        for started in running:
            started.kill()
            started.wait()
    for process, started in enumerate(running):
        assert started.returncode == 0, (folder / f"{process}.err").read_text()[-3000:]
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(processes)]
