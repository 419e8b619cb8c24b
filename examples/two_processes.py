"""Two processes that train one model, as the hosts of a cluster do; here both run on this machine.

Each process gives its own part of the batch. A cluster runs `worker` once per host, where
`crossshard.distributed.initialize()` finds its arguments itself.
"""

import json
import os
import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax

import crossshard

PROCESSES, STEPS = 2, 40


def data():
    """256 rows of features, and a linear function of them."""
    x = np.random.default_rng(0).normal(size=(256, 3))
    return {"x": x, "y": x @ np.array([1, -2, 0.5]) + 3}


def loss_fn(params, batch):
    """The mean squared error on one shard's part of the batch."""
    return jnp.mean((batch["x"] @ params["kernel"] + params["bias"] - batch["y"]) ** 2)


def worker(address, optimizer, process):
    """One process: train on its part of each batch, and print the parameters at the end."""
    process = int(process)
    crossshard.cpu_devices(4)
    crossshard.distributed.initialize(address, PROCESSES, process)  # process 0 coordinates
    step = crossshard.make_train_step(loss_fn, getattr(optax, optimizer)(0.1))  # all 8 devices
    state = step.init({"kernel": np.zeros(3), "bias": np.zeros(1)})
    batch = {name: np.split(rows, PROCESSES)[process] for name, rows in data().items()}
    for _ in range(STEPS):
        state, metrics = step(state, batch)
    params = {name: np.asarray(array).tolist() for name, array in state.params.items()}
    print(json.dumps({"shards": step.mesh.size, "loss": float(metrics["loss"]), **params}))


def main(optimizer="adam"):
    """Start both processes, and return what each of them printed."""
    with socket.socket() as probe:  # any port that is free
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # two processes cannot share one GPU
    pipe = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    command = [sys.executable, __file__, address, optimizer]
    workers = [subprocess.Popen([*command, str(n)], **pipe) for n in range(PROCESSES)]
    try:
        printed = [each.communicate(timeout=300)[0] for each in workers]
    finally:
        for each in workers:
            each.kill()
    if any(each.returncode for each in workers):
        raise SystemExit("A process failed; its error is printed above.")
    results = [json.loads(text.splitlines()[-1]) for text in printed]
    for number, result in enumerate(results):
        print(f"process {number} of {PROCESSES}: {result}")
    print(f"both have the same loss and parameters: {results[0] == results[1]}")
    return results


if __name__ == "__main__":
    worker(*sys.argv[1:]) if len(sys.argv) > 1 else main()
