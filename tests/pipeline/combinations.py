"""Which combinations of options are tried: all pairs of values, and those that are refused."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

from crossshard import errors
from tests.pipeline.ways_in import FACTORS, Combination

# The refused combinations: what they are, the error, a part of its message, and why.
Refusal = tuple[Callable[[Combination], bool], type[Exception], str, str]
REFUSALS: dict[str, Refusal] = {
    "weights under SUM": (
        lambda c: c.weights is not None and not c.is_counted and c.reduction == "sum",
        errors.ArgumentError,
        "weight is a shard's weight in a mean",
        "a weight says what a shard counts in a mean; a sum is not divided",
    ),
    "counts under SUM": (
        lambda c: c.is_counted and c.reduction == "sum",
        errors.ArgumentError,
        "a mean over the whole batch",
        "a sum is not divided by what its rows count",
    ),
    "quarantine of counted gradients that are preprocessed": (
        lambda c: c.is_counted and c.nonfinite == "quarantine" and c.preprocess is not None,
        errors.ArgumentError,
        "computed again without a shard",
        "the gradients depend on which shards count, and preprocess comes in between",
    ),
    "quarantine under SUM": (
        lambda c: c.nonfinite == "quarantine" and c.reduction == "sum",
        errors.ArgumentError,
        "leaves a shard out of the mean",
        "a sum without a shard is smaller",
    ),
    "quarantine of what finds a loss scale": (
        lambda c: c.nonfinite == "quarantine" and c.scale,
        errors.ArgumentError,
        "Use nonfinite='skip'",
        "the scale is found by steps that overflow, and are skipped",
    ),
    "a learning rate that nobody tells": (
        lambda c: "learning_rate" in c.metrics and not c.schedule,
        errors.ArgumentError,
        "no learning rate",
        "the state of optax.sgd(0.1) does not have it",
    ),
    "slices of what needs whole arrays": (
        lambda c: (
            c.is_sharded and c.optimizer in ("clip, sgd", "lamb") and (c.is_update or c.grouped)
        ),
        errors.WeightUpdateError,
        "is not elementwise",
        "in one's own shard_map, or in groups, each shard has its slice and nothing else",
    ),
    "an average of workers": (
        lambda c: c.workers is not None and c.ema is not None,
        errors.ArgumentError,
        "averages the parameters of one worker",
        "a synchronisation replaces the parameters that it averages",
    ),
    "masters of workers": (
        lambda c: c.workers is not None and c.masters,
        errors.ArgumentError,
        "would not reach",
        "a synchronisation would not reach the masters",
    ),
}


def refusals_of(combination: Combination) -> list[str]:
    """The names of the refusals that a combination meets."""
    return [name for name, (applies, *_) in REFUSALS.items() if applies(combination)]


def _is_followed(c: Combination) -> bool:
    """Whether a way in has the options, and the model of numpy knows every rounding of them."""
    of_steps = c.compared is not None or c.workers is not None or c.is_counted
    if of_steps and not c.is_step:
        return False
    # A number of few bits that falls on the other side of the middle is off by a whole unit, which
    # a normalized update makes as large as the learning rate.
    normalized = {"int8": ("lamb",), "int4": ("adam", "lamb")}
    if c.optimizer in normalized.get(c.wire or "", ()):
        return False
    # Adam's second moment in 16 bits is mostly rounding.
    return c.masters or c.dtype == "float32" or c.optimizer in ("sgd", "clip, sgd")


def covering(
    factors: Mapping[str, tuple[Any, ...]], seed: int, *, one: str | None = None, **fixed: Any
) -> list[Combination]:
    """Combinations in which every pair of values occurs, of one factor if named, unless refused."""
    draw = random.Random(seed)
    names = [name for name in factors if name not in fixed]
    both = [pair for pair in itertools.combinations(names, 2) if one is None or one in pair]
    # In a dict, since the order of a set differs between runs.
    missing = dict.fromkeys((a, x, b, y) for a, b in both for x in factors[a] for y in factors[b])

    def filled(a: str, x: Any, b: str, y: Any) -> dict[str, Any] | None:
        for _ in range(100):
            values = {name: draw.choice(factors[name]) for name in names} | {a: x, b: y}
            candidate = Combination(**values, **fixed)
            if not refusals_of(candidate) and _is_followed(candidate):
                return values
        return None

    def new(values: Mapping[str, Any]) -> list[Any]:
        pairs = ((a, values[a], b, values[b]) for a, b in both)
        return [pair for pair in pairs if pair in missing]

    found: list[Combination] = []
    while missing:
        pair = next(iter(missing))
        candidates = [values for _ in range(8) if (values := filled(*pair)) is not None]
        if not candidates:
            del missing[pair]
            continue
        best = max(candidates, key=lambda values: len(new(values)))
        for each in new(best):
            del missing[each]
        found.append(Combination(**best, **fixed))
    return found


def refused() -> list[Combination]:
    """Every refusal in every way in that has it, otherwise with defaults."""
    found = []
    for way in FACTORS["way"]:
        default = Combination(way=way)
        tried = [
            dataclasses.replace(default, weights="some", reduction="sum"),
            dataclasses.replace(default, metrics=("learning_rate",)),
            dataclasses.replace(default, nonfinite="quarantine", reduction="sum"),
            dataclasses.replace(default, nonfinite="quarantine", scale=True),
            *(
                dataclasses.replace(default, optimizer=optimizer, grouped=grouped)
                for optimizer in ("clip, sgd", "lamb")
                for grouped in (False, True)
            ),
        ]
        if default.is_step:
            counted = dataclasses.replace(default, weights="counted")
            tried.append(dataclasses.replace(counted, reduction="sum"))
            tried.append(dataclasses.replace(counted, nonfinite="quarantine", preprocess="clip"))
            rarely = dataclasses.replace(default, workers="rarely")
            tried.append(dataclasses.replace(rarely, ema=0.9))
            tried.append(dataclasses.replace(rarely, precision="bfloat16 with masters"))
        found += [each for each in tried if refusals_of(each)]
    return found


def _covered(seed: int, **fixed: Any) -> list[Combination]:
    """Every pair of values, unless it is refused."""
    # Few options go with workers, and those of all the others would be drawn too seldom.
    others = {name: values for name, values in FACTORS.items() if name != "workers"}
    of_workers = FACTORS | {"workers": tuple(each for each in FACTORS["workers"] if each)}
    found = covering(others, seed, **fixed)
    return [*found, *covering(of_workers, seed, one="workers", **fixed)]


def some() -> list[Combination]:
    """Every pair of values, ways in included: for every run of the tests."""
    return _covered(0)


def few() -> list[Combination]:
    """Of ``some`` as many as have every value in each idiom: for ``make test``."""

    def shown(each: Combination) -> set[Any]:
        idiom = each.way.split(",")[0]
        return {(idiom, name, getattr(each, name)) for name in FACTORS}

    known, found = some(), []
    missing = set().union(*map(shown, known))
    while missing:
        found.append(max(known, key=lambda each: len(missing & shown(each))))
        missing -= shown(found[-1])
    return found


def many() -> list[Combination]:
    """For each way in every pair of the other values, without those of ``some``."""
    found = [
        each for seed, way in enumerate(FACTORS["way"]) for each in _covered(seed + 1, way=way)
    ]
    known = set(some())
    return [each for each in dict.fromkeys(found) if each not in known]
