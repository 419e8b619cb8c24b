"""Stages, groups, sharded updates and ways in, combined: equal to numpy, or refused."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossshard
from crossshard.errors import ArgumentError, WeightUpdateError
from tests.pipeline.ways_in import FACTORS, Combination, Run, model_options, run, run_model
from tests.quick import covering, deep_but, fewest
from tests.reference import pipeline_model

# What is refused: the combinations, the error, a part of its message, and the smallest such
# options, in each way in that takes them.
Refusal = tuple[Callable[[Combination], bool], type[Exception], str, list[dict[str, Any]]]
REFUSALS: dict[str, Refusal] = {
    "weights under SUM": (
        lambda c: c.weights is not None and not c.is_counted and c.reduction == "sum",
        ArgumentError,
        "weight is a shard's weight in a mean",
        [{"weights": "some", "reduction": "sum"}],
    ),
    "counts under SUM": (
        lambda c: c.is_counted and c.reduction == "sum",
        ArgumentError,
        "a mean over the whole batch",
        [{"weights": "counted", "reduction": "sum"}],
    ),
    "quarantine of counted gradients that are preprocessed": (
        lambda c: c.is_counted and c.nonfinite == "quarantine" and c.preprocess is not None,
        ArgumentError,
        "computed again without a shard",
        [{"weights": "counted", "nonfinite": "quarantine", "preprocess": "clip"}],
    ),
    "quarantine under SUM": (
        lambda c: c.nonfinite == "quarantine" and c.reduction == "sum",
        ArgumentError,
        "leaves a shard out of the mean",
        [{"nonfinite": "quarantine", "reduction": "sum"}],
    ),
    "quarantine of what finds a loss scale": (
        lambda c: c.nonfinite == "quarantine" and c.scale,
        ArgumentError,
        "Use nonfinite='skip'",
        [{"nonfinite": "quarantine", "scale": True}],
    ),
    "a learning rate that nobody tells": (
        lambda c: "learning_rate" in c.metrics and not c.schedule,
        ArgumentError,
        "no learning rate",
        [{"metrics": ("learning_rate",)}],
    ),
    "slices of what needs whole arrays": (
        lambda c: (
            c.is_sharded and c.optimizer in ("clip, sgd", "lamb") and (c.is_update or c.grouped)
        ),
        WeightUpdateError,
        "is not elementwise",
        [
            {"optimizer": optimizer, "grouped": grouped}
            for optimizer in ("clip, sgd", "lamb")
            for grouped in (False, True)
        ],
    ),
    "an average of workers": (
        lambda c: c.workers is not None and c.ema is not None,
        ArgumentError,
        "averages the parameters of one worker",
        [{"workers": "rarely", "ema": 0.9}],
    ),
    "masters of workers": (
        lambda c: c.workers is not None and c.masters,
        ArgumentError,
        "would not reach",
        [{"workers": "rarely", "precision": "bfloat16 with masters"}],
    ),
}


def refusals_of(combination: Combination) -> list[str]:
    """The names of the refusals that a combination meets."""
    return [name for name, (applies, *_) in REFUSALS.items() if applies(combination)]


def is_taken(c: Combination) -> bool:
    """Whether a way in has the options."""
    weighted = c.is_counted or (c.weights is not None and not c.is_update)
    return c.is_step or (c.compared is None and c.workers is None and not weighted)


def is_run(c: Combination) -> bool:
    """Whether it is not refused, and the model of numpy knows every rounding of it."""
    if refusals_of(c) or not is_taken(c):
        return False
    # A number of few bits that falls on the other side of the middle is off by a whole unit, which
    # a normalized update makes as large as the learning rate.
    normalized = {"int8": ("lamb",), "int4": ("adam", "lamb")}
    if c.optimizer in normalized.get(c.wire or "", ()):
        return False
    # Adam's second moment in 16 bits is mostly rounding.
    return c.masters or c.dtype == "float32" or c.optimizer in ("sgd", "clip, sgd")


def made(**values: Any) -> Combination | None:
    """The combination of these values, if it is run."""
    combination = Combination(**values)
    return combination if is_run(combination) else None


def refused() -> list[Combination]:
    """Every refusal in every way in that has it, otherwise with defaults."""
    least = [changes for *_, tried in REFUSALS.values() for changes in tried]
    found = [Combination(way=way, **changes) for way in FACTORS["way"] for changes in least]
    return [each for each in found if is_taken(each) and refusals_of(each)]


def _covered(seed: int, **fixed: Any) -> list[Combination]:
    """Every pair of values, unless it is refused."""
    # Few options go with workers, and those of all the others would be drawn too seldom.
    others = {name: values for name, values in FACTORS.items() if name != "workers"}
    of_workers = FACTORS | {"workers": tuple(each for each in FACTORS["workers"] if each)}
    found = covering(others, made, seed, **fixed)
    return [*found, *covering(of_workers, made, seed, one="workers", **fixed)]


@functools.cache
def some() -> list[Combination]:
    """Every pair of values, ways in included: for every run of the tests."""
    return _covered(0)


def few() -> list[Combination]:
    """Of ``some`` as many as have every value in each idiom: for ``make test``."""

    def shown(each: Combination) -> set[Any]:
        idiom = each.way.split(",")[0]
        return {(idiom, name, getattr(each, name)) for name in FACTORS}

    return fewest(some(), shown)


# Half a unit in the last place of 1, by dtype: how far rounding moves a number, relatively; of few
# bits, that of the largest of a block.
ROUNDING = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "int8": 1 / 254,
    "int4": 1 / 14,
}
# What float32 may add up to in a run.
SMALL = 2e-5
# The part of the parameters whose gradients of 16 bits, rounded once more to be sent, may be on the
# other side of a middle: Adam makes up to its learning rate of a unit that is small.
TURNED = 1 / 500
EXACT = (
    *("count", "scale", "good_steps", "skipped", "loss_scale", "compared", "differs"),
    *crossshard.pipeline.NonfiniteState._fields,
)


def rounding_of(combination: Combination) -> float:
    """The coarsest rounding that a gradient of a run goes through."""
    wire = ROUNDING[combination.wire or "float32"]
    return max(ROUNDING[combination.dtype], wire)


def tolerance_of(name: str, want: np.ndarray, combination: Combination, model: Run) -> Any:
    """How far an array of this name may be from the model's, elementwise.

    The model rounds where the package does. A number that float32 and float64 put on different
    sides of the middle between two numbers of 16 bits is off by one unit in the last place.
    """
    rounding = rounding_of(combination)
    if model_options(combination).local_dtype != "float32" and combination.preprocess is not None:
        # Norms and sums of 16 bits are rounded again.
        rounding *= 2
    if combination.dtype != "float32" and combination.preprocess is not None:
        # So are momenta, and a normalized update divides by what is nearly zero.
        rounding *= 8 if combination.optimizer in ("adam", "lamb") else 2
    relative = SMALL + (4 * rounding if rounding > ROUNDING["float32"] else 0)
    kind = name.split("/")[0]
    if name in EXACT:
        return 0.0
    if name in ("weight", "learning_rate"):
        return 1e-6 * np.abs(want)
    if kind in ("params", "masters", "ema"):
        # An update has the size of the gradient, or of the learning rate.
        is_normalized = combination.optimizer in ("adam", "lamb")
        moved = 1.0 if is_normalized else model.largest
        moved *= pipeline_model.OPTIMIZERS[combination.optimizer][1]
        of_params = 0 if kind == "masters" else 4 * ROUNDING[combination.dtype] * np.abs(want)
        return SMALL + relative * moved + of_params
    if name in ("noise_variance", "noise_signal"):
        return 2 * relative * model.magnified["of_" + name.removeprefix("noise_")]
    if name == "update_norm" and combination.dtype != "float32" and combination.masters:
        # The change of rounded parameters, of which one may be off by a unit.
        shown = [x for step in model.steps for name, x in step.items() if name.startswith("params")]
        unit = 2 * ROUNDING[combination.dtype] * max(np.nanmax(np.abs(x)) for x in shown)
        return relative * np.abs(want) + unit
    if kind == "trace":
        return relative * np.nanmax(np.abs(want), initial=0.0)
    return relative * np.abs(want)


def may_turn(name: str, combination: Combination) -> bool:
    """Whether the model may round a few of these numbers to the other side."""
    rounds_twice = combination.wire is not None and combination.dtype != "float32"
    is_kept = name.split("/")[0] in ("params", "masters", "ema")
    return rounds_twice and is_kept and combination.optimizer in ("adam", "lamb")


def faults_of(got: Run, want: Run, combination: Combination) -> list[str]:
    """Where a run is not what the model says."""
    faults = []
    pairs = [*zip(got.steps, want.steps, strict=True), (got.end, want.end)]
    for step, (found, expected) in enumerate(pairs):
        when = f"after step {step}" if step < len(got.steps) else "at the end"
        if found.keys() != expected.keys():
            which = sorted(found.keys() ^ expected.keys())
            faults.append(f"{when} one of both does not have {which}")
        for name in sorted(found.keys() & expected.keys()):
            a, b = found[name], expected[name]
            if name.startswith("params"):
                in_dtype = pipeline_model.round_to(a, combination.dtype)
                if not np.array_equal(a, in_dtype):
                    faults.append(f"{when} {name} is not of {combination.dtype}")
            if name == "noise_scale":
                # What is near zero may be divided by.
                b = found["noise_variance"] / found["noise_signal"]
            allowed = tolerance_of(name, b, combination, want)
            # A norm of what overflowed is infinite, or not a number.
            off = np.where(np.isfinite(b), np.abs(a - b), np.where(np.isfinite(a), np.inf, 0))
            wrong = ~(off <= np.where(np.isfinite(b), allowed, 0))
            if may_turn(name, combination) and wrong.sum() <= TURNED * wrong.size:
                wrong = ~(off <= allowed + pipeline_model.OPTIMIZERS[combination.optimizer][1])
            if wrong.any():
                faults.append(
                    f"{when} {name} is off by {off.max():.3g} in {wrong.sum()} of {wrong.size} "
                    f"elements; {np.nanmax(allowed, initial=0):.3g} is allowed"
                )
    return faults


def check(combination: Combination) -> list[str]:
    """Run a combination that is not refused; what is wrong with it."""
    got = run(combination)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        want = run_model(model_options(combination), combination)
        return faults_of(got, want, combination)


def check_refusal(combination: Combination) -> list[str]:
    """Run a combination that is refused; what is wrong with the refusal."""
    (name,) = refusals_of(combination)
    _, kind, message, _ = REFUSALS[name]
    try:
        run(combination)
    except crossshard.CrossshardError as error:
        return [] if type(error) is kind and message in str(error) else [f"{error!r}"]
    return ["it is not refused"]


@pytest.mark.parametrize("combination", deep_but(few(), some()), ids=str)
def test_a_combination_is_equal_to_numpy(combination: Combination):
    assert check(combination) == []


@pytest.mark.parametrize("combination", refused(), ids=str)
def test_a_combination_that_makes_no_sense_is_refused(combination: Combination):
    assert check_refusal(combination) == []


def test_every_pair_of_values_is_tried_unless_none_with_it_is_run():
    pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(FACTORS, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }
    shown = lambda c, a, x, b, y: getattr(c, a) == x and getattr(c, b) == y
    missing = {pair for pair in pairs if not any(shown(each, *pair) for each in some())}
    # A way in, or a schedule, may take what the default does not.
    free = [{"way": way, "schedule": flag} for way in FACTORS["way"] for flag in (False, True)]
    alone = lambda a, x, b, y: (Combination(**(each | {a: x, b: y})) for each in free)
    assert missing == {pair for pair in pairs if not any(map(is_run, alone(*pair)))}
    assert (len(pairs), len(missing)) == (1345, 60)


def test_a_model_that_lacks_an_option_is_found_out():
    lacks = Combination(schedule=True)
    # Of a wire its own tests see that it rounds, which is less than what is allowed.
    for name in FACTORS.keys() - {"way", "schedule", "wire", "compared"}:
        for value in FACTORS[name][1:]:
            each = dataclasses.replace(lacks, **{name: value})
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                want = run_model(model_options(each), each)
                assert faults_of(want, want, each) == []
                assert faults_of(run_model(model_options(lacks), lacks), want, each), each
