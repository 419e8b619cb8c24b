"""The whole pipeline once more, in plain numpy and float64, to compare every way in with.

It is written from the words of the documentation and of the papers, not from the package, which it
does not import. One ``Model`` is all shards of a run: ``step`` takes what all shards see in one
update, and ``observed`` says what the run should show after it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Tree = dict[str, np.ndarray]

LEARNING_RATE, CLIP, INNER_CLIP, DECAY = 0.1, 2.0, 1.0, 0.9
B1, B2 = 0.9, 0.999
# Of workers that synchronise rarely.
OUTER_RATE, OUTER_DECAY = 0.7, 0.9
# An eps that does not magnify rounding where a gradient is nearly zero.
EPS = 1e-3


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run is asked for; the defaults are a plain mean over all shards and SGD.

    Attributes:
      shards: the number of shards.
      groups: the groups that reduce independently; ``None`` for one of all shards.
      reduction: ``"mean"`` or ``"sum"``.
      optimizer: a name of ``OPTIMIZERS``.
      schedule: whether the learning rate falls from step to step.
      preprocess: ``None``, ``"clip"`` or ``"trace"``, on each shard's own gradient.
      wire: ``None``, or ``"bfloat16"``: the gradients of each shard are rounded before they are
        summed; or a key of ``FEW_BITS``: what that loses is added to the shard's next ones.
      split: the names of the parameters whose gradients each shard gets a slice of. Sums of the
        others are sent once more, and rounded once more.
      scale: the first loss scale and the number of good steps after which it grows, or ``None``.
      dtype: the dtype of the parameters, and of the state of ``preprocess``.
      local_dtype: the dtype in which ``preprocess`` takes and returns gradients.
      masters: whether there are master weights.
      ema: the decay of the moving average of the parameters, or ``None``.
      examples: the number of examples of a shard's gradient.
      nonfinite: ``None``, ``"quarantine"`` or ``"skip"``: what happens if a shard's gradient is not
        finite.
      sync_every: the number of steps after which the groups, which are workers, become one again;
        ``None`` if they never do.
      streaming: whether a part of the parameters does so in each of these steps.
      counted: whether weights are counts of the loss, which divides by their sum over the group, so
        that they multiply the gradient of a shard before anything else is done to it.
    """

    shards: int
    groups: tuple[tuple[int, ...], ...] | None = None
    reduction: str = "mean"
    optimizer: str = "sgd"
    schedule: bool = False
    preprocess: str | None = None
    wire: str | None = None
    split: tuple[str, ...] = ()
    scale: tuple[float, int] | None = None
    dtype: str = "float32"
    local_dtype: str = "float32"
    masters: bool = False
    ema: float | None = None
    examples: int = 1
    nonfinite: str | None = None
    sync_every: int | None = None
    streaming: bool = False
    counted: bool = False


# Rounding.


