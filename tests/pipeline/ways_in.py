"""Runs a combination of options in each of the three ways in, and in the model of numpy."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard
from crossshard import CrossShardOptimizer, DynamicLossScale, make_train_step
from tests.reference import pipeline_model as numpy_model
from tests.step.common import in_shard_map, on_variables

N, STEPS, ROWS = 4, 6, 2
GROUPS = [[0, 2], [1, 3]]
RNG = np.random.default_rng(0)
INIT = {
    # Large enough that a sharded update splits it, while the bias stays whole.
    "kernel": RNG.normal(size=(40, 32)).astype(np.float32) * np.float32(0.3),
    "bias": RNG.normal(size=32).astype(np.float32),
}
# Exact in every dtype, so that all runs start from the same parameters.
INIT = {name: numpy_model.to_bfloat16(x).astype(np.float32) for name, x in INIT.items()}
# float32[steps, microbatches, shards, rows, …], of another size on each shard.
X = RNG.normal(size=(STEPS, 2, N, ROWS, 40)) * RNG.uniform(0.05, 0.3, size=(1, 1, N, 1, 1))
X = X.astype(np.float32)
Y = RNG.normal(size=(STEPS, 2, N, ROWS, 32)).astype(np.float32)
WEIGHTS = RNG.uniform(0.5, 3, size=(STEPS, 2, N)).astype(np.float32)
# The step and shard whose data are infinite, if there is a loss scale.
BAD_STEP, BAD_SHARD = 1, 2
# The steps in which one shard has no weight and NaN for data, and in which no shard of a group has.
STEP_OF_NAN, STEP_WITHOUT = 2, 3
# The step and shard whose data are NaN, if something is done about that.
NONFINITE_STEP, NONFINITE_SHARD = 4, 3


@dataclasses.dataclass(frozen=True)
class Combination:
    """The options of one run; see ``FACTORS`` for their values."""

    way: str = "step, replicated"
    optimizer: str = "sgd"
    schedule: bool = False
    reduction: str = "mean"
    grouped: bool = False
    preprocess: str | None = None
    weights: str | None = None
    accumulate: int = 1
    wire: str | None = None
    scale: bool = False
    precision: str = "float32"
    ema: float | None = None
    metrics: tuple[str, ...] = ()
    nonfinite: str | None = None
    compared: int | None = None
    workers: str | None = None

    def __str__(self) -> str:
        given = dataclasses.asdict(self)
        way = given.pop("way")
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        told = [f"{k}={v}" for k, v in given.items() if v != defaults[k]]
        return ", ".join([way.replace(",", ""), *told]).replace("'", "")

    @property
    def dtype(self) -> str:
        """The dtype of the parameters."""
        return self.precision.split()[0]

    @property
    def masters(self) -> bool:
        """Whether there are master weights."""
        return self.precision.endswith("masters")

    @property
    def is_update(self) -> bool:
        """Whether the optimizer is called as an Optax transformation."""
        return self.way.startswith("update")

    @property
    def is_step(self) -> bool:
        """Whether ``make_train_step`` builds the step."""
        return self.way.startswith("step")

    @property
    def is_counted(self) -> bool:
        """Whether the loss returns what its rows count."""
        return (self.weights or "").startswith("counted")

    @property
    def is_sharded(self) -> bool:
        """Whether the weight update is sharded."""
        return "sharded" in self.way


SYNC_EVERY = {"rarely": 2, "streaming": 3}
NORMS = ("grad_norm", "update_norm", "param_norm")
NOISE = ("local_grad_norm", "noise_scale", "noise_variance", "noise_signal")
FACTORS: dict[str, tuple[Any, ...]] = {
    "way": (
        "update, types",
        "update, no types",
        "update, sharded, types",
        "update, sharded, no types",
        "variables, minimize",
        "variables, pairs",
        "step, replicated",
        "step, sharded",
    ),
    "optimizer": ("sgd", "momentum", "adam", "clip, sgd", "lamb"),
    "schedule": (False, True),
    "reduction": ("mean", "sum"),
    "grouped": (False, True),
    "preprocess": (None, "clip", "trace"),
    # Counts are those of a loss that returns a Mean, which only a whole step takes with all else.
    "weights": (None, "some", "none in a step", "counted", "counted, none in a step"),
    "accumulate": (1, 2),
    "wire": (None, "bfloat16", "int8", "int4"),
    "scale": (False, True),
    "precision": (
        "float32",
        "bfloat16",
        "float16",
        "bfloat16 with masters",
        "float16 with masters",
    ),
    "ema": (None, 0.9),
    "metrics": ((), NORMS, NOISE, ("learning_rate",)),
    "nonfinite": (None, "quarantine", "skip"),
    # How often the copies are compared, which only a whole step does.
    "compared": (None, 2),
    # Groups, or shards, that become one again rarely, which only a whole step does.
    "workers": (None, "rarely", "streaming"),
}


# The data.


def batch_of(combination: Combination, step: int) -> dict[str, np.ndarray]:
    """``[microbatches, shards, rows, …]`` of one step, with a weight for each row."""
    number = combination.accumulate
    x, y = X[step, :number].copy(), Y[step, :number]
    if combination.scale and step == BAD_STEP:
        x[number - 1, BAD_SHARD, 0, 0] = np.inf
    if combination.nonfinite is not None and step == NONFINITE_STEP:
        x[0, NONFINITE_SHARD, 0, 0] = np.nan
    weights = np.ones((number, N), np.float32)
    if combination.weights is not None:
        weights = WEIGHTS[step, :number].copy()
        if step == STEP_OF_NAN:
            weights[0, 1] = 0
        if "none in a step" in combination.weights and step == STEP_WITHOUT:
            weights[:, list(GROUPS[0]) if combination.grouped else slice(None)] = 0
        x[weights == 0] = np.nan
    rows = np.broadcast_to(weights[..., None] / ROWS, (number, N, ROWS)).astype(np.float32)
    return {"x": x, "y": y, "weight": rows}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    # In float32, so that only the gradient is rounded to the dtype of the parameters.
    kernel, bias = (params[name].astype(jnp.float32) for name in ("kernel", "bias"))
    return ((batch["x"] @ kernel + bias - batch["y"]) ** 2).sum(-1).mean() / 2


def counted_loss(params: Any, batch: Any) -> crossshard.Mean:
    """The same, of rows that count differently, or not at all."""
    kernel, bias = (params[name].astype(jnp.float32) for name in ("kernel", "bias"))
    counts = batch["weight"]
    x = jnp.where(counts[:, None] > 0, batch["x"], 0)
    losses = ((x @ kernel + bias - batch["y"]) ** 2).sum(-1) / 2
    return crossshard.Mean((losses * counts).sum(), counts.sum(), "loss")


def weight_of(batch: Any) -> jax.Array:
    return batch["weight"].sum()


# The options.


def inner_of(combination: Combination) -> optax.GradientTransformation:
    first = numpy_model.OPTIMIZERS[combination.optimizer][1]
    rate: Any = optax.linear_schedule(first, 0.0, 10) if combination.schedule else first
    made = {
        "sgd": optax.sgd,
        "momentum": lambda rate: optax.sgd(rate, momentum=numpy_model.DECAY),
        "adam": lambda rate: optax.adam(rate, eps=numpy_model.EPS),
        "clip, sgd": lambda rate: optax.chain(
            optax.clip_by_global_norm(numpy_model.INNER_CLIP), optax.sgd(rate)
        ),
        "lamb": lambda rate: optax.lamb(rate, eps=numpy_model.EPS),
    }[combination.optimizer]
    if "learning_rate" not in combination.metrics or not combination.schedule:
        return made(rate)
    # Only so does the state tell the rate.
    told = optax.inject_hyperparams(
        lambda learning_rate: made(learning_rate), hyperparam_dtype=jnp.float32
    )
    return told(learning_rate=rate)


def scale_of(combination: Combination) -> tuple[float, int] | None:
    # In float16 the first is too large for the gradients, which overflow without any infinity.
    first = 2.0**15 if combination.dtype == "float16" else 2.0**8
    return (first, 2) if combination.scale else None


def optimizer_of(combination: Combination, **options: Any) -> CrossShardOptimizer:
    preprocess = {
        None: lambda: None,
        "clip": lambda: optax.clip_by_global_norm(numpy_model.CLIP),
        "trace": lambda: optax.trace(numpy_model.DECAY),
    }[combination.preprocess]()
    return CrossShardOptimizer(
        inner_of(combination),
        combination.reduction,
        group_assignment=GROUPS if combination.grouped else None,
        preprocess=preprocess,
        **options,
    )


def options_of(combination: Combination) -> dict[str, Any]:
    """The options that ``make_train_step`` takes as well; those that are off are left out."""
    scale = scale_of(combination)
    given = {
        "accumulate_steps": combination.accumulate if combination.accumulate > 1 else None,
        "reduce_dtype": combination.wire,
        "loss_scale": DynamicLossScale(*scale) if scale else None,
        "master_dtype": "float32" if combination.masters else None,
        "ema": combination.ema,
        "metrics": combination.metrics or None,
        "nonfinite": combination.nonfinite,
        "check_divergence": combination.compared,
    }
    if combination.workers is not None:
        given |= {
            "sync_every": SYNC_EVERY[combination.workers],
            "sync_streaming": combination.workers == "streaming",
            "outer_optimizer": optax.sgd(
                numpy_model.OUTER_RATE, numpy_model.OUTER_DECAY, nesterov=True
            ),
        }
    return {name: value for name, value in given.items() if value is not None}


def params_of(combination: Combination) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x, combination.dtype) for name, x in INIT.items()}


# A run shows ``{name: array}`` after every step, and at its end: one entry per shard.

Shown = dict[str, np.ndarray]


@dataclasses.dataclass
class Run:
    """What a run showed: after each step, and at its end.

    For the model also how large an element of a shard's gradient was in any step, and by how much
    an error in the norms is magnified in the metrics of noise.
    """

    steps: list[Shown]
    end: Shown
    largest: float = 0.0
    magnified: Shown = dataclasses.field(default_factory=dict)


_DIMENSIONS = {"kernel": 2, "bias": 1}


def _each(x: Any, name: str = "") -> np.ndarray:
    """``[shards, …]`` of an array that is stored so, or once for all shards."""
    x = np.asarray(x.array if isinstance(x, crossshard.nnx.PerShardArray) else x).astype(np.float64)
    dimensions = _DIMENSIONS.get(name, 0)
    if x.ndim == dimensions:
        return np.broadcast_to(x, (N, *x.shape))
    # What a stage has per shard is [1, …] on each of them.
    return x.reshape(N, *x.shape[x.ndim - dimensions :])


def _tree(name: str, tree: Any) -> Shown:
    return {f"{name}/{key}": _each(x, key) for key, x in tree.items()}


def _found(state: crossshard.pipeline.NonfiniteState | tuple[()]) -> Shown:
    """What the state says of the last update: whose gradient was not finite."""
    return {name: _each(x) for name, x in state._asdict().items()} if state else {}


def _named(found: Any) -> Shown:
    return {name: _each(x) for name, x in (found or {}).items()}


def _state(state: Any) -> Shown:
    """What the state of an optimizer shows."""
    shown: Shown = {}
    if jax.tree.leaves(state.preprocess):
        shown |= _tree("trace", state.preprocess.trace)
    if state.loss_scale != ():
        shown["scale"] = _each(state.loss_scale.scale)
        shown["good_steps"] = _each(state.loss_scale.good_steps)
    for name in ("masters", "ema"):
        found = optax.tree.get(state.inner_state, name)
        if found is not None:
            shown |= _tree(name, found)
    counts = optax.tree.get_all_with_path(state.inner_state, "count")
    if counts:
        shown["count"] = _each(counts[0][1])
    return shown


def by_calls(combination: Combination) -> Run:
    """As an Optax transformation, in a shard_map of the user's; or on NNX variables, in place."""
    given = loss_fn, params_of(combination), calls_of(combination)
    options = options_of(combination)
    if combination.is_update:
        weigh = None if combination.weights is None else weight_of
        where = "sharded" if combination.is_sharded else "replicated"
        opt = optimizer_of(combination, weight_update=where, **options)
        typed = "no types" not in combination.way
        calls: Any = in_shard_map(opt, *given, check_vma=typed, weigh=weigh)
    else:
        minimize = "minimize" in combination.way
        opt = optimizer_of(combination, **options)
        calls = on_variables(opt, *given, minimize=minimize)
    steps = []
    # The calls with which a step ends.
    last = itertools.islice(calls, combination.accumulate - 1, None, combination.accumulate)
    for params, state, *counts in last:
        found = _named(state.metrics) | _found(state.nonfinite)
        steps.append(
            _tree("params", params)
            | dict(zip(("count",), map(_each, counts), strict=False))
            | found
        )
    if combination.is_sharded and combination.grouped:
        state = state._replace(inner_state=_of_groups(state.inner_state))
    return Run(steps, _state(state))


