"""The bench of one real GPU: `make bench-gpu`, on a machine that has one.

Each row is measured by benchmarks/on_gpu.py in processes of its own, and kept in
docs/benchmarks/gpu.json as it comes. With --quick small models run on a machine without a GPU.
"""

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import crossshard
from benchmarks import age, gpus, markdown
from benchmarks.on_gpu import JIT
from benchmarks.processes import free_port

ROOT = Path(__file__).parents[1]
# A process that takes longer is ended.
_SECONDS = 180
# The model, what the step is compared with, the step and the optimizer.
_PAIRS = (
    ("GPT-2 124M", JIT, "ours", "AdamW"),
    ("GPT-2 124M", "ours", "ours, guards", "AdamW"),
    ("1.3 billion", JIT, "ours", "AdamW"),
    ("1.3 billion", "ours", "ours, guards", "AdamW"),
    ("GPT-2 124M", "ours", "ours, virtual_shards=4", "AdamW"),
    ("GPT-2 124M", JIT, "ours", "Muon"),
)
_FSDP = (
    *("ours, params sharded", "ours, params sharded, guards"),
    *("by hand, params sharded", "GSPMD, FSDP, O1"),
)
_OTHERS = tuple(step for step in gpus.STEPS if step not in _FSDP and "MaxText" not in step)
# In this order, until the time is over.
_CLUSTERS = ((8, _FSDP + _OTHERS), (256, _FSDP), (32, _FSDP), (256, _OTHERS), (32, _OTHERS))
# Processes that share a GPU: each on a host of its own, as NCCL believes, over loopback.
_ON_ONE_GPU = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    "CUDA_VISIBLE_DEVICES": "0",
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
        self._environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
        found = self.run("kind")
        if "failed" in found:
            raise SystemExit(f"JAX does not start: {found['failed']}")
        self.kind, self.has_gpu = found["kind"], found["is_gpu"]
        if not self.has_gpu:
            # Else JAX for CUDA cannot compile for GPUs that are not there.
            self._environment["JAX_PLATFORMS"] = "cpu"

    def run(self, name: str, *arguments: Any, **environment: str) -> Row:
        """Run a function of benchmarks/on_gpu.py; return its answer, or why there is none."""
        [(code, output)] = self._ended(name, arguments, [environment])
        return {"failed": _why(code, output)} if code else _last(output)

    def ranks(self, number: int, *arguments: Any, flags: str = "") -> list[tuple[int, str]]:
        """Train in processes that form one job; return the code and the output of each."""
        job = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": f"{number}",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.8 / number:.3f}",
            "XLA_FLAGS": flags,
            **(_ON_ONE_GPU if self.has_gpu else {}),
        }
        own = [{"JAX_PROCESS_ID": f"{at}", "NCCL_HOSTID": f"host{at}"} for at in range(number)]
        return self._ended("rank", arguments, [job | each for each in own])

    def _ended(
        self, name: str, arguments: Sequence[Any], environments: Sequence[dict[str, str]]
    ) -> list[tuple[int, str]]:
        command = [sys.executable, "-m", "benchmarks.on_gpu", name, json.dumps(arguments)]
        options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

        def run(own: dict[str, str]) -> tuple[int, str]:
            environment = {**os.environ, **self._environment, **own}
            try:
                ended = subprocess.run(
                    command, cwd=ROOT, env=environment, timeout=_SECONDS, check=False, **options
                )
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL, f"It took more than {_SECONDS} s."
            return ended.returncode, ended.stdout

        # All at once, since each reads to the end of its process.
        with concurrent.futures.ThreadPoolExecutor(len(environments)) as pool:
            return list(pool.map(run, environments))


def _why(code: int, output: str) -> str:
    """Return the last line of an output that names an error."""
    lines = output.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return [f"exit code {code}", *lines[-1:], *named[-1:]][-1][:200].replace("|", "/")


def _last(output: str) -> Row:
    lines = [line for line in output.splitlines() if line.startswith('{"')]
    return dict(json.loads(lines[-1])) if lines else {}