def to_bfloat16(x: Any) -> np.ndarray:
    """Rounded to the nearest of 16 bits, of two equally near to the even one."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    found = rounded.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isfinite(x), found, x)


def round_to(x: Any, dtype: str) -> np.ndarray:
    """The values that an array of this dtype has; float32 counts as exact."""
    if dtype == "bfloat16":
        return to_bfloat16(x)
    with np.errstate(over="ignore"):
        return np.float64(np.float16(x)) if dtype == "float16" else np.float64(x)


# The bits of each dtype of few bits, and how many numbers share a scale.
FEW_BITS = {"int8": (8, 128), "int4": (4, 64), "float8_e4m3fn": (8, 128)}


def to_few_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers in blocks, whose scale has 16 bits and is rounded up.

    Of the two ends of a block the larger one is written as negative, of which there is one more;
    the other one is up to half a unit beyond the last number.
    """
    bits, block = FEW_BITS[dtype]
    flat = x.ravel()
    blocks = np.pad(flat, (0, -flat.size % block)).reshape(-1, block)
    ends = np.stack([blocks.max(1), -blocks.min(1)], 1)
    if dtype.startswith("float8"):
        sizes, sign = ends.max(1) / 448, np.ones(len(blocks))
    else:
        most = 2.0 ** (bits - 1)
        sizes = np.maximum(ends.max(1) / most, ends.min(1) / (most - 0.5))
        sign = np.where(ends[:, 0] > ends[:, 1], -1, 1)
    up = ((np.float32(sizes).view(np.uint32) + 0xFFFF) & 0xFFFF0000).astype(np.uint32)
    scale = (sign * np.float64(up.view(np.float32)))[:, None]
    ratio = blocks / np.where(scale == 0, 1, scale)
    if dtype.startswith("float8"):
        ratio = np.clip(ratio, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    else:
        ratio = np.clip(np.rint(ratio), -most, most - 1)
    return (np.float64(ratio) * scale).ravel()[: flat.size].reshape(x.shape)


def as_rows(x: np.ndarray, number: int, *, split: bool) -> np.ndarray:
    """``[number, width]``: the elements in order, for each shard; of whole rows of 128 if all."""
    flat, unit = x.ravel(), number if split else number * 128
    return np.pad(flat, (0, -flat.size % unit)).reshape(number, -1)


def each_row(x: np.ndarray, number: int, dtype: str, *, split: bool) -> np.ndarray:
    """Numbers of which every shard's have blocks of their own."""
    rows = np.stack([to_few_bits(row, dtype) for row in as_rows(x, number, split=split)])
    return rows.ravel()[: x.size].reshape(x.shape)


def _zeros(tree: Tree) -> Tree:
    return {name: np.zeros_like(x) for name, x in tree.items()}


def norm(tree: Mapping[str, np.ndarray]) -> float:
    """The square root of the sum of all squares."""
    return float(np.sqrt(sum((x**2).sum() for x in tree.values())))


# The model: a linear one, and half the squared error, averaged over the rows.


def loss_of(params: Tree, x: np.ndarray, y: np.ndarray) -> float:
    """The mean over the rows of half the squared error."""
    return float(((x @ params["kernel"] + params["bias"] - y) ** 2).sum(-1).mean() / 2)


def gradient_of(params: Tree, x: np.ndarray, y: np.ndarray) -> Tree:
    """Its gradient, by hand."""
    error = (x @ params["kernel"] + params["bias"] - y) / len(x)
    return {"kernel": x.T @ error, "bias": error.sum(0)}


# Optimizers: each is a function of state, gradient, parameters and learning rate.


def _sgd(state: dict[str, Any], gradient: Tree, params: Tree, rate: float) -> Tree:
    return {name: -rate * g for name, g in gradient.items()}


def _momentum(state: dict[str, Any], gradient: Tree, params: Tree, rate: float) -> Tree:
    before = state.setdefault("trace", {name: 0.0 * g for name, g in gradient.items()})
    state["trace"] = {name: DECAY * before[name] + g for name, g in gradient.items()}
    return {name: -rate * v for name, v in state["trace"].items()}


def _adam_direction(state: dict[str, Any], gradient: Tree) -> Tree:
    zeros = {name: 0.0 * g for name, g in gradient.items()}
    m, v = state.setdefault("m", zeros), state.setdefault("v", zeros)
    t = state["t"] = state.setdefault("t", 0) + 1
    state["m"] = m = {name: B1 * m[name] + (1 - B1) * g for name, g in gradient.items()}
    state["v"] = v = {name: B2 * v[name] + (1 - B2) * g**2 for name, g in gradient.items()}
    return {
        name: (m[name] / (1 - B1**t)) / (np.sqrt(v[name] / (1 - B2**t)) + EPS) for name in gradient
    }


def _adam(state: dict[str, Any], gradient: Tree, params: Tree, rate: float) -> Tree:
    return {name: -rate * d for name, d in _adam_direction(state, gradient).items()}


def _clipped_sgd(state: dict[str, Any], gradient: Tree, params: Tree, rate: float) -> Tree:
    return _sgd(state, clip(gradient, INNER_CLIP), params, rate)


def _lamb(state: dict[str, Any], gradient: Tree, params: Tree, rate: float) -> Tree:
    def ratio(name: str, direction: np.ndarray) -> float:
        of_param, of_update = norm({name: params[name]}), norm({name: direction})
        return of_param / of_update if of_param and of_update else 1.0

    direction = _adam_direction(state, gradient)
    return {name: -rate * ratio(name, d) * d for name, d in direction.items()}


# Adam and LAMB take steps of the size of the learning rate, whatever the gradient.
OPTIMIZERS: dict[str, tuple[Callable[..., Tree], float]] = {
    "sgd": (_sgd, LEARNING_RATE),
    "momentum": (_momentum, LEARNING_RATE),
    "adam": (_adam, LEARNING_RATE / 10),
    "clip, sgd": (_clipped_sgd, LEARNING_RATE),
    "lamb": (_lamb, LEARNING_RATE),
}


def learning_rate(options: Options, count: int) -> float:
    """The learning rate after so many updates: constant, or a tenth less of it each time."""
    first = OPTIMIZERS[options.optimizer][1]
    return first * (1 - count / 10) if options.schedule else first


def clip(gradient: Tree, most: float) -> Tree:
    """The gradient, made shorter if it is longer than this."""
    length = norm(gradient)
    # Not finite, it stays so.
    factor = 1.0 if length <= most else most / length if np.isfinite(length) else np.nan
    return {name: g * factor for name, g in gradient.items()}


# The pipeline.


@dataclasses.dataclass
class _Replica:
    """What the shards of one group have: parameters and the state of the optimizer."""

    params: Tree
    masters: Tree
    ema: Tree
    optimizer: dict[str, Any]
    count: int = 0


class Model:
    """All shards of a run."""

    def __init__(self, options: Options, init: Tree):
        self.options = options
        self.groups = options.groups or (tuple(range(options.shards)),)
        wide = {name: np.float64(x) for name, x in init.items()}
        self.replicas = [
            _Replica(dict(wide), dict(wide), dict(wide), {}) for _ in range(len(self.groups))
        ]
        self.traces = [{name: 0.0 * x for name, x in wide.items()} for _ in range(options.shards)]
        self.residuals = [{name: 0.0 * x for name, x in wide.items()} for _ in self.traces]
        self.scale = options.scale[0] if options.scale else 1.0
        self.good_steps = 0
        self.bad: dict[int, int] = {}
        self.in_a_row = 0
        self.of_step: list[dict[str, Any]] = []
        self.anchor, self.taken = dict(wide), 0
        # Of the outer optimizer: for each part that is synchronised on its own.
        self.momenta = [_zeros(wide) for _ in range(options.sync_every or 0)]

    def step(self, batches: Any, weights: np.ndarray | None = None) -> list[dict[str, Any]]:
        """One update; what each group shows after it.

        Args:
          batches: ``batches[microbatch][shard]``, each ``(x, y)``.
          weights: float[microbatches, shards], or ``None``.
        """
        options, scale = self.options, self.scale
        before_traces = [dict(trace) for trace in self.traces]
        before_residuals = [dict(residual) for residual in self.residuals]
        before = [dict(replica.params) for replica in self.replicas]
        self.bad = {}
        reduced = [self._reduce(index, batches, weights) for index in range(len(self.groups))]
        self.in_a_row = self.in_a_row + 1 if self.bad else 0
        # A loss scale is one of all shards, so they skip together; so they do for a bad gradient.
        is_finite = all(
            np.isfinite(x).all() for found in reduced for x in found["gradient"].values()
        )
        guarded = options.scale is not None or options.nonfinite is not None
        overflowed = guarded and not is_finite
        weightless = [found["weight"] == 0 for found in reduced]
        for index, found in enumerate(reduced):
            skipped = overflowed or weightless[index]
            if skipped:
                for shard in self.groups[index]:
                    self.traces[shard] = before_traces[shard]
                    self.residuals[shard] = before_residuals[shard]
            found |= {"skipped": skipped, "loss_scale": scale}
            # A step that is skipped has none, and tells that of the last update.
            count = self.replicas[index].count
            found["learning_rate"] = learning_rate(options, max(0, count - skipped))
            found |= self._update(self.replicas[index], found["gradient"], skipped)
        if options.sync_every is not None:
            self._synchronise(options.sync_every, before, [found["change"] for found in reduced])
        if options.scale is not None and not all(weightless):
            self._rescale(overflowed)
        self.of_step = reduced
        return reduced

    def _local(
        self, shard: int, params: Tree, batches: Any, weights: Any, factors: Any = None
    ) -> tuple[Tree, Any, Any]:
        """The mean gradient and loss of a shard's microbatches, and their weight."""
        gradient: Tree = {name: np.zeros_like(x) for name, x in params.items()}
        loss = total = 0.0
        for number, batch in enumerate(batches):
            weight = 1.0 if weights is None else float(weights[number][shard])
            factor = 1.0 if factors is None else float(factors[number][shard])
            total += weight
            if weight == 0 or factor == 0:
                continue
            scaled = gradient_of(params, *map(np.float64, batch[shard]))
            for name, g in scaled.items():
                in_dtype = round_to(g * factor * self.scale, self.options.dtype) / self.scale
                gradient[name] = gradient[name] + weight * in_dtype
            loss += weight * factor * loss_of(params, *map(np.float64, batch[shard]))
        if total == 0:
            return gradient, 0.0, 0.0
        return {name: g / total for name, g in gradient.items()}, loss / total, total

    def _preprocess(self, shard: int, gradient: Tree) -> Tree:
        if self.options.preprocess == "clip":
            return clip(gradient, CLIP)
        if self.options.preprocess == "trace":
            dtype, local_dtype = self.options.dtype, self.options.local_dtype
            before = {n: round_to(DECAY * x, dtype) for n, x in self.traces[shard].items()}
            after = {n: round_to(before[n] + g, local_dtype) for n, g in gradient.items()}
            self.traces[shard] = {n: round_to(x, dtype) for n, x in after.items()}
            return after
        return gradient

    def _reduce(self, index: int, batches: Any, weights: Any) -> dict[str, Any]:
        """The reduced gradient of a group, with the loss, the weight and the norms."""
        if self.options.counted:
            return self._reduce_counted(index, batches, weights)
        return self._reduce_weighted(index, batches, weights)

    def _reduce_counted(self, index: int, batches: Any, counts: Any) -> dict[str, Any]:
        """The same, where each part's loss is divided by what all that are not left out count."""
        members, traces = self.groups[index], [dict(trace) for trace in self.traces]
        residuals = [dict(residual) for residual in self.residuals]
        left = members
        while True:
            total, parts = counts[:, list(left)].sum(), len(left) * len(batches)
            factors = counts * (parts / total if total else 0.0)
            found = self._reduce_weighted(index, batches, None, factors)
            # A shard's own mean, without the factors.
            each = [counts[:, shard].sum() if shard in left else 0.0 for shard in members]
            own = [
                {name: x * total / (n * len(left)) if n else x for name, x in tree.items()}
                for n, tree in zip(each, found.pop("own"), strict=True)
            ]
            found |= self._noise(own, each, True, found["gradient"])
            if not total:
                # The loss is 0, and has a gradient.
                found |= {"local_grad_norm": 0.0, "noise_variance": 0.0}
            good = tuple(shard for shard in members if shard not in self.bad)
            if self.options.nonfinite != "quarantine" or good == left:
                return found | {"weight": total}
            # Once more, without those that are left out.
            self.traces, self.residuals, left = traces, residuals, good

    def _reduce_weighted(
        self, index: int, batches: Any, weights: Any, factors: Any = None
    ) -> dict[str, Any]:
        options, members = self.options, self.groups[index]
        params = self.replicas[index].params
        # A shard in quarantine weighs nothing, the others what they do.
        has_weights = weights is not None or options.nonfinite == "quarantine"
        if weights is None and has_weights:
            number = len(batches)
            weights = np.full((number, options.shards), options.examples / number)
        own, losses, ws = [], [], []
        for shard in members:
            gradient, loss, weight = self._local(shard, params, batches, weights, factors)
            leaves = [not np.isfinite(gradient[name]).all() for name in sorted(gradient)]
            if weight and any(leaves):
                self.bad[shard] = leaves.index(True)
                if options.nonfinite == "quarantine":
                    gradient, loss, weight = _zeros(gradient), 0.0, 0.0
            own.append(self._preprocess(shard, gradient) if weight else gradient)
            losses.append(loss)
            ws.append(weight if has_weights else 1.0)
        total = sum(ws)
        divisor = 1.0 if options.reduction == "sum" else total or 1.0
        sums = {name: self._sum(name, own, ws, members, divisor) for name in params}
        if has_weights and total == 0 and options.wire not in FEW_BITS:
            # What is held back is sent all the same, and the step is skipped.
            sums = {name: np.zeros_like(x) for name, x in params.items()}
        gradient = {name: x / divisor for name, x in sums.items()}
        if options.dtype != "float32" and not options.masters:
            gradient = {name: round_to(g, options.dtype) for name, g in gradient.items()}
        found = {
            "gradient": gradient,
            "loss": sum(w * x for w, x in zip(ws, losses, strict=True)) / divisor,
            "weight": total if has_weights else None,
            "grad_norm": norm(gradient),
            # The largest element of a shard's gradient, as it counts in a sum.
            "largest": max(np.abs(x).max() for tree in own for x in tree.values())
            * (len(members) if options.reduction == "sum" else 1),
        }
        if factors is not None:
            return found | {"own": own}
        return found | self._noise(own, ws, has_weights, gradient)

    def _sum(
        self,
        name: str,
        own: list[Tree],
        ws: list[float],
        members: tuple[int, ...],
        divisor: float,
    ) -> np.ndarray:
        options = self.options
        weighted = [
            w * tree[name] if w else 0.0 * tree[name] for w, tree in zip(ws, own, strict=True)
        ]
        if options.wire is None or len(members) == 1:
            # A worker of one shard sends nothing.
            return np.sum(weighted, axis=0)
        if options.wire in FEW_BITS:
            # What is held back is a part of the mean.
            divided = [x / divisor for x in weighted]
            return self._sum_in_few_bits(name, divided, members) * divisor
        total = np.sum([round_to(x, options.wire) for x in weighted], axis=0)
        return total if name in options.split else round_to(total, options.wire)

    def _sum_in_few_bits(
        self, name: str, weighted: list[np.ndarray], members: tuple[int, ...]
    ) -> np.ndarray:
        wire, number = str(self.options.wire), len(members)
        if weighted[0].size < 128 * number:
            return np.sum(weighted, axis=0)
        given = [
            x + self.residuals[shard][name] for x, shard in zip(weighted, members, strict=True)
        ]
        split = name in self.options.split
        sent = [each_row(x, number, wire, split=split) for x in given]
        for x, y, shard in zip(given, sent, members, strict=True):
            self.residuals[shard][name] = x - y
        total = np.sum(sent, axis=0)
        if split:
            return total
        # Who has added a row sends it once more, and keeps what that loses.
        again = each_row(total, number, wire, split=False)
        for row, shard in enumerate(members):
            lost = as_rows(total - again, number, split=False)
            lost[[other for other in range(number) if other != row]] = 0
            own = lost.ravel()[: total.size].reshape(total.shape)
            self.residuals[shard][name] = self.residuals[shard][name] + own
        return again

    def _noise(
        self, own: list[Tree], ws: list[float], weighted: bool, gradient: Tree
    ) -> dict[str, Any]:
        """McCandlish et al. 2018, A.1: two batch sizes, two squared norms, two unknowns.

        The squared norm of a gradient of B examples is on average that of the true gradient plus
        1/B of the trace of the covariance of one example's. Weights count examples.
        """
        total, active = sum(ws), sum(w != 0 for w in ws)
        of_mean = self.options.reduction == "mean"
        big = norm(gradient) ** 2 / (1 if of_mean else len(ws) ** 2)
        if total == 0:
            return {"local_grad_norm": np.nan, "noise_variance": np.nan, "noise_signal": np.nan}
        small = sum(w * norm(g) ** 2 for w, g in zip(ws, own, strict=True) if w) / total
        found = {"local_grad_norm": np.sqrt(small)}
        per_big = 1 / total if weighted else 1 / (len(ws) * self.options.examples)
        # The mean over the shards of w / total · 1 / w is what one example more or less counts.
        per_small = active / total if weighted else 1 / self.options.examples
        if active < 2 or not np.isfinite([small, big]).all():
            return found | {"noise_variance": np.nan, "noise_signal": np.nan}
        equations = np.array([[1.0, per_small], [1.0, per_big]])
        signal, variance = np.linalg.solve(equations, [small, big])
        # How much an error of the two norms is magnified.
        of_variance = 1 / (per_small - per_big)
        magnified = {
            "of_variance": of_variance * small,
            "of_signal": of_variance * small * per_small,
        }
        return found | {"noise_variance": variance, "noise_signal": signal} | magnified

    def _update(self, replica: _Replica, gradient: Tree, skipped: bool) -> dict[str, Any]:
        """Take the step; its norm and that of the parameters after it."""
        options = self.options
        change = {name: np.zeros_like(x) for name, x in replica.params.items()}
        if not skipped:
            before = replica.params
            rate = learning_rate(options, replica.count)
            source = replica.masters if options.masters else replica.params
            update = OPTIMIZERS[options.optimizer][0]
            change = update(replica.optimizer, gradient, source, rate)
            replica.masters = {name: source[name] + change[name] for name in source}
            replica.params = {n: round_to(x, options.dtype) for n, x in replica.masters.items()}
            averaged = replica.masters if options.masters else replica.params
            decay = options.ema or 0.0
            replica.ema = {n: decay * replica.ema[n] + (1 - decay) * averaged[n] for n in averaged}
            replica.count += 1
            if options.masters:
                # The update of the parameters, not of the masters.
                change = {name: replica.params[name] - before[name] for name in before}
        return {
            "update_norm": norm(change),
            "param_norm": norm(replica.params),
            "change": change,
        }

    def _synchronise(self, every: int, before: list[Tree], changes: list[Tree]) -> None:
        """Nesterov's momentum on the mean over the workers of what they have moved.

        Args:
          every: the number of steps of a round.
          before: the parameters of each worker before this step.
          changes: what this step has added to them.
        """
        number, self.taken = self.taken % every, self.taken + 1
        if not self.options.streaming and number < every - 1:
            return
        dtype = self.options.dtype
        start = {name: round_to(x, dtype) for name, x in self.anchor.items()}
        away = [{name: start[name] - x for name, x in params.items()} for params in before]
        momentum = self.momenta[number]
        for name, anchor in self.anchor.items():
            part = np.ones(anchor.size, bool)
            if self.options.streaming:
                at = np.arange(anchor.size)
                part = (number * anchor.size // every <= at) & (
                    at < (number + 1) * anchor.size // every
                )
            part = part.reshape(anchor.shape)
            moved = [own[name] for own in away]
            if not self.options.streaming:
                moved = [x - change[name] for x, change in zip(moved, changes, strict=True)]
            mean = np.where(part, np.mean(moved, axis=0), 0)
            momentum[name] = OUTER_DECAY * momentum[name] + mean
            update = np.where(part, -OUTER_RATE * (OUTER_DECAY * momentum[name] + mean), 0)
            self.anchor[name] = anchor + update
            for replica, own in zip(self.replicas, moved, strict=True):
                here = self.anchor[name]
                if self.options.streaming:
                    # What the step has changed stays.
                    here = replica.params[name] + own + update
                replica.params[name] = np.where(part, round_to(here, dtype), replica.params[name])

    def _rescale(self, overflowed: bool) -> None:
        """Halve the scale, or double it after enough good steps."""
        assert self.options.scale is not None
        if overflowed:
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == self.options.scale[1]:
            self.scale, self.good_steps = self.scale * 2, 0

    # What a run shows, with one entry per shard.

    def replica_of(self, shard: int) -> _Replica:
        """The replica that a shard is part of."""
        return next(
            replica
            for members, replica in zip(self.groups, self.replicas, strict=True)
            if shard in members
        )

    def each(self, read: Callable[[_Replica], Tree]) -> Tree:
        """``[shards, …]`` of what each shard's replica has."""
        trees = [read(self.replica_of(shard)) for shard in range(self.options.shards)]
        return {name: np.stack([tree[name] for tree in trees]) for name in trees[0]}

    def metric(self, name: str) -> np.ndarray:
        """``[shards]``: a metric of the last step."""
        found = np.zeros(self.options.shards)
        for members, of_group in zip(self.groups, self.of_step, strict=True):
            found[list(members)] = of_group[name]
        return found
