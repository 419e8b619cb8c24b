"""The report of a benchmark: a page with tables, and the raw times as JSON."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import age, markdown
from benchmarks.machine import Machine
from benchmarks.options import Bench
from benchmarks.result import Result
from benchmarks.tables import make_tables
from crossshard.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Report:
    """A finished benchmark.

    Attributes:
      bench: the name of the benchmark.
      machine: the machine and the versions.
      rounds: the rounds of each result.
      quick: whether the sizes only show that it runs.
      notes: other notes, such as candidates that were left out.
      results: the results in the order of measurement.
    """

    bench: Bench
    machine: Machine
    rounds: int
    quick: bool
    notes: Sequence[str]
    results: Sequence[Result]

    def tables(self) -> str:
        """The results, as they are printed and written."""
        return "\n\n".join(
            f"## {each.title}\n\n{markdown.table(each.columns, each.rows)}"
            for each in make_tables(self.bench, self.results)
        )


_HEADS: dict[Bench, tuple[str, str]] = {
    "update": (
        "Reduction and update",
        "AdamW in float32 with gradients that are given: reduce them, update, and get the new "
        "parameters on every shard.",
    ),
    "step": (
        "The whole step",
        "Forward pass, backward pass, reduction and AdamW in float32. The global batch is the same "
        "for every number of shards.",
    ),
    "processes": (
        "Several processes",
        "Forward pass, backward pass, reduction and AdamW in float32, in processes of one device "
        "each on this machine. The global batch is the same for every number of processes.",
    ),
    "accumulation": (
        "Accumulation",
        "Four microbatches, one reduction or four, and one update with AdamW in float32. A step is "
        "all of it.",
    ),
    "same_bits": (
        "The same bits at any number of shards",
        "The whole step in float32, with AdamW where no optimizer is named, in eight virtual "
        "shards that are added in a fixed order, or plain.",
    ),
    "ema": (
        "A moving average of the parameters",
        "The whole step with AdamW in float32, then `ema = 0.999 · ema + 0.001 · params`: sharded, "
        "or replicated.",
    ),
    "parts": (
        "Sharded parameters",
        "The whole step with AdamW in float32: parameters and moments sharded, moments "
        "alone sharded, or all replicated.",
    ),
    "dealt": (
        "Optimizers that are not elementwise",
        "The whole step in float32 with optimizers that look at norms, or at whole matrices: leaf "
        "by leaf on the shards that own them, or all on every shard.",
    ),
    "overhead": (
        "Call overhead",
        "What calling a step costs in Python, beyond a `jax.jit` that takes and returns the same "
        "arrays as a list, on steps that compute almost nothing. Both calls are waited for.",
    ),
    "import": (
        "Import time",
        "The time that importing crossshard takes after JAX and Optax. Flax, Orbax and the tools "
        "are loaded when they are used.",
    ),
}

_IN_TURN = """\
In each round every candidate in turn takes one step that is not timed and then a few that are, \
each waited for, while the others are idle. Ratios and differences are taken within a round, so \
that other load on the machine affects all candidates alike. The tables show the median, the \
quartiles and the minimum over the rounds, and the ratio or difference of the two minima."""

_PROBLEMS = """\
The MLPs have four layers of one width; the transformer is that of `examples/byte_lm` with its \
default sizes. All candidates run in one process and donate parameters and state."""

_METHODS: dict[Bench, str] = {
    "update": f"""\
{_IN_TURN}

The JAX candidates share one process and donate parameters and state. PyTorch and TensorFlow run \
in processes of their own, which sleep between turns. PyTorch's gradients lie in buckets of 25 MiB \
that are reduced without a copy, and its AdamW is the fused one. TensorFlow's MirroredStrategy \
reduces to one device, its fastest way on CPUs, and updates with the fused Adam of `tf.compat.v1`; \
once without weight decay, which is less work. *Differs by*: the largest difference from "ours, \
sharded" after the same steps, over the last element of every matrix.

The lower bound: with P parameters on N shards, every shard's gradients are read (N·P), parameters \
and two moments are read once (3·P), the moments are written once (2·P) and the new parameters \
into every shard's copy (N·P). That is (2·N + 5)·P·4 bytes, divided by the measured memory \
bandwidth: the best of several large copies on all cores, reads and writes both counted.""",
    "step": f"{_IN_TURN}\n\n{_PROBLEMS}",
    "processes": f"""\
{_IN_TURN}

The MLP has four layers of one width and 128 rows in all. Each candidate is a group of processes \
that sleeps between its turns; messages go over gloo and the loopback. PyTorch's gradients are \
views of the buckets that DDP reduces beside the backward pass, and its AdamW is the fused one; \
with ZeRO each rank updates a part of the parameters and broadcasts it, and its fp16 hook sends \
gradients in float16. All wait for the loss of each step. *Differs by*: the largest difference \
from "ours, replicated" after the same steps, over the last element of every array.

All processes, PyTorch's too, keep the memory that they take, in large pages, as `crossshard \
launch --cpu-devices` sets them up.

In bfloat16 and float16 half of the bytes are sent, in int8 a quarter and in int4 an eighth \
([wires](wires.md)). On a loopback a byte costs no more than a copy, and two cores pack it: few \
bits lose here, ours by more than PyTorch's hook, since each number is divided, rounded, packed \
and unpacked, and what is lost is kept. They are for networks that a step waits for.

