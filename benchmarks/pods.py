"""Communication of steps compiled for TPU pods, without TPUs: ours, a naive one, and GSPMD's.

Run it with libtpu installed, as `make bench-pods` does. `python -m benchmarks.pods v5e:4x4` prints
the second table's rows of some topologies.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh

import crossshard
from benchmarks import by_hand, gpus, markdown
from benchmarks.problem import adamw
from benchmarks.shapes import blocks

TOPOLOGIES = ("v5e:4x4", "v5e:16x16", "v6e:8x8", "v5p:4x4x4")
_ROWS = 8  # of the batch, for each shard


def _type(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# Matrices that divide and one that does not, an embedding, and vectors: 60 million parameters.
_WIDTH, _HIDDEN, _WORDS = 1024, 4096, 32000
PARAMS = {
    "layers": [
        {"up": _type(_WIDTH, _HIDDEN), "down": _type(_HIDDEN, _WIDTH), "scale": _type(_WIDTH)}
        for _ in range(3)
    ],
    "odd": _type(_WIDTH, 1001),
    "back": _type(1001, _WIDTH),
    "words": _type(_WORDS, _WIDTH),
    "bias": _type(_WORDS),
}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """A network with all of these in it."""
    hidden = batch
    for layer in params["layers"]:
        hidden += jnp.tanh((hidden * layer["scale"]) @ layer["up"]) @ layer["down"]
    hidden += jnp.tanh(hidden @ params["odd"]) @ params["back"]
    scores = hidden @ params["words"].T + params["bias"]
    return jax.nn.logsumexp(scores, axis=-1).mean() - scores[:, 0].mean()


def _lowered_ours(mesh: Mesh, optimizer: optax.GradientTransformation) -> Any:
    step = crossshard.make_train_step(loss_fn, optimizer, mesh=mesh, weight_update="sharded")
    return step.lower(step.abstract_init(PARAMS), _batch(mesh))


def _batch(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return _type(_ROWS * mesh.size, _WIDTH)


STEPS: dict[str, Callable[[Mesh], Any]] = {
    "ours, sharded: adamw, in slices": lambda mesh: _lowered_ours(mesh, adamw()),
    "ours, sharded: lamb, leaf by leaf": lambda mesh: _lowered_ours(mesh, optax.lamb(1e-3)),
    "by hand: flat psum_scatter, all_gather": lambda mesh: by_hand.sharded(
        mesh, PARAMS, loss_fn, _batch(mesh)
    ),
}


def rows() -> Iterator[list[str]]:
    """Compile every step for every topology."""
    for name in TOPOLOGIES:
        mesh = gpus.mesh_of(name)
        for step, lowered in STEPS.items():
            began = time.perf_counter()
            report = crossshard.inspect(lowered(mesh), parameters=PARAMS)
            seconds = time.perf_counter() - began
            yield [
                name,
                step,
                markdown.collectives(report),
                f"{report.bytes_sent / 1e6:.1f}",
                f"{report.ratio:.3f}",
                f"{seconds:.0f}",
            ]


HIDDEN_ON = ("v5e:4x4", "v5e:8x8", "v5e:16x16", "v6e:8x8", "v5p:2x2x4", "v5p:4x4x4")
MODELS = {
    "8 blocks in a scan, `jax.checkpoint`": blocks(8, scan=True, checkpoint=True),
    "4 blocks, unrolled": blocks(4),
}


HIDING = ("ours, params sharded", "ours, params sharded, guards", "GSPMD, FSDP", "GSPMD, ZeRO-1")


def hidden_rows(topologies: Iterable[str] = HIDDEN_ON) -> Iterator[list[str]]:
    """Compile the steps that gather parameters layer by layer, and read what hides."""
    for name in topologies:
        mesh = gpus.mesh_of(name)
        for title, model in MODELS.items():
            least = gpus.least(HIDING[0], mesh.size, model)
            for step in HIDING:
                report = crossshard.inspect(gpus.STEPS[step](mesh, model), model.params)
                assert report.memory is not None
                assert least is not None
                yield [
                    name,
                    title,
                    step,
                    markdown.collectives(report),
                    f"{report.bytes_sent / 1e9:.2f}",
                    f"{report.bytes_sent / least:.3f}",
                    f"{report.hidden_share or 0:.0%}",
                    f"{report.memory.temp / 1e9:.2f}",
                    f"{report.memory.peak / 1e9:.2f}",
                ]


_HEADS_OF_HIDDEN = (
    *("slice", "model", "step", "collectives", "GB sent by a chip", "÷ bound"),
    *("behind products", "GB temporary", "GB at the peak"),
)

_HEADS = ("slice", "step", "collectives", "MB sent by a chip", "÷ lower bound", "s to compile")


def main(
    topologies: tyro.conf.Positional[tuple[str, ...]] = (),
    out: Path = markdown.PAGES / "pods.md",
) -> None:
    """Compile steps for TPU pods, and write down what they send.

    Args:
      topologies: only print the second table's rows of these.
      out: the page to write.
    """
    if topologies:
        for each in hidden_rows(topologies):
            print("| " + " | ".join(each) + " |", flush=True)
        return
    print(" | ".join(_HEADS))
    found = []
    for row in rows():
        print(" | ".join(row), flush=True)
        found.append(row)
    tables = [
        markdown.table(_HEADS, found, names=range(3)),
        markdown.table(_HEADS_OF_HIDDEN, list(hidden_rows()), names=range(4)),
    ]
    # What was tried by hand stands below, and stays.
    markdown.publish("pods", tables, markdown.repeat("make bench-pods", "libtpu"), out)


if __name__ == "__main__":
    markdown.command(main)
