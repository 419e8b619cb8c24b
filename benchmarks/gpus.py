"""Steps compiled for clusters of H100s, without GPUs: what they send, and what hides it.

Run it as `make bench-gpus` does, which builds an environment with JAX for CUDA. What was measured
is kept in docs/benchmarks/gpus.json, so that one row can be measured again alone:
`python -m benchmarks.gpus --models scan --gpus 32 --steps "ours, params sharded"`.
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import crossshard
from benchmarks import age, by_hand, markdown
from benchmarks.problem import adamw
from benchmarks.shapes import Shapes, mlp, transformer
from crossshard.pipeline import Quantized

GPUS = (8, 32, 256, 1024)
_GPUS_OF_A_HOST = 8
_PARAMS_SHARDED = "ours, params sharded"

_Row = dict[str, Any]


def _models() -> dict[str, tuple[str, Shapes]]:
    words, dense = transformer(), mlp()
    return {
        "unrolled": (
            f"A transformer of 24 layers, {words.parameters / 1e6:.0f} million parameters",
            words,
        ),
        "unrolled-checkpoint": (
            "The same transformer with `jax.checkpoint` around each layer",
            transformer(checkpoint=True),
        ),
        "scan": (
            "The same transformer with its layers in a `lax.scan`",
            transformer(scan=True),
        ),
        "scan-checkpoint": (
            "The same transformer with its layers in a `lax.scan` and `jax.checkpoint`",
            transformer(scan=True, checkpoint=True),
        ),
        "mlp": (
            f"An MLP of 12 layers, {dense.parameters / 1e6:.0f} million parameters",
            dense,
        ),
    }


def _ours(**options: Any) -> Callable[[Mesh, Shapes], Any]:
    def lowered(mesh: Mesh, model: Shapes) -> Any:
        step = crossshard.make_train_step(model.loss_fn, adamw(), mesh=mesh, **options)
        # Each process passes its own rows.
        rows = model.batch(mesh.size // jax.process_count())
        return step.lower(step.abstract_init(model.params), rows)

    return lowered


def _theirs(step: Callable[..., Any], **options: Any) -> Callable[[Mesh, Shapes], Any]:
    return lambda mesh, model: step(
        mesh, model.params, model.loss_fn, model.batch(mesh.size), **options
    )


# Every guard, as a long run has them.
GUARDS: dict[str, Any] = {
    "nonfinite": "quarantine",
    "check_divergence": 100,
    "metrics": ("grad_norm", "update_norm", "param_norm"),
}
_WITH_GUARDS = ", guards"

STEPS: dict[str, Callable[[Mesh, Shapes], Any]] = {
    "ours, replicated": _ours(weight_update="replicated"),
    f"ours, replicated{_WITH_GUARDS}": _ours(weight_update="replicated", **GUARDS),
    "by hand, replicated": _theirs(by_hand.replicated),
    "ours, sharded": _ours(weight_update="sharded"),
    f"ours, sharded{_WITH_GUARDS}": _ours(weight_update="sharded", **GUARDS),
    "by hand, sharded": _theirs(by_hand.sharded),
    "GSPMD, ZeRO-1": _theirs(by_hand.gspmd),
    "GSPMD, ZeRO-1, O1": _theirs(by_hand.gspmd, options=by_hand.O1),
    _PARAMS_SHARDED: _ours(params="sharded"),
    f"{_PARAMS_SHARDED}{_WITH_GUARDS}": _ours(params="sharded", **GUARDS),
    f"{_PARAMS_SHARDED}, bfloat16": _ours(params="sharded", reduce_dtype="bfloat16"),
    f"{_PARAMS_SHARDED}, int8": _ours(params="sharded", reduce_dtype="int8"),
    f"{_PARAMS_SHARDED}, int8, bfloat16 feedback": _ours(
        params="sharded", reduce_dtype=Quantized("int8", error_feedback="bfloat16")
    ),
    f"{_PARAMS_SHARDED}, int4, bfloat16 feedback": _ours(
        params="sharded", reduce_dtype=Quantized("int4", error_feedback="bfloat16")
    ),
    f"{_PARAMS_SHARDED}, bfloat16{_WITH_GUARDS}": _ours(
        params="sharded", reduce_dtype="bfloat16", **GUARDS
    ),
    f"{_PARAMS_SHARDED}, int8{_WITH_GUARDS}": _ours(
        params="sharded", reduce_dtype="int8", **GUARDS
    ),
    "by hand, params sharded": _theirs(by_hand.params_sharded),
    "GSPMD, FSDP": _theirs(by_hand.gspmd, split_params=True),
    "GSPMD, FSDP, O1": _theirs(by_hand.gspmd, split_params=True, options=by_hand.O1),
    "GSPMD, FSDP, flags of MaxText": _theirs(
        by_hand.gspmd, split_params=True, options=by_hand.MAXTEXT
    ),
}


def cluster(hosts: int) -> Mesh:
    """A mesh of one axis over the GPUs of so many hosts."""
    gpus = crossshard.tools.topology(f"h100:{hosts}x{_GPUS_OF_A_HOST}")
    return gpus.mesh({by_hand.AXIS: gpus.size})


def measured(name: str, mesh: Mesh, model: Shapes) -> _Row:
    """Compile a step for a cluster, and read what it sends, what hides it, and its memory."""
    report = crossshard.inspect(STEPS[name](mesh, model), parameters=model.params)
    assert report.memory is not None
    return {
        "collectives": markdown.collectives(report),
        "sent": report.bytes_sent,
        "least": _least(name, mesh.size, model),
        "behind_products": report.bytes_behind_matrix_products,
        "behind_nothing": report.bytes_exposed,
        "gradients_hidden": report.hidden_share_of("reduce-scatter", "all-reduce", "all-to-all"),
        "gathers_hidden": report.hidden_share_of("all-gather"),
        "kernels": report.kernel_bytes,
        "arguments": report.memory.argument,
        "peak": report.memory.peak,
    }


def _least(name: str, shards: int, model: Shapes) -> float | None:
    """The least bytes that our step must send; parts are gathered in 16 bits wherever read."""
    whole = 4 * model.parameters
    both = {"ours, replicated": 2 * whole, "ours, sharded": 2 * whole}
    both[_PARAMS_SHARDED] = whole + 2 * (model.parameters + model.read_again)
    least = both.get(name.removesuffix(_WITH_GUARDS))
    return None if least is None else (shards - 1) / shards * least


_HEADS = (
    *("GPUs", "step", "collectives", "GB sent by a GPU", "÷ lower bound"),
    *("gradients hidden", "gathers hidden", "all hidden", "GB not hidden"),
    *("GB of kernels", "GB of arguments", "GB at the peak"),
)


def _cells(row: _Row) -> list[str]:
    sent, hidden, least = row["sent"], row["behind_products"], row["least"]
    return [
        f"{row['gpus']:,}",
        row["step"],
        row["collectives"],
        f"{sent / 1e9:.2f}",
        "–" if least is None else f"{sent / least:.3f}",
        _share(row["gradients_hidden"]),
        _share(row["gathers_hidden"]),
        _share(hidden / sent),
        f"{(sent - hidden) / 1e9:.2f}",
        f"{row['kernels'] / 1e9:.1f}" if "kernels" in row else "–",
        f"{row['arguments'] / 1e9:.1f}",
        f"{row['peak'] / 1e9:.1f}",
    ]


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


_WHAT = """\
Training steps with AdamW, compiled for clusters of H100s on a machine without GPUs, and read by
`crossshard.inspect` from the scheduled programs. Each host has eight GPUs; the mesh has one
axis over all of them. Nothing here has run on a GPU, so these are not times.