def calls_of(combination: Combination) -> Any:
    """The batch of each call: that of one microbatch."""
    for t in range(STEPS):
        batch = batch_of(combination, t)
        for microbatch in range(combination.accumulate):
            yield {name: x[microbatch] for name, x in batch.items()}


def _of_groups(tree: Any) -> Any:
    """``[shards, …]`` of the slices of a group, as ``[shards, …]`` of the whole."""

    def one(x: Any) -> Any:
        x = np.asarray(x)
        if x.ndim < 3:
            return x
        whole = np.empty((N, x.shape[1] * len(GROUPS[0]), *x.shape[2:]), x.dtype)
        for group in GROUPS:
            whole[list(group)] = np.concatenate([x[shard] for shard in group])
        return whole

    return jax.tree.map(one, tree)


def by_train_step(combination: Combination) -> Run:
    """A whole step, built by make_train_step."""
    is_weighted = combination.weights is not None and not combination.is_counted
    step = make_train_step(
        counted_loss if combination.is_counted else loss_fn,
        optimizer_of(combination),
        num_shards=N,
        weight_update="sharded" if combination.is_sharded else "replicated",
        weight=weight_of if is_weighted else None,
        # Each row of a shard has the same weight, by which the plain loss does not divide.
        loss_over="shard" if is_weighted else "rows",
        **options_of(combination),
    )
    state = step.init(params_of(combination))
    steps = []
    for t in range(STEPS):
        batch = batch_of(combination, t)
        # A shard's microbatches are consecutive rows.
        rows = {name: np.moveaxis(x, 0, 1).reshape(-1, *x.shape[3:]) for name, x in batch.items()}
        state, metrics = step(state, rows)
        shown = _tree("params", state.params) | {"count": _each(state.step)}
        if (divergence := metrics.pop("divergence", None)) is not None:
            shown["compared"] = _each(divergence.step)
            shown["differs"] = _each(divergence.diverged)
        shown |= _found(metrics.pop("nonfinite", ()))
        if combination.is_counted:
            metrics["weight"] = metrics.pop("counts")["loss"]
            metrics.pop("terms")
        steps.append(shown | _named(metrics))
    return Run(steps, _state(step.unshard(state).opt_state))


