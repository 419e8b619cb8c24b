"""The table of losses: what a case is, what one device says of it, and what a step makes of it.

Truth is plain ``jax.grad`` on one device and the whole batch, in float32 arithmetic. A step of SGD
keeps the gradient that it got in its momentum, of decay 0; it is compared with that, relative to
the largest entry of all leaves.

In bfloat16, parameters and batch are rounded to bfloat16, and truth is the float32 arithmetic of
these rounded numbers. So it is in "mixed", where they are stored in float32 and the loss casts them
to bfloat16. The program rounds as it computes, on one device too; so an error is allowed that is
twice what one device has in bfloat16 on the whole batch and, on average, on a shard's rows alone,
each against float32 arithmetic of the same rows, and one rounding of the result.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard
from tests.losses import parts

SEED = 5
SHARDS = (2, 3, 8)
FEW_BITS = ("bfloat16", "mixed")
DTYPES = ("float32", *FEW_BITS)
TOLERANCE = 1e-5
# The shards of which rounding is measured, and how far a mean over shards is from the batch's.
MOST = max(SHARDS)
ROUNDING = float(jnp.finfo(jnp.bfloat16).eps)

# Which a step may refuse in few bits, though it is right.
MAY_REFUSE = {"sums along time"}
RIGHT, REFUSED, WRONG, BREAKS = "right", "refused", "wrong", "breaks"
MEAN, RATIO, COMPARING, WRONG_WEIGHT = "mean", "ratio", "comparing", "wrong weight"


class Run(NamedTuple):
    """What a step made of a case.

    Attributes:
      outcome: one of the words above.
      error: how far the gradient is from that of one device, relative to the largest entry.
      message: the first sentence of the error.
    """

    outcome: str
    error: float = float("nan")
    message: str = ""


def _divided(total: Any, count: Any) -> Any:
    return total / count


def _is_float(x: Any) -> bool:
    return getattr(x, "dtype", None) in (jnp.float32, jnp.bfloat16)


def _cast(tree: Any, dtype: Any = jnp.bfloat16) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if _is_float(x) else x, tree)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss of the table.

    Attributes:
      kind: what the loss is in the rows of the batch.
      name: what it is called.
      function: ``loss(params, batch[, mean][, rng])``; ``mean(total, count)`` is a division on one
        device and under ``weight=``, and ``crossshard.Mean`` in the form that returns it; ``rng``
        is a key of the shard, and ``keys`` one for each row.
      weight: the weight of the step.
    """

    kind: str
    name: str
    function: Callable[..., Any]
    weight: Any = None

    @property
    def key(self) -> str:
        """The name of its key: ``rng``, ``keys`` or none."""
        return next((name for name in self.takes if name != "mean"), "")

    @property
    def on_axis(self) -> bool:
        """Whether the loss names the axis of the shards."""
        return "shards" in self.function.__code__.co_consts

    @property
    def takes(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)[2:]

    @property
    def forms(self) -> tuple[str, ...]:
        """How a loss is handed over: a number, one with its weight or none, or a ``Mean``."""
        given = ("weight",) * (self.weight is not None) + ("Mean",) * ("mean" in self.takes)
        return given + ("no weight",) * (self.kind == RATIO) or ("plain",)

    def may_run(self, form: str) -> bool:
        """Whether the loss, so handed over, is one that shards can compute."""
        return self.kind in (MEAN, RATIO) and form != "no weight"

    def is_as_expected(self, form: str, dtype: str, outcome: str) -> bool:
        """Whether the table wants this outcome.

        What may not run may yet be right, with some numbers of rows on a shard.
        """
        may_refuse = not self.may_run(form) or (self.name in MAY_REFUSE and dtype in FEW_BITS)
        return outcome == RIGHT or (may_refuse and outcome == REFUSED)

    def loss(self, form: str, *, casts: bool = False) -> Callable[..., Any]:
        """The loss as a step takes it, which computes in bfloat16 if it casts."""
        mean = crossshard.Mean if form == "Mean" else _divided
        given = (mean,) if "mean" in self.takes else ()
        function = (lambda *args: self.function(*_cast(args))) if casts else self.function
        if self.key:
            return lambda params, batch, rng: function(params, batch, *given, rng)
        return lambda params, batch: function(params, batch, *given)

    def gradient(self, casts: bool, params: Any, batch: Any, rng: Any) -> Any:
        """The gradient of one device, which is one shard if the loss names the axis."""
        loss = self.loss("plain", casts=casts)
        given = (params, batch, rng) if self.key else (params, batch)
        gradient = jax.grad(loss)
        if not self.on_axis:
            return gradient(*given)
        along = jax.vmap(gradient, (None, 0), axis_name="shards")
        return jax.tree.map(lambda g: g[0], along(params, jax.tree.map(lambda x: x[None], batch)))


