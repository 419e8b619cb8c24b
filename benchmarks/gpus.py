"""Steps compiled for clusters of H100s, without GPUs: what they send, and what hides it.

Run it as `make bench-gpus` does, which builds an environment with JAX for CUDA.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

import crossshard
from benchmarks import by_hand, markdown
from benchmarks.problem import adamw
from benchmarks.shapes import Shapes, mlp, transformer

HOSTS = (1, 4, 32, 128)
_GPUS_OF_A_HOST = 8


def _models() -> dict[str, Shapes]:
    words, dense = transformer(), mlp()
    return {
        f"An MLP of 12 layers, {dense.parameters / 1e6:.0f} million parameters": dense,
        f"A transformer of 24 layers, {words.parameters / 1e6:.0f} million parameters": words,
        "The same transformer with its layers in a `lax.scan`": transformer(scan=True),
    }


def _ours(weight_update: str) -> Callable[[Mesh, Shapes], Any]:
    def lowered(mesh: Mesh, model: Shapes) -> Any:
        step = crossshard.make_train_step(
            model.loss_fn, adamw(), mesh=mesh, weight_update=weight_update
        )
        return step.lower(step.abstract_init(model.params), model.batch(mesh.size))

    return lowered


STEPS: dict[str, Callable[[Mesh, Shapes], Any]] = {
    "ours, sharded": _ours("sharded"),
    "by hand, sharded": lambda mesh, model: by_hand.sharded(
        mesh, model.params, model.loss_fn, model.batch(mesh.size)
    ),
    "ours, replicated": _ours("replicated"),
    "by hand, replicated": lambda mesh, model: by_hand.replicated(
        mesh, model.params, model.loss_fn, model.batch(mesh.size)
    ),
}


_HEADS = (
    *("GPUs", "step", "collectives", "GB sent by a GPU", "÷ lower bound"),
    *("gradients hidden", "gathers hidden", "GB of memory"),
)


def cluster(hosts: int) -> Mesh:
    """A mesh of one axis over the GPUs of so many hosts."""
    gpus = crossshard.tools.topology(f"h100:{hosts}x{_GPUS_OF_A_HOST}")
    return gpus.mesh({by_hand.AXIS: gpus.size})


def rows(model: Shapes) -> Iterator[list[str]]:
    """Compile every step of a model for every cluster."""
    for hosts in HOSTS:
        mesh = cluster(hosts)
        for name, lowered in STEPS.items():
            report = crossshard.inspect(lowered(mesh, model), parameters=model.params)
            assert report.memory is not None
            yield [
                f"{mesh.size:,}",
                name,
                markdown.collectives(report),
                f"{report.bytes_sent / 1e9:.2f}",
                f"{report.ratio:.3f}",
                _share(report.hidden_share_of("reduce-scatter", "all-reduce")),
                _share(report.hidden_share_of("all-gather")),
                f"{report.memory.peak / 1e9:.1f}",
            ]


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


_WHAT = """\
Training steps with AdamW, compiled for clusters of H100s on a machine without GPUs, and read by
`crossshard.inspect` from the scheduled programs. Each host has eight GPUs; the mesh has one
axis over all of them. Nothing here has run on a GPU, so these are not times.

*Gradients hidden* is the share of the bytes of all-reduces and reduce-scatters between whose start
and end the program has a matrix product; *gathers hidden* is that of the gathers of the updated
parameters, most of which are scheduled beside the update of the next array instead. Memory is the
peak on one GPU. The lower bound is 2(N−1)/N · P. Steps by hand are compiled as JAX does by default,
ours with `step.compiler_options`.

By hand, XLA combines reduce-scatters until their outputs have 30 MiB, which on 8 GPUs is 252 MB of
gradients. A layer of the transformer has 201 MB, so each layer's gradients are one reduce-scatter,
beside the products of the next; the whole MLP has 201 MB too, so its gradients are one, after the
backward pass. On 32 GPUs about five layers of the transformer are one, on 256 all are. Ours hides
one point less on 8 GPUs: XLA puts some short reduce-scatters beside kernels that are not products.

The transformer's embedding, 7.9% of its gradients, is also its output layer, so its gradient is
complete only at the end of the backward pass. In a `lax.scan` the gradients of all layers are."""


def main(out: Path = Path("docs/benchmarks/gpus.md")) -> None:
    """Print the tables and write them to a file, which has what is done if this is interrupted."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    tables: dict[str, list[list[str]]] = {}
    for title, model in _models().items():
        print(f"{title}\n{' | '.join(_HEADS)}")
        tables[title] = []
        for row in rows(model):
            print(" | ".join(row), flush=True)
            tables[title].append(row)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(page(tables), encoding="utf-8")


def page(tables: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """The page with these tables, by their titles."""
    parts = ["# GPU clusters", _WHAT.replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n")]
    for title, found in tables.items():
        parts += [f"## {title}", markdown.table(_HEADS, found, names=(1, 2))]
    parts.append(markdown.repeat("make bench-gpus"))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