Where ours is slower, *parts of a step alone* shows why. With 10 million parameters our gradients \
take no longer than PyTorch's, a sum over gloo about twice as long, and an update 1.6 times; with \
one million all three take longer. XLA's sum takes memory of its own, and PyTorch's works in \
place; XLA for CPUs updates with AdamW in several passes over memory, where PyTorch's fused one \
takes one. And a replicated update sums all gradients when the backward pass has ended, while DDP \
sums its buckets beside it.""",
    "accumulation": f"""\
{_IN_TURN}

{_PROBLEMS} All but `optax.MultiSteps` scan over the microbatches in one program. MultiSteps takes \
a call for each, and only the last is waited for; every call runs the `pmean` of the gradients.

*MB sent* is what one shard sends in all calls, read by `crossshard.inspect` from the \
compiled programs; the lower bound is 2(N−1)/N of the bytes of the parameters. *Differs by*: the \
largest difference from "ours, sharded" after the same steps, over the last element of every \
array.""",
    "same_bits": f"""\
{_IN_TURN}

{_PROBLEMS} Muon and the clip update 24 matrices of 352 × 352, the layers of an MLP. With virtual \
shards each shard computes eight divided by the number of shards, one after the other. *In \
microbatches* the plain step computes as many pieces, of as many rows.

*MB sent* is what one shard sends in a step, read by `crossshard.inspect` from its compiled \
program; the lower bound is 2(N−1)/N of the bytes of the parameters. *Ours ÷ this* is that of \
"ours, sharded", the plain step. *Differs by*: the largest difference from the first row after the \
same steps, over the last element of every array.""",
    "ema": f"""\
{_IN_TURN}

{_PROBLEMS} By hand, `optax.incremental_update` follows the update. *Average costs* is the time of \
the candidate less that of the same candidate without an average, which took turns too, and *MB of \
average* is what its state has more. A difference whose quartiles have both signs is smaller than \
the noise. State is counted from the arrays on the first shard, without the parameters.""",
    "parts": f"""\
{_IN_TURN}

The model is a tree of arrays: an embedding, which is the output layer too, and eight blocks of \
512 and 2,048 columns with GELU, stacked, in a `lax.scan` with `jax.checkpoint`; 128 rows in all. \
All candidates run in one process and donate parameters and state. *jit with shardings* is the \
step of the whole batch in a `jax.jit`: each matrix and its moments are split along an axis that \
is not that of the layers, the batch by rows, and XLA makes the collectives: in the backward pass \
it sends activations, which are few with so few rows, where ours sums the gradients of the \
matrices. *Ours ÷ this* is that of "ours, params sharded". Bytes are those of the live arrays on \
the first device, between two steps. *Differs by*: the largest difference from "ours, params \
sharded" after the same steps, over the last element of every array.""",
    "dealt": f"""\
{_IN_TURN}

The model is an MLP of 24 layers of 352 columns with GELU, without biases: 24 matrices, or one \
stack of them in a `lax.scan`; 32 rows in all. Muon is `optax.contrib.muon`. All candidates run in \
one process and donate parameters and state. *Ours ÷ this* is that of "ours, sharded". *MB sent* \
is what one shard sends in a step, read from its compiled program; the lower bound is 2(N−1)/N of \
the parameters' bytes. *S to compile*: to trace, lower and compile the step once more. *Differs \
by*: the largest difference from "ours, sharded" after the same steps, over the last element of \
every array.""",
    "overhead": _IN_TURN,
    "import": """\
Each round starts a new interpreter, imports the dependencies and then crossshard, and times both. \
Bytecode and file caches are warm. The table shows the median, the quartiles and the minimum over \
the rounds; the last column is the difference of the two minima.""",
}


def write(report: Report, out: Path) -> None:
    """Write the page and the raw times.

    Raises:
      ArgumentError: a file cannot be written.
    """
    page, times = (out / f"{report.bench}{suffix}" for suffix in (".md", ".json"))
    try:
        times.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
        age.write(page, _page(report, times.name))
    except OSError as error:
        raise _cannot_write(out, error) from None


def make_folder(out: Path) -> None:
    """Create the output folder before anything is measured.

    Raises:
      ArgumentError: the folder cannot be created or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(0, "no permission")
    except OSError as error:
        raise _cannot_write(out, error) from None


def _cannot_write(out: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"Cannot write to {out}: {error.strerror}. Name another folder with --out."
    )


def _page(report: Report, times: str) -> str:
    title, what = _HEADS[report.bench]
    machine = report.machine
    paragraphs = [f"# {title}", what]
    if report.quick:
        paragraphs.append("**Run with `--quick`: sizes that only show that it runs.**")
    paragraphs += [report.tables(), *(f"- {note}" for note in report.notes)]
    paragraphs += ["## How it was measured", _METHODS[report.bench]]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    paragraphs.append(
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}; load "
        f"{machine.load:g} before it began; {machine.date}. {versions}. {report.rounds} rounds; "
        f"each round's times are in [{times}]({times}). To repeat: "
        f"`python -m benchmarks {report.bench}`."
    )
    return "\n\n".join(paragraphs) + "\n"