CASES: dict[str, Case] = {}


def enter(kind: str, module: dict[str, Any], **losses: Any) -> None:
    """Enter losses: the public functions of a module, and others, alone or with their weights."""
    own = {
        name: each
        for name, each in module.items()
        if inspect.isfunction(each)
        and each.__module__ == module["__name__"]
        and each.__name__ == name
        and not name.startswith("_")
    }
    for name, given in (own | losses).items():
        weight, function = given if isinstance(given, tuple) else (None, given)
        case = Case(kind, name.replace("_", " "), function, getattr(function, "weight", weight))
        assert case.name not in CASES, case.name
        CASES[case.name] = case


def weighted(weight: Any) -> Callable[[Any], Any]:
    """The loss is a step's that has this weight."""

    def of(function: Any) -> Any:
        function.weight = weight
        return function

    return of


@functools.cache
def inputs(case: Case, dtype: str) -> tuple[Any, Any]:
    """The parameters and the entries of the batch that a case reads."""
    read: tuple[set[str], set[str]] = set(), set()

    class Recording(dict[str, Any]):
        def __init__(self, values: Any, names: set[str]):
            super().__init__(values)
            self.names = names

        def __getitem__(self, name: str) -> Any:
            self.names.add(name)
            return super().__getitem__(name)

    params, batch = parts.params(), parts.batch()
    more = [_divided if name == "mean" else _keys(case, 0, 1) for name in case.takes]
    look = lambda p, b: case.function(Recording(p, read[0]), Recording(b, read[1]), *more)
    if case.on_axis:
        look = jax.vmap(look, (None, None), axis_name="shards", axis_size=1)
    jax.eval_shape(look, params, batch)
    if isinstance(case.weight, str):
        read[1].add(case.weight)
    elif case.weight is not None:
        case.weight(Recording(batch, read[1]))
    found = [
        {name: jnp.asarray(x) for name, x in values.items() if name in names}
        for values, names in zip((params, batch), read, strict=True)
    ]
    rounded = found if dtype == "float32" else _cast(found)
    return tuple(_cast(rounded, jnp.float32) if dtype == "mixed" else rounded)


def _keys(case: Case, shard: int, number: int) -> Any:
    """What a step hands to a shard as ``rng`` at its first call."""
    of_step = jax.random.fold_in(jax.random.key(SEED), 0)
    if case.key == "rng":
        return jax.random.fold_in(of_step, shard)
    rows = parts.ROWS // number
    places = shard * rows + np.arange(rows)
    return jax.vmap(jax.random.fold_in, (None, 0))(of_step, places)


@functools.cache
def _compiled(case: Case, casts: bool) -> Any:
    return jax.jit(functools.partial(case.gradient, casts))


def _numbers(tree: Any) -> dict[str, Any]:
    return {name: np.asarray(x, np.float32) for name, x in tree.items()}


