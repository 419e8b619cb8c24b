"""The bytes of each way to send less, read from programs compiled for CPUs, TPUs and GPUs.

`python -m benchmarks.wires cpu:8` compiles for devices that are here, `v5e:2x4` needs
`crossshard[tpu]` and `h100:1x8` needs `jax[cuda12]`, without either device. Rows of topologies that
are not named stay as they are on the page.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import crossshard
from benchmarks import age, markdown
from crossshard.tools import topology

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
RECORD, PAGE = FOLDER / "wires.json", FOLDER / "wires.md"
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
    devices = topology(name)
    mesh = devices.mesh({"shards": devices.size})
    rows = jax.ShapeDtypeStruct((8 * devices.size, _WIDTH), jnp.float32)
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


def page(record: dict[str, dict[str, float]]) -> str:
    """The page of what is recorded."""
    names = list(record)
    rows = [[way, *(f"{record[n][way] / record[n]['float32']:.5f}" for n in names)] for way in WAYS]
    size = sum(x.size for x in PARAMS.values())
    return "\n\n".join(
        [
            "# Bytes of each wire",
            f"What a device sends in a step, beside a plain sum in float32: {size:,} parameters, "
            f"whole on every shard. The bytes are read from programs that are compiled for eight "
            f"devices of each kind, with the scales of blocks; no TPU or GPU ran. What is sent in "
            f"one step of H is divided over H steps.",
            markdown.table(["how", *names], rows),
            "The scales are 2 bytes for 128 numbers of 8 bits, or for 64 of 4. Biases, which do "
            "not fill a block on each shard, are sent in float32. A streamed piece has whole "
            "rows, of which the last may be sent for nothing. See [few "
            "bits](../guide/few-bits.md), [synchronise rarely](../guide/sync-rarely.md) and [the "
            "same bits](../guide/same-bits.md).",
            "To repeat: `python -m benchmarks.wires cpu:8`; for a TPU or a GPU with its compiler "
            "installed, as the module says.\n",
        ]
    )


def main() -> None:
    """Compile for the topologies that are named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topologies", nargs="+", help="such as cpu:8, v5e:2x4 or h100:1x8")
    given = parser.parse_args().topologies
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name in given:
        record[name] = bytes_of(name)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    age.write(PAGE, page(record), rows_stay=not record.keys() <= {*given})


if __name__ == "__main__":
    main()
