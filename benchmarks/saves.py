"""How long a save keeps a loop waiting, ours and Orbax's own: `python -m benchmarks.saves`.

Both take turns. Orbax writes the arrays alone, without hashes.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import crossshard
from benchmarks import markdown
from benchmarks.machine import this_machine
from benchmarks.tables import three_digits

_KINDS = ((1, "replicated"), (8, "replicated"), (8, "sharded"))
_HEADS = (
    "shards",
    "weight update",
    "MB",
    "a save stalls, ms",
    "most",
    "Orbax's own, ms",
    "most",
    "the next step, ms",
    "after Orbax's, ms",
    "another step, ms",
    "written after, ms",
    "Orbax's, ms",
)
# Steps from one snapshot to the next, as the page says.
_EVERY = 10
_MEMORY_HEADS = (
    "shards",
    "weight update",
    "MB",
    f"{_EVERY} steps, s",
    "with a snapshot",
    "with Orbax's",
    "a snapshot stalls, ms",
    "most",
    "Orbax's, ms",
    "most",
)


def main(rounds: int = 10, quick: bool = False, out: Path | None = None) -> None:
    """How long a save keeps a loop waiting, ours and Orbax's own.

    Args:
      rounds: saves of each.
      quick: a small state, to see that it runs.
      out: write a page, such as docs/benchmarks/x.md.
    """
    crossshard.cpu_devices(8)
    machine = this_machine()
    width = 64 if quick else 1024
    rows, of_memory = [], []
    for shards, update in _KINDS:
        print(f"\r{shards} shards, {update}  ", end="", file=sys.stderr)
        given = shards, update, width, rounds
        rows.append([f"{shards}", update, *measured(*given)])
        of_memory.append([f"{shards}", update, *in_memory(*given)])
    print(file=sys.stderr)
    both = ((_HEADS, rows), (_MEMORY_HEADS, of_memory))
    tables = [markdown.table(heads, each, names=(1,)) for heads, each in both]
    last = markdown.measured_on(machine, f"python -m benchmarks.saves --rounds {rounds}")
    markdown.publish("saves", tables, last, out)


def measured(shards: int, update: str, width: int, rounds: int) -> list[str]:
    """The cells of a row."""
    loss = lambda params, x: sum((w**2).mean() for w in params.values()) * x.mean()
    step, state, megabytes = _begun(loss, shards, update, width)
    x = np.ones(8, np.float32)
    times: dict[str, list[float]] = {name: [] for name in ("ours", "orbax", "another")}
    times |= {f"{what} {who}": [] for what in ("step", "written") for who in ("ours", "orbax")}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = jax.block_until_ready(run())
        times[name].append(time.perf_counter() - began)
        return found

    with (
        tempfile.TemporaryDirectory(prefix="crossshard-") as folder,
        crossshard.Checkpoints(Path(folder, "ours"), step, keep=1) as checkpoints,
        ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as orbax,
    ):
        take = lambda: step(state, x)
        leaves = lambda: {"leaves": jax.tree.leaves(state)}
        by_orbax = lambda: orbax.save(Path(folder, "orbax"), leaves(), force=True)
        ways = (
            ("ours", lambda: checkpoints.save(state), checkpoints.wait),
            ("orbax", by_orbax, orbax.wait_until_finished),
        )
        for who, save, wait in ways * (1 + rounds):
            state, _ = take()
            state, _ = timed("another", take)
            timed(who, save)
            state, _ = timed(f"step {who}", take)
            timed(f"written {who}", wait)
    median = lambda name: three_digits(1000 * statistics.median(times[name][1:]))
    most = lambda name: three_digits(1000 * max(times[name][1:]))
    return [
        f"{megabytes:.0f}",
        *(median("ours"), most("ours"), median("orbax"), most("orbax")),
        *(median(name) for name in ("step ours", "step orbax", "another")),
        *(median("written ours"), median("written orbax")),
    ]


def in_memory(shards: int, update: str, width: int, rounds: int) -> list[str]:
    """The cells of a row about snapshots."""

    def loss(params: Any, x: Any) -> Any:
        for w in params.values():
            x = jax.numpy.tanh(x @ w)
        return (x**2).mean()

    step, state, megabytes = _begun(loss, shards, update, width)
    x = np.random.default_rng(1).normal(size=(width, width)).astype(np.float32)
    stalls: dict[str, list[float]] = {"ours": [], "orbax": []}
    runs: dict[str, list[float]] = {"none": [], "ours": [], "orbax": []}
    with (
        tempfile.TemporaryDirectory(prefix="crossshard-") as disk,
        tempfile.TemporaryDirectory(prefix="crossshard-", dir="/dev/shm") as folder,
        crossshard.Checkpoints(disk, step, memory=f"{folder}/ours", memory_every=1) as checkpoints,
        ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as orbax,
    ):
        leaves = lambda: {"leaves": jax.tree.leaves(state)}
        by_orbax = lambda: orbax.save(Path(folder, "orbax"), leaves(), force=True)
        ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "none": (lambda: None, lambda: None),
            "ours": (lambda: checkpoints.snapshot(state), checkpoints.wait),
            "orbax": (by_orbax, orbax.wait_until_finished),
        }
        for who in list(ways) * (1 + rounds):
            keep, wait = ways[who]
            began = time.perf_counter()
            for number in range(_EVERY):
                state, _ = jax.block_until_ready(step(state, x))
                if number == 0 and who in stalls:
                    asked = time.perf_counter()
                    keep()
                    stalls[who].append(time.perf_counter() - asked)
            wait()
            runs[who].append(time.perf_counter() - began)
    # The first of each compiles.
    plain = statistics.median(runs["none"][1:])
    more = lambda who: f"{100 * (statistics.median(runs[who][1:]) / plain - 1):+.1f}%"
    shown = [f"{megabytes:.0f}", three_digits(plain), more("ours"), more("orbax")]
    for each in stalls.values():
        shown += [three_digits(1000 * f(each[1:])) for f in (statistics.median, max)]
    return shown


def _begun(loss: Any, shards: int, update: Any, width: int) -> tuple[Any, Any, float]:
    """A step, its first state, and how many megabytes that has."""
    normal = np.random.default_rng(0).normal
    params = {f"{n}": normal(size=(width, width)).astype(np.float32) for n in range(17)}
    step: Any = crossshard.make_train_step(
        loss, optax.adam(1e-3), num_shards=shards, weight_update=update
    )
    state = step.init(params)
    return step, state, sum(x.nbytes for x in jax.tree.leaves(step.unshard(state))) / 1e6


if __name__ == "__main__":
    markdown.command(main)