@functools.cache
def of_pieces(
    case: Case, dtype: str, number: int, *, exact: bool = True
) -> tuple[list[dict[str, Any]], Any]:
    """The gradients of ``number`` pieces of the batch on one device, and their weights.

    Args:
      case: the case.
      dtype: what parameters and batch are rounded to.
      number: how many pieces.
      exact: whether to compute in float32, whatever the dtype.
    """
    params, batch = _cast(inputs(case, dtype), jnp.float32) if exact else inputs(case, dtype)
    gradient = _compiled(case, dtype == "mixed" and not exact)
    rows, found, weights = parts.ROWS // number, [], []
    weight = case.weight if case.weight is not None else lambda batch: 1
    weigh = (lambda batch: batch[weight].sum()) if isinstance(weight, str) else weight
    for i in range(number):
        piece = {name: x[i * rows : (i + 1) * rows] for name, x in batch.items()}
        keys = _keys(case, i, number)
        found.append(_numbers(gradient(params, piece, keys)))
        weights.append(float(weigh(piece)))
    return found, np.asarray(weights)


def _mean(found: Any, weights: Any) -> Any:
    if not weights.sum():
        return found[0]
    shares = weights / weights.sum()
    counted = [(s, g) for s, g in zip(shares, found, strict=True) if s]
    return {name: sum(s * g[name] for s, g in counted) for name in found[0]}


def largest(tree: Any) -> float:
    """The largest entry of all leaves, NaN if there is one."""
    return float(max(np.abs(x).max() for x in tree.values()))


def _apart(one: Any, other: Any) -> float:
    return largest({name: one[name] - other[name] for name in one})


def truth(case: Case, dtype: str, number: int) -> Any:
    """The gradient of one device, in float32 arithmetic.

    Where each shard has a key of its own, one device does what the shards do, one after another.
    """
    by_shard = case.key == "rng" and case.kind != COMPARING
    return _mean(*of_pieces(case, dtype, number if by_shard else 1))


@functools.cache
def apart_in_pieces(case: Case, number: int = MOST) -> float:
    """How far the mean of the shards' gradients is from that of the batch, relatively."""
    want = truth(case, "float32", number)
    return _apart(_mean(*of_pieces(case, "float32", number)), want) / largest(want)


@functools.cache
def tolerance(case: Case, dtype: str) -> float:
    """How far a gradient may be from that of one device, relative to the largest entry."""
    if dtype == "float32":
        return TOLERANCE
    noise = 0.0
    for number in (1, MOST):
        exact, weights = of_pieces(case, dtype, number)
        rounded, _ = of_pieces(case, dtype, number, exact=False)
        errors = np.asarray([_apart(*both) for both in zip(exact, rounded, strict=True)])
        # A shard alone may divide by nothing.
        known = np.isfinite(errors) & (weights > 0)
        noise += float(np.average(errors[known], weights=weights[known]))
    return 2 * noise / largest(truth(case, dtype, MOST)) + ROUNDING


def run(case: Case, form: str, dtype: str, number: int) -> Run:
    """One step of SGD on a number of shards, compared with one device."""
    params, batch = inputs(case, dtype)
    options: dict[str, Any] = {"rng_per": "row"} if case.key == "keys" else {}
    if form == "weight":
        options["weight"] = case.weight
    try:
        step = crossshard.make_train_step(
            case.loss(form, casts=dtype == "mixed"),
            optax.sgd(1.0, momentum=0.0),
            num_shards=number,
            **options,
        )
        state, _ = step(step.init(params, SEED), batch)
        got = _numbers(jax.device_get(optax.tree.get(state.opt_state, "trace")))
    except crossshard.errors.CrossshardError as error:
        return Run(REFUSED, message=str(error))
    except Exception as error:  # which is a finding, too
        return Run(BREAKS, message=f"{type(error).__name__}: {error}")
    want = truth(case, dtype, number)
    error = float(np.nan_to_num(_apart(got, want) / largest(want), nan=np.inf))
    is_right = error <= tolerance(case, dtype)
    if is_right and dtype != "float32" and not case.may_run(form):
        # A mistake hides in rounding.
        is_right = run(case, form, "float32", number).outcome == RIGHT
    return Run(RIGHT if is_right else WRONG, error)
