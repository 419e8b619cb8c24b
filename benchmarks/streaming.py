"""Where the sum between workers is in a step: read from programs for TPU slices and GPU hosts.

`python -m benchmarks.streaming v5e:2x2` needs `crossshard[tpu]` and compiles for four slices, and
`h100:4x8` needs `jax[cuda12]`; neither device is needed. A slice, or a host, is a worker. Rows of
what is not named stay as they are on the page. `--network 1` plans with so many Gb/s between hosts.
"""

import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh

import crossshard
from benchmarks import age, gpus, markdown
from crossshard.tools import topology

RECORD, PAGE = (markdown.PAGES / f"streaming.{kind}" for kind in ("json", "md"))
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
        return gpus.mesh_of(name)
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
        between = markdown.between(report, size)
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


def table(record: dict[str, dict[str, dict[str, float]]]) -> str:
    """The table of what is recorded."""
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
    return markdown.table(head, rows, names=(0, 1))


def main(names: tyro.conf.Positional[tuple[str, ...]], network: int | None = None) -> None:
    """Compile for slices or hosts, and write the page.

    Args:
      names: a slice of a TPU, such as v5e:2x2, or h100:4x8.
      network: Gb/s between GPU hosts, for XLA's scheduler.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    measured = set[str]()
    for name in names:
        label = f"{WORKERS} × {name}" if name.startswith("v") else name
        if network is not None:
            flag = "--xla_gpu_analytical_latency_estimator_options"
            os.environ["XLA_FLAGS"] = f"{flag}=nic_speed_gbps={network}"
            label += f", {network} Gb/s"
        record[label] = look(name)
        measured.add(label)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = markdown.again("streaming", [table(record)])
    age.write(PAGE, page, rows_stay=not record.keys() <= measured)


if __name__ == "__main__":
    markdown.command(main)
