"""Stages, groups, sharded updates and ways in, combined: equal to numpy, or refused."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import crossshard
from tests.pipeline import combinations
from tests.pipeline.ways_in import FACTORS, Combination, Run, model_options, run, run_model
from tests.quick import deep_but
from tests.reference import pipeline_model

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
                    f"elements; {np.nanmax(allowed):.3g} is allowed"
                )
    return faults


def distance(a: Run, b: Run) -> float:
    """The root mean square of all differences, relative to the size of each array."""
    squares = []
    for found, expected in [*zip(a.steps, b.steps, strict=True), (a.end, b.end)]:
        if found.keys() != expected.keys():
            return float("inf")
        for name, want in expected.items():
            if not np.array_equal(np.isfinite(found[name]), np.isfinite(want)):
                return float("inf")
            finite = np.isfinite(want)
            off = found[name][finite] - want[finite]
            size = np.sqrt((want[finite] ** 2).mean()) if finite.any() else 0
            squares.append((off**2).mean() / (size**2 or 1) if finite.any() else 0.0)
    return float(np.sqrt(np.mean(squares)))


# What each option is compared with, to see that it does something.
WITHOUT: dict[str, Callable[[Combination], dict[str, Any]]] = {
    "optimizer": lambda c: {"optimizer": "momentum" if c.optimizer == "sgd" else "sgd"},
    "schedule": lambda c: {"schedule": not c.schedule},
    "reduction": lambda c: {"reduction": "mean" if c.reduction == "sum" else "sum"},
    "grouped": lambda c: {"grouped": not c.grouped},
    "preprocess": lambda c: {"preprocess": None},
    "weights": lambda c: {"weights": None},
    "accumulate": lambda c: {"accumulate": 1},
    "wire": lambda c: {"wire": None},
    "scale": lambda c: {"scale": False},
    "ema": lambda c: {"ema": None},
    "workers": lambda c: {
        "workers": {None: None, "rarely": "streaming", "streaming": "rarely"}[c.workers]
    },
    "nonfinite": lambda c: {
        "nonfinite": {None: None, "skip": "quarantine", "quarantine": "skip"}[c.nonfinite]
    },
}


def _is_alone(c: Combination) -> bool:
    """Whether every shard is a worker, which sums nothing in a step."""
    return c.workers is not None and not c.grouped


# What hides an option from all that a run shows, and why.
HIDDEN: dict[str, Callable[[Combination], bool]] = {
    # The direction of a sum is that of the mean, and the length is clipped, or normalized.
    "reduction": lambda c: (
        _is_alone(c)
        or c.optimizer in ("clip, sgd", "lamb")
        or (c.optimizer == "adam" and c.dtype != "float32")
    ),
    # Parameters of 16 bits are rounded as coarsely, and what is preprocessed in 16 bits.
    "wire": lambda c: (
        _is_alone(c) or (c.dtype != "float32" and (not c.masters or c.preprocess is not None))
    ),
    # Numbers of four bits are off by as much as a clipped norm.
    "preprocess": lambda c: c.wire == "int4" and c.dtype != "float32",
}


def without_effect(got: Run, want: Run, combination: Combination) -> list[str]:
    """The options without which the model is as near to the run as with them."""
    found = []
    near = distance(got, want)
    for name, change in WITHOUT.items():
        other = dataclasses.replace(combination, **change(combination))
        if other == combination or HIDDEN.get(name, lambda _: False)(combination):
            continue
        if not near < distance(got, run_model(model_options(other), other)) / 2:
            found.append(name)
    return found


def check(combination: Combination) -> list[str]:
    """Run a combination that is not refused; what is wrong with it."""
    got = run(combination)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        want = run_model(model_options(combination), combination)
        silent = without_effect(got, want, combination)
        return faults_of(got, want, combination) + [f"{name} is ignored" for name in silent]


def check_refusal(combination: Combination) -> list[str]:
    """Run a combination that is refused; what is wrong with the refusal."""
    (name,) = combinations.refusals_of(combination)
    _, kind, message, _ = combinations.REFUSALS[name]
    try:
        run(combination)
    except crossshard.CrossshardError as error:
        return [] if type(error) is kind and message in str(error) else [f"{error!r}"]
    return ["it is not refused"]


@pytest.mark.parametrize("combination", deep_but(combinations.few(), combinations.some()), ids=str)
def test_a_combination_is_equal_to_numpy(combination: Combination):
    assert check(combination) == []


@pytest.mark.parametrize("combination", combinations.refused(), ids=str)
def test_a_combination_that_makes_no_sense_is_refused(combination: Combination):
    assert check_refusal(combination) == []


# The pairs of values that never occur together in a run, and why.
NEVER = {
    # Refused: a weight says what a shard counts in a mean.
    *(("reduction", "sum", "weights", weights) for weights in FACTORS["weights"] if weights),
    # Only a whole step counts beside all else.
    *(
        ("way", way, "weights", weights)
        for way in FACTORS["way"]
        for weights in ("counted", "counted, none in a step")
        if not way.startswith("step")
    ),
    # Refused: the mean is that of the others, and a loss scale is found by what is skipped.
    ("reduction", "sum", "nonfinite", "quarantine"),
    ("scale", True, "nonfinite", "quarantine"),
    # Only a whole step compares copies.
    *(("way", way, "compared", 2) for way in FACTORS["way"] if not way.startswith("step")),
    # So it is with workers.
    *(
        ("way", way, "workers", workers)
        for way in FACTORS["way"]
        for workers in ("rarely", "streaming")
        if not way.startswith("step")
    ),
    # Refused: a synchronisation replaces the parameters that are averaged, and reaches no masters.
    *(
        (*option, "workers", workers)
        for workers in ("rarely", "streaming")
        for option in (
            ("ema", 0.9),
            ("precision", "bfloat16 with masters"),
            ("precision", "float16 with masters"),
        )
    ),
    # Refused: a constant learning rate is not told.
    ("schedule", False, "metrics", ("learning_rate",)),
    # Refused: in one's own shard_map a shard has its slice and nothing else.
    *(
        ("way", way, "optimizer", optimizer)
        for way in ("update, sharded, types", "update, sharded, no types")
        for optimizer in ("clip, sgd", "lamb")
    ),
    # Not followed by the model: of few bits a normalized update makes more than they are.
    ("optimizer", "lamb", "wire", "int8"),
    *(("optimizer", optimizer, "wire", "int4") for optimizer in ("adam", "lamb")),
    # Not followed by the model: states of 16 bits are mostly rounding.
    *(
        ("optimizer", optimizer, "precision", precision)
        for optimizer in ("momentum", "adam", "lamb")
        for precision in ("bfloat16", "float16")
    ),
}


def test_every_pair_of_values_is_tried():
    tried = combinations.some()
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(FACTORS, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if not any(getattr(each, a) == x and getattr(each, b) == y for each in tried)
    }
    assert missing == NEVER


def test_a_model_that_lacks_an_option_is_found_out():
    combination = Combination(preprocess="clip", weights="some", ema=0.9, metrics=("grad_norm",))
    options = model_options(combination)
    want = run_model(options, combination)
    assert faults_of(want, want, combination) == []
    for change in ({"preprocess": None}, {"ema": 0.8}, {"optimizer": "momentum"}):
        other = run_model(dataclasses.replace(options, **change), combination)
        assert faults_of(other, want, combination)


@pytest.mark.soak
def test_many_combinations(soak_steps: int, capsys: pytest.CaptureFixture[str]):
    everything = [*combinations.some(), *combinations.many()]
    assert len(everything) >= 220
    # All of them, or a part for fewer steps.
    draw = random.Random(0)
    chosen = draw.sample(everything, min(len(everything), max(1, soak_steps // 20)))
    faults = {}
    for number, combination in enumerate(chosen):
        found = check(combination)
        if found:
            faults[str(combination)] = found
        if number % 10 == 9:
            # Each has programs of its own.
            jax.clear_caches()
    refused = {str(each): check_refusal(each) for each in combinations.refused()}
    wrong = faults | {name: found for name, found in refused.items() if found}
    with capsys.disabled():
        print(
            f"\n{len(chosen)} combinations, {len(chosen) - len(faults)} equal to numpy; "
            f"{len(refused)} refused"
        )
    assert wrong == {}
