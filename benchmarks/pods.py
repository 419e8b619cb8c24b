"""Communication of steps compiled for TPU pods, without TPUs: ours and a naive one.

Run it with libtpu installed, as `make bench-pods` does.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import crossshard
from benchmarks import by_hand, markdown
from benchmarks.problem import adamw

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
    "ours, sharded: adamw, in parts": lambda mesh: _lowered_ours(mesh, adamw()),
    "ours, sharded: lamb, on global arrays": lambda mesh: _lowered_ours(mesh, optax.lamb(1e-3)),
    "by hand: flat psum_scatter, all_gather": lambda mesh: by_hand.sharded(
        mesh, PARAMS, loss_fn, _batch(mesh)
    ),
}


def rows() -> Iterator[list[str]]:
    """Compile every step for every topology."""
    for name in TOPOLOGIES:
        chips = crossshard.tools.topology(name)
        mesh = chips.mesh({by_hand.AXIS: chips.size})
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


_HEADS = ("slice", "step", "collectives", "MB sent by a chip", "÷ lower bound", "s to compile")


def main(out: Path = Path("docs/benchmarks/pods.md")) -> None:
    """Print the table and write it to a file."""
    print(" | ".join(_HEADS))
    found = []
    for row in rows():
        print(" | ".join(row), flush=True)
        found.append(row)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    lines = [
        "# TPU pods",
        f"A training step with {parameters:,} float32 parameters, compiled for TPU slices on a "
        f"machine without TPUs, and the bytes that each chip sends. The mesh has one axis over all "
        f"chips; crossshard splits it into rings. The lower bound is 2(N−1)/N · P. These are bytes "
        f"and not times: nothing here has run on a TPU.",
        markdown.table(_HEADS, found, names=range(3)),
        markdown.repeat("make bench-pods", "libtpu"),
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    # What was tried by hand stands below the table, and stays.
    before = out.read_text(encoding="utf-8") if out.exists() else ""
    _, heading, tried = before.partition("\n\n## ")
    out.write_text("\n\n".join(lines) + (heading + tried or "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