def run(combination: Combination) -> Run:
    """What the package shows."""
    return by_train_step(combination) if combination.is_step else by_calls(combination)


# What the model shows.


def model_options(combination: Combination) -> numpy_model.Options:
    # Whole or on global arrays, the bias is too small to be split.
    split = ("kernel",) if combination.is_sharded else ()
    # Unscaled gradients, and sums of several, have at least 32 bits.
    is_widened = combination.scale or combination.accumulate > 1
    groups = GROUPS if combination.grouped else None
    if combination.workers is not None and groups is None:
        groups = tuple((shard,) for shard in range(N))
    return numpy_model.Options(
        shards=N,
        groups=groups,
        reduction=combination.reduction,
        optimizer=combination.optimizer,
        schedule=combination.schedule,
        preprocess=combination.preprocess,
        wire=combination.wire,
        split=split,
        scale=scale_of(combination),
        dtype=combination.dtype,
        local_dtype="float32" if is_widened else combination.dtype,
        masters=combination.masters,
        ema=combination.ema,
        # Only a whole step knows how many rows there are.
        examples=ROWS * combination.accumulate if combination.is_step else 1,
        nonfinite=combination.nonfinite,
        sync_every=SYNC_EVERY.get(combination.workers or ""),
        streaming=combination.workers == "streaming",
        counted=combination.is_counted,
    )


