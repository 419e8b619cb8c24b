"""Where the sum between workers is in a step: read from programs for TPU slices and GPU hosts.

`python -m benchmarks.streaming v5e:2x2` needs `crossshard[tpu]` and compiles for four slices, and
`h100:4x8` needs `jax[cuda12]`; neither device is needed. A slice, or a host, is a worker. Rows of
what is not named stay as they are on the page. `--network 1` plans with so many Gb/s between hosts.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh

import crossshard
from benchmarks import age, markdown
from crossshard.tools import topology

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
RECORD, PAGE = FOLDER / "streaming.json", FOLDER / "streaming.md"
WORKERS, EVERY, LAYERS, WIDTH, ROWS = 4, 20, 6, 2048, 4096
PARAMS = {
    f"layer{number}": {
        "up": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32),
        "down": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32),
    }
    for number in range(LAYERS)
}
STREAMING = {"sync_every": EVERY, "sync_streaming": True}
WAYS: dict[str, dict[str, Any]] = {
    f"H = {EVERY}": {"sync_every": EVERY},
    f"H = {EVERY}, streaming": STREAMING,
    f"H = {EVERY}, streaming, int8": STREAMING | {"outer_reduce_dtype": "int8"},
}


def _loss(params: Any, x: jax.Array) -> jax.Array:
    for layer in params.values():
        up, down = (layer[name].astype(jnp.bfloat16) for name in ("up", "down"))
        x = x + jnp.tanh(x @ up) @ down
    return (x.astype(jnp.float32) ** 2).mean()


def mesh_of(name: str) -> Mesh:
    """One axis over the devices of four slices of a TPU, or of four hosts."""
    if not name.startswith("v"):
        devices = topology(name)
        return devices.mesh({"shards": devices.size})
    # For the settings with which a TPU is described where there is none.
    topology(name)
    slices: Any = topologies.get_topology_desc(
        platform="tpu", topology_name=name, num_slices=WORKERS
    ).devices
    found = sorted(slices, key=lambda device: (device.slice_index, device.id))
    return Mesh(np.array(found), ("shards",))


def look(name: str) -> dict[str, dict[str, float]]:
    """What goes between the workers of a topology in each way, and what hides it."""
    mesh, found = mesh_of(name), {}
    size = mesh.size // WORKERS
    groups = np.arange(mesh.size).reshape(WORKERS, size).tolist()
    rows = jax.ShapeDtypeStruct((ROWS * mesh.size, WIDTH), jnp.bfloat16)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    for way, options in WAYS.items():
        optimizer = crossshard.CrossShardOptimizer(optax.adamw(1e-3), group_assignment=groups)
        step = crossshard.make_train_step(
            _loss, optimizer, mesh=mesh, outer_optimizer=outer, **options
        )
        report = crossshard.inspect(step.lower(step.abstract_init(PARAMS), rows), PARAMS)
        between = [
            each
            for each in report.counted
            if any(len({device // size for device in group}) > 1 for group in each.groups)
        ]
        total = sum(each.bytes_sent for each in between)
        seldom = sum(each.bytes_sent for each in between if each.in_branch)
        behind = {
            what: sum(each.bytes_sent for each in between if each.behind == what)
            for what in ("matrix products", "other kernels", "nothing")
        }
        found[way] = {
            "mean": total - seldom + seldom / EVERY,
            "most": total,
            **{what: sent / total for what, sent in behind.items()},
            # How many are scheduled beside a byte, on average.
            "products": sum(each.bytes_sent * each.matrix_products for each in between) / total,
        }
        print(name, way, found[way], flush=True)
    return found


def page(record: dict[str, dict[str, dict[str, float]]]) -> str:
    """The page of what is recorded."""
    head = (
        *("compiled for", "the workers become one"),
        *("MB in a step, on average", "at most"),
        *("behind matrix products", "behind other kernels", "behind nothing"),
        "matrix products beside a byte",
    )
    rows = [
        (
            name,
            way,
            f"{found['mean'] / 1e6:,.1f}",
            f"{found['most'] / 1e6:,.1f}",
            *(f"{found[what]:.0%}" for what in ("matrix products", "other kernels", "nothing")),
            f"{found['products']:.1f}",
        )
        for name, ways in record.items()
        for way, found in ways.items()
    ]
    return "\n\n".join(
        [
            "# The sum between workers, beside the step",
            f"What a device sends to other workers, and what is scheduled meanwhile: read from "
            f"compiled programs of a step with {LAYERS} layers of {WIDTH} × {4 * WIDTH}, AdamW, "
            f"and {ROWS:,} rows for each device; no TPU or GPU ran. Each of {WORKERS} slices of a "
            f"TPU, or hosts, is a worker, and Nesterov's momentum updates what they have in common "
            f"([streaming](../guide/sync-rarely.md#streaming-no-step-waits)).",
            markdown.table(head, rows, names=(0, 1)),
            "Between slices XLA sends a sum as a reduce-scatter, from before the first matrix "
            "product until into the backward pass, and as an all-gather from there to the end. "
            "Together they have the whole step beside them, and each byte a half of it. In int8 it "
            "sends both later, one of them beside other kernels. Without streaming the sum is in a "
            "conditional, and nothing of the step is beside it.",
            "For GPUs XLA starts a collective as late as its model of the network allows. By "
            "default that is InfiniBand, for which a few of the last kernels do; the rows at 1 "
            "Gb/s are planned for a slower network, with the flag that the guide names.",
            "To repeat: `python -m benchmarks.streaming v5e:2x2`, and `h100:4x8` with and without "
            "`--network 1`, with the compilers that the module names.\n",
        ]
    )


def main() -> None:
    """Compile for what is named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help="a slice of a TPU, such as v5e:2x2, or h100:4x8")
    parser.add_argument("--network", type=int, help="Gb/s between GPU hosts, for XLA's scheduler")
    given = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    measured = set[str]()
    for name in given.names:
        label = f"{WORKERS} × {name}" if name.startswith("v") else name
        if given.network is not None:
            flag = "--xla_gpu_analytical_latency_estimator_options"
            os.environ["XLA_FLAGS"] = f"{flag}=nic_speed_gbps={given.network}"
            label += f", {given.network} Gb/s"
        record[label] = look(name)
        measured.add(label)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    age.write(PAGE, page(record), rows_stay=not record.keys() <= measured)


if __name__ == "__main__":
    main()