*Gradients hidden* is the share of the bytes of all-reduces and reduce-scatters between whose start
and end the program has a matrix product; *gathers hidden* is that of the gathers of parameters, and
*GB not hidden* are the bytes of all collectives that have none beside them. In a loop every run
counts. Any product hides a whole collective here, so a row with a single reduce-scatter has all of
its gradients hidden or none. On the eight GPUs of one host much of what int8 sends has only other
kernels beside it, which counts as not hidden; no byte of it is without any. *GB of kernels* is what
all kernels but matrix products read and write, which at 3 TB/s is a third of a millisecond for
each. *Arguments* are what a GPU keeps between two steps; the peak includes them.

*Replicated* steps sum gradients and update all parameters on every GPU; *sharded* ones scatter the
sums, update a slice and gather the parameters. With *params sharded* each GPU keeps a slice of the
parameters, too, and each layer gathers its own. By hand they are written with `shard_map`; GSPMD is
a `jax.jit` with shardings, from which XLA makes the collectives, and activations constrained to be
split by rows. *O1* is XLA's optimization level, which NVIDIA recommends; MaxText's flags are those
for FSDP on 1,024 H100s. Ours is compiled with `step.compiler_options`, all others as JAX does by
default. *Guards* are `nonfinite="quarantine"`, `check_divergence=100` and the norms of gradient,
update and parameters. *bfloat16*, *int8* and *int4* are what gradients are sent in; what int8 and
int4 lose is kept in float32, or in bfloat16 with *bfloat16 feedback*.