def run_model(options: numpy_model.Options, combination: Combination) -> Run:
    """What numpy shows."""
    model, steps = numpy_model.Model(options, INIT), []
    count, largest, magnified = 0, 0.0, {"of_variance": 0.0, "of_signal": 0.0}
    with np.errstate(invalid="ignore", over="ignore"):
        for t in range(STEPS):
            batch = batch_of(combination, t)
            pairs = [
                list(zip(x, y, strict=True)) for x, y in zip(batch["x"], batch["y"], strict=True)
            ]
            weighted = combination.weights is not None
            model.step(pairs, batch["weight"].sum(-1) if weighted else None)
            shown = _tree("params", model.each(lambda replica: replica.params))
            if combination.compared is not None:
                is_compared = count % combination.compared == 0
                shown["compared"] = np.full(N, float(count if is_compared else -1))
                shown["differs"] = np.zeros(N)
            count += not model.metric("skipped").all()
            shown |= _metrics(model, combination)
            if combination.nonfinite is not None:
                shown |= _of_bad(model)
            if not combination.is_update:
                # One count for all groups, of the steps that any of them took.
                shown["count"] = np.full(N, float(count))
            steps.append(shown)
            found = [each["largest"] for each in model.of_step if np.isfinite(each["largest"])]
            largest = max([largest, *found])
            for name in ("of_variance", "of_signal"):
                found = [abs(each.get(name, 0.0)) for each in model.of_step]
                magnified[name] = max(magnified[name], *found)
    end: Shown = {}
    if options.preprocess == "trace":
        end |= {f"trace/{name}": np.stack([t[name] for t in model.traces]) for name in INIT}
    if options.scale is not None:
        end["scale"], end["good_steps"] = np.full(N, model.scale), np.full(N, model.good_steps)
    if options.masters:
        end |= _tree("masters", model.each(lambda replica: replica.masters))
    if options.ema is not None:
        end |= _tree("ema", model.each(lambda replica: replica.ema))
    if options.schedule or options.optimizer in ("adam", "lamb"):
        end["count"] = np.array([model.replica_of(shard).count for shard in range(N)])
    return Run(steps, end, largest, magnified)


def _of_bad(model: numpy_model.Model) -> Shown:
    first = min(model.bad, default=-1)
    found = {
        "shard": first,
        "leaf": model.bad.get(first, -1),
        "shards": len(model.bad),
        # What is finite on each shard is so in the sum, since gradients are small.
        "overflow": 0,
        "in_a_row": model.in_a_row,
    }
    return {name: np.full(N, float(value)) for name, value in found.items()}


def _metrics(model: numpy_model.Model, combination: Combination) -> Shown:
    names = list(combination.metrics)
    if combination.is_step:
        names.append("loss")
        names += ["weight"] if combination.weights is not None else []
        names += ["loss_scale"] if combination.scale else []
        may_skip = combination.scale or combination.nonfinite is not None
        names += ["skipped"] if may_skip or combination.weights is not None else []
    shown = {name: model.metric(name) for name in names if name != "noise_scale"}
    if "noise_scale" in names:
        shown["noise_scale"] = shown["noise_variance"] / shown["noise_signal"]
    return shown
