"""The bench of one real GPU: `make bench-gpu`, on a machine that has one, in ten minutes.

Each row is measured by benchmarks/on_gpu.py in processes of its own, and kept in
docs/benchmarks/gpu.json as it comes. With --quick small models run on a machine without a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import age, markdown
from benchmarks.processes import free_port

ROOT = Path(__file__).parents[1]
PARTS = ("models", "clusters", "processes", "saves")
_PAIRS = [
    ("GPT-2 124M", "ours", "AdamW"),
    ("GPT-2 124M", "ours, guards", "AdamW"),
    ("GPT-2 124M", "ours, virtual_shards=4", "AdamW"),
    ("GPT-2 124M", "ours, accumulate_steps=4", "AdamW"),
    ("GPT-2 124M", "ours", "Muon"),
    ("1.2 billion", "ours", "AdamW"),
    ("1.2 billion", "ours, guards", "AdamW"),
]
_CLUSTERS = {
    8: (
        *("ours, replicated", "ours, replicated, guards", "by hand, replicated"),
        *("ours, sharded", "ours, sharded, guards", "by hand, sharded"),
        *("GSPMD, ZeRO-1", "GSPMD, ZeRO-1, O1"),
        *("ours, params sharded", "ours, params sharded, guards", "ours, params sharded, int8"),
        *("by hand, params sharded", "GSPMD, FSDP", "GSPMD, FSDP, O1"),
    ),
    32: ("ours, params sharded", "by hand, params sharded", "GSPMD, FSDP, O1"),
    256: ("ours, params sharded", "by hand, params sharded", "GSPMD, FSDP, O1"),
}
# Processes that share a GPU: each on a host of its own, as NCCL believes, over loopback.
_ON_ONE_GPU = {
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
_NOT_TUNED = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
# Kernels that the first run has chosen, for all that follow.
_ONE_CACHE = (
    "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_per_fusion_autotune_cache_dir={folder}"
)

Row = dict[str, Any]


class Machine:
    """Runs benchmarks/on_gpu.py in processes of their own."""

    def __init__(self) -> None:
        # Not in this process: JAX keeps most of the memory of a GPU that it has seen.
        found = self.run("kind")
        self.kind, self.has_gpu = found.get("kind", ""), bool(found.get("is_gpu"))

    def run(self, *words: str, **environment: str) -> Row:
        """Run one process to its end; return the line of JSON that it prints last."""
        started = self._start(words, environment)
        output, errors = started.communicate()
        if started.returncode:
            return {"failed": errors.strip().splitlines()[-1:] or [str(started.returncode)]}
        return dict(json.loads(output.strip().splitlines()[-1]))

    def ranks(self, number: int, words: Sequence[str], flags: str = "") -> list[tuple[int, str]]:
        """Run processes that form one job; return the code and the output of each."""
        port, jobs = free_port(), []
        for at in range(number):
            environment = {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": f"{number}",
                "JAX_PROCESS_ID": f"{at}",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.8 / number:.3f}",
                "NCCL_HOSTID": f"host{at}",
                "XLA_FLAGS": flags,
                **(_ON_ONE_GPU if self.has_gpu else {"JAX_PLATFORMS": "cpu"}),
            }
            jobs.append(self._start(("rank", *words), environment))
        outputs = [job.communicate()[0] for job in jobs]
        return [(job.returncode, output) for job, output in zip(jobs, outputs, strict=True)]

    def _start(self, words: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.on_gpu", *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, text=True, **pipes
        )


def models(machine: Machine, quick: bool) -> Iterator[Row]:
    """Measure ours against a bare jit, in turn."""
    for model, other, optimizer in _PAIRS[:: 4 if quick else 1]:
        found = machine.run("pair", model, other, optimizer, str(int(quick)))
        yield {"model": model, "step": other, "optimizer": optimizer, **found}


def clusters(machine: Machine, quick: bool) -> Iterator[Row]:
    """Run the programs of clusters on one GPU, whose peers are imagined."""
    wanted = {8: ("ours, params sharded", "GSPMD, FSDP, O1")} if quick else _CLUSTERS
    imagined = {"XLA_FLAGS": "--xla_gpu_shard_autotuning=false"} if machine.has_gpu else {}
    for number, names in wanted.items():
        topology = {"JAX_MOCK_GPU_TOPOLOGY": f"1x{number}x1"} if machine.has_gpu else {}
        for name in names:
            words = ("cluster", str(number), name, str(int(quick)))
            yield {"gpus": number, "step": name, **machine.run(*words, **topology, **imagined)}


def processes(machine: Machine, quick: bool) -> Iterator[Row]:
    """Train in one, two and four processes, with and without a death."""
    steps = "3" if quick else "10"
    numbers = (1, 2) if quick else (1, 2, 4)
    for update in ("sharded",) if quick else ("replicated", "sharded", "params"):
        with tempfile.TemporaryDirectory() as folder:
            ways = {"not tuned": _NOT_TUNED, "tuned, one cache": _ONE_CACHE.format(folder=folder)}
            for way, flags in ways.items() if machine.has_gpu else [("CPU", "")]:
                found = [machine.ranks(n, (update, steps, "-1"), flags) for n in numbers]
                yield {"update": update, "kernels": way, **_compared(numbers, found)}
    number, began = (2 if quick else 3), time.time()
    ended = machine.ranks(number, ("sharded", "1000", "2"))
    now, died = time.time(), [_last(output).get("died") for _, output in ended]
    since = max((each for each in died if each), default=began)
    codes = [code for code, _ in ended]
    yield {"update": "one of them is killed", "codes": codes, "seconds": now - since}


def _compared(numbers: Sequence[int], found: Sequence[list[tuple[int, str]]]) -> Row:
    last = [[_last(output) for _, output in job] for job in found]
    hashes = [{each.get("sha256") for each in job} for job in last]
    losses = [job[0].get("losses", []) for job in last]
    off = [abs(a - b) for own in losses for a, b in zip(losses[0], own, strict=False)]
    return {
        "numbers": list(numbers),
        "same_bits": None not in hashes[0] and all(each == hashes[0] for each in hashes),
        "losses_off": max(off) if all(losses) else None,
    }


def _last(output: str) -> Row:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}


def save(machine: Machine, quick: bool) -> Iterator[Row]:
    """Measure how long a save keeps the loop waiting, beside Orbax's."""
    yield machine.run("save", str(int(quick)))


