"""Starts real processes of a job, with `crossshard launch` or without, and a script for them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from crossshard.distributed.job import listen
from crossshard.tools.cli import main

# For a machine on which everything else happens, too.
PATIENCE = 240
STALL_SECONDS = 3

# Of one of the processes, the second argument is run before its sixth step.
TRAIN = f"""
import os, signal, sys, threading, time
import crossshard

job = crossshard.distributed.initialize(stall_timeout={STALL_SECONDS})

import jax.numpy as jnp, numpy as np, optax

step = crossshard.make_train_step(lambda w, x: jnp.mean((x @ w - 1) ** 2), optax.sgd(0.1))
state = step.init(np.zeros(3, np.float32))
for number in range(1, 1_000_000):
    if number == 6 and job.process_id == int(sys.argv[1]):
        print("now", flush=True)
        exec(sys.argv[2])
    state, metrics = step(state, np.ones((2, 3), np.float32))
    float(metrics["loss"])
"""


def launch(*arguments: object) -> subprocess.Popen[str]:
    """Run the command as a process, whose output is in pipes."""
    # Without PYTHONUNBUFFERED, as on most machines.
    ours = ("XLA_FLAGS", "NPROC", "PYTHONUNBUFFERED")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    words = [sys.executable, "-m", "crossshard.tools.cli", "launch", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environment, **pipes)


def launched(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command in this process, which is to get no signal: its code and what it wrote."""
    return main(["launch", *map(str, arguments)]), *capfd.readouterr()


def python(text: str) -> list[str]:
    """Return a command that runs this text."""
    return ["--", sys.executable, "-c", text]


def wait_until_ready(ran: subprocess.Popen[str], number: int = 2) -> None:
    """Wait until so many processes have said it."""
    for _ in range(number):
        assert ran.stdout.readline().endswith("ready\n")


@contextlib.contextmanager
def started(
    who: int, fault: str, script: str = TRAIN, number: int = 3
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of a job without the launcher, which would end them itself."""
    ours = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    port = listen("127.0.0.1", 0)
    running: list[subprocess.Popen[str]] = []
    try:
        for own in range(number):
            environment = {
                **ours,
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(number),
                "JAX_PROCESS_ID": str(own),
                "JAX_NUM_CPU_DEVICES": "1",
            }
            words = [sys.executable, "-c", script, str(who), fault]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            running.append(subprocess.Popen(words, env=environment, **pipes))
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()
