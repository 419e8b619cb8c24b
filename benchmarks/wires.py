"""The bytes of each way to send less, read from programs compiled for CPUs, TPUs and GPUs.

`python -m benchmarks.wires cpu:8` compiles for devices that are here, `v5e:2x4` needs
`crossshard[tpu]` and `h100:1x8` needs `jax[cuda12]`, without either device. Rows of topologies that
are not named stay as they are on the page.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import crossshard
from benchmarks import age, gpus, markdown

RECORD, PAGE = (markdown.PAGES / f"wires.{kind}" for kind in ("json", "md"))
_WIDTH = 1024
PARAMS = {
    "up": jax.ShapeDtypeStruct((_WIDTH, 2 * _WIDTH), jnp.float32),
    "bias": jax.ShapeDtypeStruct((2 * _WIDTH,), jnp.float32),
    "down": jax.ShapeDtypeStruct((2 * _WIDTH, _WIDTH), jnp.float32),
}
# How gradients are sent, and in one of how many steps.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "float32": (1, {}),
    "bfloat16": (1, {"reduce_dtype": "bfloat16"}),
    "int8": (1, {"reduce_dtype": "int8"}),
    "float8_e4m3fn": (1, {"reduce_dtype": "float8_e4m3fn"}),
    "int4": (1, {"reduce_dtype": "int4"}),
    "H = 30": (30, {"sync_every": 30}),
    "H = 30, int4": (30, {"sync_every": 30, "outer_reduce_dtype": "int4"}),
    "H = 30, streaming": (30, {"sync_every": 30, "sync_streaming": True}),
    "H = 30, streaming, int4": (
        30,
        {"sync_every": 30, "sync_streaming": True, "outer_reduce_dtype": "int4"},
    ),
    "virtual shards": (1, {"virtual_shards": 8}),
}


def _loss(params: Any, x: jax.Array) -> jax.Array:
    return ((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]) ** 2).mean()


def bytes_of(name: str) -> dict[str, float]:
    """What a device of a topology sends in a step, on average, in each way."""
    mesh = gpus.mesh_of(name)
    rows = jax.ShapeDtypeStruct((8 * mesh.size, _WIDTH), jnp.float32)
    found = {}
    for way, (every, options) in WAYS.items():
        step = crossshard.make_train_step(
            _loss, optax.sgd(0.1), mesh=mesh, weight_update="replicated", **options
        )
        report = crossshard.inspect(step.lower(step.abstract_init(PARAMS), rows), PARAMS)
        seldom = report.bytes_in_branches
        found[way] = report.bytes_sent - seldom + seldom / every
        print(f"{name:10} {way:16} {found[way]:14,.0f} {found[way] / found['float32']:.5f}")
    return found


def table(record: dict[str, dict[str, float]]) -> str:
    """The table of what is recorded."""
    names = list(record)
    rows = [[way, *(f"{record[n][way] / record[n]['float32']:.5f}" for n in names)] for way in WAYS]
    return markdown.table(["how", *names], rows)


def main(topologies: tyro.conf.Positional[tuple[str, ...]]) -> None:
    """Compile for topologies, and write the page.

    Args:
      topologies: such as cpu:8, v5e:2x4 or h100:1x8.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name in topologies:
        record[name] = bytes_of(name)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = markdown.again("wires", [table(record)])
    age.write(PAGE, page, rows_stay=not record.keys() <= {*topologies})


if __name__ == "__main__":
    markdown.command(main)