def models(machine: Machine, quick: bool) -> Iterator[Row]:
    """Measure ours against a bare jit, and with options against ours without, in turn."""
    for model, reference, step, optimizer in _PAIRS[:2] if quick else _PAIRS:
        found = machine.run("pair", model, reference, step, optimizer, quick)
        named = {"model": model, "optimizer": optimizer, "step": step, "against": reference}
        yield {**named, **found}


def clusters(machine: Machine, quick: bool) -> Iterator[Row]:
    """Run the programs of clusters on one GPU, whose peers are imagined."""
    if not (machine.has_gpu or "plugin" in versions()):
        print("clusters: left out, since JAX for CUDA is not installed")
        return
    # Else compiling waits for what the imagined peers choose.
    flags = "--xla_gpu_shard_autotuning=false" if machine.has_gpu else ""
    times: dict[tuple[int, str], float] = {}
    for number, steps in ((8, _FSDP),) if quick else _CLUSTERS:
        for step in steps:
            found = machine.run("cluster", number, step, quick, machine.has_gpu, XLA_FLAGS=flags)
            if isinstance(found.get("ms"), float):
                times[number, step] = found["ms"]
                plain = times.get((number, step.rpartition(", ")[0]))
                found["ratio"] = found["ms"] / plain if plain else None
            yield {"GPUs": number, "step": step, **found}


def processes(machine: Machine, quick: bool) -> Iterator[Row]:
    """Train in one, two and four processes, with and without a death."""
    steps, numbers = (3, (1, 2)) if quick else (10, (1, 2, 4))
    with tempfile.TemporaryDirectory() as folder:
        tuned = ("tuned, one cache", "sharded", _ONE_CACHE.format(folder=folder))
        ways = [("not tuned", each, _NOT_TUNED) for each in ("sharded", "params", "replicated")]
        for way, update, flags in [*ways, tuned] if machine.has_gpu else [("CPU", "sharded", "")]:
            found = [machine.ranks(n, update, steps, -1, flags=flags) for n in numbers]
            yield {"update": update, "kernels": way, **_compared(numbers, found)}
    ended = machine.ranks(2 if quick else 3, "sharded", 1000, 2)
    codes, died = [code for code, _ in ended], _last(ended[-1][1]).get("died")
    since = died and time.time() - died
    yield {"update": "the last is killed", "exit codes": codes, "seconds": since}


def _compared(numbers: Sequence[int], found: Sequence[list[tuple[int, str]]]) -> Row:
    """Compare the hashes and the losses of jobs; say why one failed."""
    last = [[_last(output) for _, output in job] for job in found]
    failed = [_why(*each) for job in found for each in job if each[0]]
    hashes = [{each.get("sha256") for each in job} for job in last]
    losses = [job[0].get("losses", []) for job in last]
    off = [abs(a - b) for own in losses for a, b in zip(losses[0], own, strict=False)]
    return {
        "processes": list(numbers),
        "same bits": None not in hashes[0] and all(each == hashes[0] for each in hashes),
        "losses differ by": max(off) if all(losses) else None,
        **({"failed": failed[0]} if failed else {}),
    }


MEASURES: dict[str, Callable[[Machine, bool], Iterator[Row]]] = {
    "models": models,
    "processes": processes,
    "saves": lambda machine, quick: iter([machine.run("save", quick)]),
    "clusters": clusters,
}
# How the numbers of a column are written. A column is named as in the rows.
_FORMS = {
    **dict.fromkeys(("ratio", "from", "to"), ".3f"),
    **dict.fromkeys(("tokens/s", "MB"), ",.0f"),
    "GB temporary": ".2f",
    "losses differ by": ".1g",
    "MFU": ".1%",
}
_WHAT = {
    "models": "Two steps in turn on one GPU, of models of the size of GPT-2 (16 rows of 1,024 "
    "tokens) and of 1.3 billion parameters (4 of 2,048; `lax.scan`, `jax.checkpoint`). *Guards* "
    'are `nonfinite="quarantine"`, `check_divergence=100` and three norms. The ratio is the median '
    "of all rounds, between its quartiles; MFU the share of the dense peak of bfloat16, without "
    "what a checkpoint computes again; the losses are those of the first three steps.",
    "processes": "Processes that share the GPU, over NCCL on loopback, with `virtual_shards=4`: "
    "whether the SHA-256 of the parameters is the same for each number of processes, and how far "
    "a loss is from one process's. After a `kill -9` of the last one, how soon the others end.",
    "saves": "How long a save keeps the loop waiting, of `crossshard.Checkpoints` and of Orbax's "
    "`AsyncCheckpointer`, in turn: the median and the longest, and the ratio of the medians.",
    "clusters": "Programs for clusters, of 1.3 billion parameters, each as one of its GPUs runs "
    "it. Collectives return at once, so a time is that of the kernels alone. The ratio is "
    "to the step without its last option; [GPU clusters](gpus.md) says what the steps are.",
}


