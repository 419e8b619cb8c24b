"""The options of the training command."""

import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from flax import nnx

from crossshard.errors import ArgumentError

DEFAULT_BATCH = 16
# Virtual CPU devices are threads and buffers; more would overload a machine.
MOST_SHARDS = 1024
FEW_BITS = ("int8", "int4", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a small language model on text, each step split over shards.

    The model reads bytes and predicts the next one. Every shard computes the gradient of its part
    of the batch, CrossShardOptimizer reduces them, and the Optax optimizer of your choice steps.
    At the end the step is verified: with plain SGD, all shards must take the step of one device.

    Ctrl-C stops after the current step, with everything so far written to the output folder; a
    second one ends at once.

    With --save-every, what was stopped goes on with --resume, on as many shards or on others.

    The exit code is 0 if all went well, or if SIGTERM stopped a run that saves; 1 if the training
    diverged, the step is wrong or something could not be written; 2 if what was asked cannot be
    done; 3 if --nonfinite or --check-divergence ended the run; 130 after Ctrl-C.
    """

    data: Path | None = None
    """A text file, or a folder of them; by default the sources of Python's standard library."""

    optimizer: str = "adamw"
    """Any name in optax or optax.contrib, or package.module:factory for one of your own."""

    learning_rate: float | None = None
    """By default the optimizer's own, or one chosen for it; printed at the start."""

    schedule: Literal["constant", "cosine"] = "constant"
    """Whether the learning rate rises, and falls along a cosine until the last of the steps."""

    reduction: Literal["mean", "sum"] = "mean"
    """The reduction of gradients over the shards."""

    shards: int | None = None
    """By default 8 on CPU devices, or all others."""

    weight_update: Literal["auto", "replicated", "sharded"] = "auto"
    """Whether each shard updates all parameters, or its slice of them."""

    params: Literal["replicated", "sharded"] = "replicated"
    """Whether each shard keeps all parameters, or its slice of them."""

    gather_dtype: str | None = None
    """bfloat16, int8, int4 or float8_e4m3fn: how --params sharded sends parameters."""

    weight: bool = False
    """Rows end where their file does, shards count by their bytes, and --batch is any number."""

    accumulate_steps: int = 1
    """Microbatches of each shard in a step."""

    virtual_shards: int | None = None
    """Parts of the batch that are added in one order, whatever number of shards divides them."""

    wrt: str | None = None
    """Train only the parameters with such a name: 'blocks/*' for those of the blocks."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the computation."""

    param_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the parameters."""

    master_dtype: str | None = None
    """float32 to keep parameters of 16 bits in 32 bits too."""

    reduce_dtype: str | None = None
    """bfloat16 to send gradients in 16 bits, or int8, int4, float8_e4m3fn, with error feedback."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How gradients of few bits are rounded."""

    error_feedback: bool = True
    """Whether what few bits lose of a gradient is added to the next one."""

    sync_every: int | None = None
    """Shards, or --workers, train alone for so many steps before they become one again."""

    sync_streaming: bool = False
    """With --sync-every, a part of the parameters becomes one in every step, beside it."""

    workers: int | None = None
    """With --sync-every, so many groups of shards, which reduce inside in every step."""

    outer_learning_rate: float = 1.0
    """With --sync-every, that of the outer optimizer; 1 without momentum takes the mean."""

    outer_momentum: float = 0.0
    """With --sync-every, its Nesterov momentum; DiLoCo has 0.9 and a rate of 0.7."""

    outer_reduce_dtype: str | None = None
    """With --sync-every, how the workers send what they have moved; as --reduce-dtype."""

    loss_scale: Literal["dynamic"] | None = None
    """dynamic to scale the loss, as float16 needs it."""

    nonfinite: Literal["quarantine", "skip", "raise", "off"] = "off"
    """A shard whose gradient is not finite is left out, its step is skipped, or the run ends."""

    check_divergence: int | None = None
    """Compare the shards' copies of the parameters every so many steps."""

    on_divergence: Literal["raise", "repair"] = "raise"
    """Whether copies that differ end the run, or get the value of the majority."""

    ema: float | None = None
    """Decay of a moving average of the parameters, such as 0.99; it is evaluated too."""

    metrics: tuple[str, ...] = ()
    """Further metrics, such as grad_norm update_norm noise_scale."""

    steps: int = 300
    """The number of optimizer steps."""

    batch: int | None = None
    """Rows in a batch, over all shards; by default 16, rounded up to a multiple of the shards."""

    context: int = 64
    """Bytes in a row: how far the model looks back."""

    layers: int = 3
    """Layers of the model."""

    width: int = 160
    """Width of the model, a multiple of 32; the defaults give a million parameters."""

    seed: int = 0
    """Seed of initial parameters and batches; batches are the same for any number of shards."""

    out: Path | None = None
    """A new or empty folder for metrics, curves and summary; by default a fresh one in runs/."""

    save_every: int | None = None
    """Save a checkpoint in the --out folder every so many steps, and where the run ends."""

    memory: Path | None = None
    """With --out, also keep the state in this folder in memory, such as /dev/shm/my-run."""

    memory_every: int = 10
    """How many steps there are from one state in --memory to the next."""

    memory_copies: int = 1
    """With 2, each host keeps the parts of the next one in --memory, too."""

    resume: bool = False
    """Go on with the run in the --out folder from its latest checkpoint, if there is one."""

    def check(self) -> None:
        """Raise an ``ArgumentError`` for an impossible number."""
        numbers = "shards", "accumulate_steps", "virtual_shards", "steps", "batch", "context"
        for name in (*numbers, "save_every", "memory_every", "memory_copies", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{_flag(name)} must be at least 1; got {value}.")
        for name in ("save_every", "resume", "memory"):
            if getattr(self, name) and self.out is None:
                raise ArgumentError(f"{_flag(name)} needs the folder of the run. Pass --out too.")
        of_workers = self.workers, self.outer_learning_rate, self.outer_momentum
        streaming = self.sync_streaming
        if self.sync_every is None and (streaming or of_workers != (None, 1.0, 0.0)):
            raise ArgumentError(
                "--workers, --sync-streaming, --outer-learning-rate and --outer-momentum are for "
                "--sync-every; pass it too."
            )
        if not self.sends_few_bits and (self.rounding, self.error_feedback) != ("nearest", True):
            raise ArgumentError(
                f"--rounding and --no-error-feedback are for --reduce-dtype {', '.join(FEW_BITS)}; "
                f"got {self.reduce_dtype}."
            )
        if not 0 <= self.seed < 2**32:
            raise ArgumentError(f"--seed must be from 0 to 2**32 - 1; got {self.seed}.")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ArgumentError(f"--learning-rate must be a number above 0; got {rate}.")

    def pieces(self, shards: int) -> int:
        """How many pieces a global batch is cut into on this many shards."""
        return (self.virtual_shards or shards) * self.accumulate_steps

    @property
    def sends_few_bits(self) -> bool:
        """Whether gradients are sent in few bits."""
        return self.reduce_dtype in FEW_BITS

    def unlike_one_shard(self) -> str:
        """Why one shard does not take the same steps, by more than rounding; empty if it does."""
        if self.sync_every is not None:
            return "workers that train alone are no single one"
        of_parameters = self.gather_dtype in FEW_BITS
        if self.sends_few_bits or of_parameters:
            dtype = self.reduce_dtype if self.sends_few_bits else self.gather_dtype
            return f"{dtype} on the way between shards is more than rounding"
        return ""

    def rows(self, shards: int) -> int:
        """Rows of the global batch on this many shards.

        Raises:
          ArgumentError: the batch does not divide by the shards and their microbatches, or there
            are more shards than virtual ones.
        """
        virtual, parts = self.virtual_shards or shards, self.pieces(shards)
        if virtual < shards:
            raise ArgumentError(f"--virtual-shards {virtual} must be at least the {shards} shards.")
        if self.batch is None:
            return math.ceil(DEFAULT_BATCH / parts) * parts
        # crossshard refuses it too, but not where each process cuts out its own rows.
        if self.batch % parts and not self.weight:
            near = max(1, self.batch // parts) * parts
            raise ArgumentError(
                f"A batch of {self.batch} rows does not divide evenly by {virtual} shards with "
                f"--accumulate-steps {self.accumulate_steps}. Pass --batch {near}, or --weight."
            )
        return self.batch

    def trains(self, path: Sequence[Any], variable: Any) -> bool:
        """Whether ``wrt`` chooses a variable of the model, as an NNX filter."""
        name = "/".join(map(str, path))
        return isinstance(variable, nnx.Param) and fnmatch.fnmatchcase(name, self.wrt or "*")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