GSPMD sums gradients in bfloat16, which is half the bytes; ours and those by hand sum in float32.
The lower bound of our steps is 2(N−1)/N · P. With sharded parameters, gathered in bfloat16 as
the loss reads them, it is (N−1)/N times 6 bytes for each parameter, and 8 for those that a
checkpoint reads again.

By hand, XLA combines reduce-scatters until their outputs have 30 MiB, which on 8 GPUs is 252 MB of
gradients. A layer of the transformer has 201 MB, so each layer's gradients are one reduce-scatter,
beside the products of the next; the whole MLP has 201 MB too, so its gradients are one, after the
backward pass. On 32 GPUs about five layers of the transformer are one, on 256 all are.

The transformer's embedding, 7.9% of its gradients, is also its output layer, so its gradient is
complete only at the end of the backward pass."""


def main(words: Sequence[str] | None = None) -> None:
    """Measure rows, print them, and draw the page from all that were ever kept.

    Args:
      words: the command line; that of the process if ``None``.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    models = _models()
    wanted = _wanted(words, models)
    kept = wanted.out / "gpus.json"
    rows = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    found = {(row["model"], row["gpus"], row["step"]): row for row in rows}
    wanted.out.mkdir(parents=True, exist_ok=True)
    print(" | ".join(("model", *_HEADS)))
    for model, number, step in itertools.product(wanted.models, wanted.gpus, wanted.steps):
        mesh = cluster(number // _GPUS_OF_A_HOST)
        row = {"model": model, "gpus": number, "step": step, "version": crossshard.__version__}
        row |= measured(step, mesh, models[model][1])
        print(" | ".join((model, *_cells(row))), flush=True)
        # At once, since a whole run is long.
        found[model, number, step] = row
        kept.write_text(json.dumps([*found.values()], indent=1) + "\n", encoding="utf-8")
    titles = {model: title for model, (title, _) in models.items()}
    old = {row["version"] for row in found.values()} - {crossshard.__version__}
    age.write(wanted.out / "gpus.md", page(titles, found.values()), rows_stay=bool(old))


def _wanted(words: Sequence[str] | None, models: Collection[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpus",
        description="Compile steps for H100s; with no step, as in `--steps`, only draw the page.",
    )
    known = {"models": models, "gpus": GPUS, "steps": STEPS}
    for name, choices in known.items():
        kind = int if name == "gpus" else str
        every = list(choices)
        parser.add_argument(f"--{name}", type=kind, nargs="*", choices=every, default=every)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    return parser.parse_args(words)


def page(titles: Mapping[str, str], rows: Iterable[_Row]) -> str:
    """The page with the rows of each model, in the order in which a whole run measures them."""
    parts = ["# GPU clusters", _WHAT.replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n")]
    order = list(STEPS)
    rows = sorted(rows, key=lambda row: (row["gpus"], order.index(row["step"])))
    for model, title in titles.items():
        if cells := [_cells(row) for row in rows if row["model"] == model]:
            parts += [f"## {title}", markdown.table(_HEADS, cells, names=(1, 2))]
    # The day stands above, and stays where rows do.
    parts.append(f"JAX {jax.__version__}. To repeat: `make bench-gpus`.")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
