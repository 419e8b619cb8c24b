"""Steps compiled for clusters of H100s, without GPUs: what they send, and what hides it.

Run it as `make bench-gpus` does, which builds an environment with JAX for CUDA. What was measured
is kept in docs/benchmarks/gpus.json, so that one row can be measured again alone:
`python -m benchmarks.gpus --models scan --gpus 32 --steps "ours, params sharded"`.
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
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


# In the order of the tables of the page.
MODELS = {
    "unrolled": transformer(),
    "unrolled-checkpoint": transformer(checkpoint=True),
    "scan": transformer(scan=True),
    "scan-checkpoint": transformer(scan=True, checkpoint=True),
    "mlp": mlp(),
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


def mesh_of(name: str) -> Mesh:
    """A mesh of one axis over the devices of a topology, which need not be here."""
    devices = crossshard.tools.topology(name)
    return devices.mesh({by_hand.AXIS: devices.size})


def cluster(hosts: int) -> Mesh:
    """One over the GPUs of so many hosts."""
    return mesh_of(f"h100:{hosts}x{_GPUS_OF_A_HOST}")


def measured(name: str, mesh: Mesh, model: Shapes) -> _Row:
    """Compile a step for a cluster, and read what it sends, what hides it, and its memory."""
    report = crossshard.inspect(STEPS[name](mesh, model), parameters=model.params)
    assert report.memory is not None
    return {
        "collectives": markdown.collectives(report),
        "sent": report.bytes_sent,
        "least": least(name, mesh.size, model),
        "behind_products": report.bytes_behind_matrix_products,
        "behind_nothing": report.bytes_exposed,
        "gradients_hidden": report.hidden_share_of("reduce-scatter", "all-reduce", "all-to-all"),
        "gathers_hidden": report.hidden_share_of("all-gather"),
        "kernels": report.kernel_bytes,
        "arguments": report.memory.argument,
        "peak": report.memory.peak,
    }


def least(name: str, shards: int, model: Shapes) -> float | None:
    """The least bytes that our step must send; parts are gathered in 16 bits wherever read."""
    whole = 4 * model.parameters
    both = {"ours, replicated": 2 * whole, "ours, sharded": 2 * whole}
    both[_PARAMS_SHARDED] = whole + 2 * (model.parameters + model.read_again)
    of_one = both.get(name.removesuffix(_WITH_GUARDS))
    return None if of_one is None else (shards - 1) / shards * of_one


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


def main(words: Sequence[str] | None = None) -> None:
    """Measure rows, print them, and draw the page from all that were ever kept.

    Args:
      words: the command line; that of the process if ``None``.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    wanted = _wanted(words)
    kept = wanted.out / "gpus.json"
    rows = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    found = {(row["model"], row["gpus"], row["step"]): row for row in rows}
    wanted.out.mkdir(parents=True, exist_ok=True)
    print(" | ".join(("model", *_HEADS)))
    for model, number, step in itertools.product(wanted.models, wanted.gpus, wanted.steps):
        mesh = cluster(number // _GPUS_OF_A_HOST)
        row = {"model": model, "gpus": number, "step": step, "version": crossshard.__version__}
        row |= measured(step, mesh, MODELS[model])
        print(" | ".join((model, *_cells(row))), flush=True)
        # At once, since a whole run is long.
        found[model, number, step] = row
        kept.write_text(json.dumps([*found.values()], indent=1) + "\n", encoding="utf-8")
    old = {row["version"] for row in found.values()} - {crossshard.__version__}
    age.write(wanted.out / "gpus.md", page(found.values()), rows_stay=bool(old))


def _wanted(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpus",
        description="Compile steps for H100s; with no step, as in `--steps`, only draw the page.",
    )
    known = {"models": MODELS, "gpus": GPUS, "steps": STEPS}
    for name, choices in known.items():
        kind = int if name == "gpus" else str
        every = list(choices)
        parser.add_argument(f"--{name}", type=kind, nargs="*", choices=every, default=every)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    return parser.parse_args(words)


def page(rows: Iterable[_Row]) -> str:
    """The page with the rows of each model, in the order in which a whole run measures them."""
    order = list(STEPS)
    rows = sorted(rows, key=lambda row: (row["gpus"], order.index(row["step"])))
    cells = ([_cells(row) for row in rows if row["model"] == model] for model in MODELS)
    tables = [markdown.table(_HEADS, each, names=(1, 2)) for each in cells]
    # The day stands above, and stays where rows do.
    last = f"JAX {jax.__version__}. To repeat: `make bench-gpus`."
    return markdown.again("gpus", tables, last)


if __name__ == "__main__":
    main()