_MEASURES: dict[str, Callable[[Machine, bool], Iterator[Row]]] = {
    "models": models,
    "clusters": clusters,
    "processes": processes,
    "saves": save,
}
_HEADS = {
    "models": ("model", "optimizer", "step", "ms", "ratio", "tokens_per_second", "mfu"),
    "clusters": ("gpus", "step", "ms", "temporary_gb", "kernels_gb"),
    "processes": ("update", "kernels", "numbers", "same_bits", "losses_off", "codes", "seconds"),
    "saves": ("mb", "ours_ms", "ours_most", "orbax_ms", "orbax_most"),
}
_WHAT = {
    "models": "Ours against a bare `jax.jit` with Optax, in turn, on one GPU; *ratio* is the "
    "median over the rounds, and *mfu* the share of the dense peak of bfloat16.",
    "clusters": "Programs for clusters, each as one of its GPUs runs it, with 1.2 billion "
    "parameters: collectives return at once, so a time is that of the kernels alone.",
    "processes": "Several processes that share the GPU, over NCCL on loopback, with "
    "`virtual_shards=4`: the bits of the parameters, and the largest difference of a loss.",
    "saves": "How long a save keeps the loop waiting, and the longest, in milliseconds.",
}


def page(kept: Row, before: str) -> str:
    """Write the page: of what was measured, and before that what somebody measured by hand."""
    parts = [f"On {kept['device']}, with {kept['versions']}."] if kept.get("device") else []
    for part, rows in kept.get("rows", {}).items():
        heads = _HEADS[part]
        cells = [[_cell(row.get(head, row.get("failed"))) for head in heads] for row in rows]
        words = [head.replace("_", " ") for head in heads]
        parts += [f"## {part.capitalize()}", _WHAT[part], markdown.table(words, cells, names=(0,))]
    parts.append("To repeat: `make bench-gpu`.")
    return "\n\n".join(["# On a real GPU", *parts, before]).rstrip() + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "–" if value is None else {True: "yes", False: "no"}.get(value, str(value))


def main(words: Sequence[str] | None = None) -> None:
    """Measure the parts that the command line names, and write the page after each row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    wanted = parser.parse_args(words)
    machine = Machine()
    if not machine.has_gpu and not wanted.quick:
        raise SystemExit("There is no GPU: pass --quick, or install JAX for CUDA where there is.")
    file, path = wanted.out / "gpu.json", wanted.out / "gpu.md"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    before = "".join(text.partition("\n## Measured by hand")[1:]).strip()
    versions = f"JAX {jax.__version__}, on {time.strftime('%Y-%m-%d')}"
    kept |= {"device": machine.kind, "versions": versions}
    wanted.out.mkdir(parents=True, exist_ok=True)
    for part in wanted.parts:
        rows: list[Row] = []
        kept.setdefault("rows", {})[part] = rows
        for row in _MEASURES[part](machine, wanted.quick):
            print(part, json.dumps(row), flush=True)
            rows.append(row)
            file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            age.write(path, page(kept, before))


if __name__ == "__main__":
    main()