def versions() -> str:
    """Return the versions of JAX, Optax, CUDA's plugin, cuDNN and NCCL, those that are there."""
    wanted = re.compile(r"(jax|optax|jax-cuda\d+-plugin|nvidia-(cudnn|nccl)-cu\d+) .*")
    there = importlib.metadata.distributions()
    named = {f"{each.name.lower().replace('_', '-')} {each.version}" for each in there}
    return ", ".join(sorted(filter(wanted.fullmatch, named)))


def page(kept: Row, before: str) -> str:
    """Write the page: what was measured, and what was measured by hand until all is measured."""
    parts = ["# On a real GPU"]
    for name in (name for name in MEASURES if name in kept):
        part = kept[name]
        heads = [*dict.fromkeys(head for row in part["rows"] for head in row)]
        cells = [[_cell(head, row.get(head)) for head in heads] for row in part["rows"]]
        small = " Small models, only to see that it runs." * part["quick"]
        stopped = " The time was over: what is not here was not measured." * part["stopped"]
        parts += [f"## {name.capitalize()}", _WHAT[name], markdown.table(heads, cells)]
        parts.append(f"On {part['device']}, with {part['versions']}.{small}{stopped}")
    if not all(name in kept and not kept[name]["quick"] for name in MEASURES):
        parts += [before] if before else []
    return "\n\n".join([*parts, "To repeat: `make bench-gpu`."]) + "\n"


def _cell(head: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return format(value, _FORMS.get(head, ",.1f"))
    named = {None: "–", True: "yes", False: "no"}
    return named[value] if value is None or isinstance(value, bool) else str(value)


def main(words: Sequence[str] | None = None) -> None:
    """Measure the parts that the command line names, and write the page after each row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--minutes", type=float, default=10, help="begin no row after so long")
    parser.add_argument("--out", type=Path, help="docs/benchmarks, or build/bench with --quick")
    wanted = parser.parse_args(words)
    until, machine = time.monotonic() + 60 * wanted.minutes, Machine()
    if not machine.has_gpu and not wanted.quick:
        raise SystemExit("There is no GPU: pass --quick, or install JAX for CUDA where there is.")
    out = wanted.out or Path("build/bench" if wanted.quick else "docs/benchmarks")
    out.mkdir(parents=True, exist_ok=True)
    file, path = out / "gpu.json", out / "gpu.md"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    before = "".join(text.partition("## Measured by hand")[1:]).partition("\n\nTo repeat:")[0]
    about = {"device": machine.kind, "versions": versions(), "quick": wanted.quick}
    day = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    for name in wanted.parts:
        part: Row = {**about, "version": crossshard.__version__, "day": day, "rows": []}
        for row in MEASURES[name](machine, wanted.quick):
            print(name, json.dumps(row), flush=True)
            part["rows"].append(row)
            part["stopped"] = time.monotonic() > until
            kept[name] = part
            file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            oldest = min(kept.values(), key=lambda part: part["day"])
            told = age.with_age(page(kept, before), oldest["version"], oldest["day"])
            path.write_text(told, encoding="utf-8")
            if part["stopped"]:
                print(f"The {wanted.minutes:g} minutes are over.")
                return


if __name__ == "__main__":
    main()
