"""A run with a place for a fault at each of its stages: initialize, init, restore, steps, saves."""

import ctypes
import importlib
import os
import signal
import sys
import time

import jax.numpy as jnp
import numpy as np
import optax

import crossshard
from crossshard.checkpoints import Checkpoints, storage

OWN = int(os.environ["JAX_PROCESS_ID"])
WHO, STAGE, FAULT, FOLDER, STALL, TIMEOUT = sys.argv[1:]


def at(stage: str) -> None:
    """Fail here, if this is the process and the stage."""
    if (OWN, stage) == (int(WHO), STAGE):
        print("now", flush=True)
        exec(FAULT, globals())


def before(module: str, name: str, stage: str) -> None:
    """Let this be a stage: where a function is called."""
    found = importlib.import_module(module)
    function = getattr(found, name)

    def staged(*args, **named):
        at(stage)
        return function(*args, **named)

    setattr(found, name, staged)


def other_rows() -> None:
    """Take a step with other rows than the other process."""
    step(state, np.ones((4, 4096), np.float32))


def stand_still() -> None:
    """Sleep, as a process does that waits for what does not come."""
    time.sleep(600)


def hold_python() -> None:
    """Stand still with the lock that every other thread of this process needs."""
    ctypes.PyDLL(None).sleep(600)


signal.signal(signal.SIGINT, signal.default_int_handler)
at("before initialize")
job = crossshard.distributed.initialize(timeout=float(TIMEOUT), stall_timeout=float(STALL))
at("after initialize")

before("crossshard.step.state", "check_key", "in init")
before("crossshard.checkpoints.checkpoints", "read_state", "in restore")
before("crossshard.checkpoints.checkpoints", "check_devices", "in save")
before("crossshard.checkpoints.storage", "start", "at the write")
before("crossshard.step.state", "with_options_of", "in reshard")
write_notes = storage._NotesHandler.async_save


async def async_save(self, directory, args):
    """Write in the background, where a fault may come."""

    async def write() -> None:
        at(f"in write {int(directory.parent.name.partition('.')[0])}")

    found = storage.future.CommitFutureAwaitingContractedSignals(write(), name="a fault")
    return [found, *await write_notes(self, directory, args)]


storage._NotesHandler.async_save = async_save


def loss_fn(w, x):
    """The loss; it is traced in the first step."""
    at("in the trace")
    return jnp.mean((x @ w - 1) ** 2)


rate, rows = 0.1, np.ones((2, 4096), np.float32)
at("before make_train_step")
step = crossshard.make_train_step(loss_fn, optax.adam(rate), weight_update="sharded")
at("before init")
state = step.init(np.zeros(4096, np.float32))
try:
    with Checkpoints(FOLDER, step) as checkpoints:
        at("before restore")
        checkpoints.restore_latest(state)
        for number in range(1, 7):
            at(f"before step {number}")
            state, metrics = step(state, rows)
            at(f"in step {number}")
            float(metrics["loss"])
            if number % 2 == 0:
                at(f"before save {number}")
                checkpoints.save(state, number)
                at(f"after save {number}")
        checkpoints.wait()
        state, _ = checkpoints.restore_latest(state)
    at("before unshard")
    whole = step.unshard(state)
    at("before reshard")
    state = step.reshard(whole)
    at("before evaluate")
    step.evaluate(state, [rows], lambda w, x: x @ w)
except crossshard.errors.CheckpointError:
    sys.exit(7)
at("the end")
