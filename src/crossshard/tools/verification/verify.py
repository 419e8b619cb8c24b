"""Runs a step on 1 and on N shards, and says what differs."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from crossshard import TrainStep, _check, _mesh
from crossshard._annotations import Groups, Key, PyTree
from crossshard._hash import checksum
from crossshard._text import listed
from crossshard.distributed.agreement import check_agreement, exchange
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.shards.axes import check_group_assignment, check_num_shards
from crossshard.shards.batch_axes import axes_of, check_batch_axis
from crossshard.step.rebuild import (
    axes_of_batch,
    groups_of,
    has_equal_shards,
    loss_over_rows_of,
    on_part_of_mesh,
    own_rows,
    with_optimizer,
    without_in_proof,
)
from crossshard.tools.verification.measurement import (
    COARSE,
    Comparison,
    Measurement,
    norm,
    rms,
)
from crossshard.tools.verification.runs import METRIC, STATISTICS, UPDATE, map_arrays

# A gradient that is smaller than this, relative to the largest leaf, may be nothing but rounding.
_VANISHING = 1e-5
# How far a factor may be from a named one, relative to it.
_NEAR = 5e-3
_FINE, _TOO_SMALL, _NOTED = "fine", "too small", "noted"
_EACH_ITS_OWN = "each shard has its own: not reduced"
_STACKED = "each shard keeps statistics of its own: reduce them before you evaluate or save"
_NEITHER = "is neither that of all rows nor the mean of the shards'"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What differs between N shards and one device.

    >>> Fault("update", "w: 8.000 = N times the update of one device", ("w",), 8.0, "N").factor
    'N'

    Attributes:
      kind: what differs: ``"update"``, ``"copies"``, ``"statistics"`` or ``"metric"``; the
        page on ``verify`` explains each.
      sentence: what differs, where and by how much.
      leaves: the names of the arrays that differ.
      ratio: the first array's value on N shards over that on one, by least squares; ``None`` if
        the latter is 0, or they are not compared.
      factor: the ratio's name if it has one, such as ``"N"``, ``"1/N"`` or ``"√N"``; else empty.
      shards: the shards of the group in which it was found.
    """

    kind: str
    sentence: str
    leaves: tuple[str, ...] = ()
    ratio: float | None = None
    factor: str = ""
    shards: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """How the update of one parameter compares.

    >>> LeafReport("w", (3,), 8.0, 1e-7, 1e-4, "update").ratio
    8.0

    Attributes:
      name: its path in the state, such as ``"params/dense/kernel"``.
      shape: its shape on one device.
      ratio: the update on N shards over that on one, by least squares; ``None`` if the latter is 0.
      residual: what the ratio leaves unexplained, relative to the update; to be compared with
        ``tolerance``.
      tolerance: the relative difference up to which the two count as equal.
      verdict: ``"fine"``, the kind of its fault, or ``"too small"`` for a gradient that is nothing
        but rounding.
    """

    name: str
    shape: tuple[int, ...]
    ratio: float | None
    residual: float
    tolerance: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Verification:
    """What ``crossshard.verify`` found: print it, or read its attributes.

    Attributes:
      num_shards: N.
      rows: the number of rows of the batch.
      faults: what differs; empty if nothing does.
      leaves: the comparison of each parameter.
      notes: what is good to know, but not a fault.

    >>> Verification(8, 64, (), (), ()).ok
    True
    """

    num_shards: int
    rows: int
    faults: tuple[Fault, ...]
    leaves: tuple[LeafReport, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def describe(self) -> str:
        """Return the verdict, with a line for each fault and each note."""
        size, number = f"{self.num_shards} shards and {self.rows} rows", len(self.leaves)
        take = f"all {number} parameters take" if number > 1 else "the parameter takes"
        verdict = [f"fine: on {size}, {take} the step of one device"]
        if self.faults:
            verdict = [f"wrong on {size}:", *(f"  {each.sentence}" for each in self.faults)]
        return "\n".join([*verdict, *(f"note: {note}" for note in self.notes)])

    __str__ = describe

    def to_json(self, **kwargs: Any) -> str:
        """Return the attributes and ``ok`` as JSON; the arguments are those of ``json.dumps``."""
        return json.dumps({"ok": self.ok, **dataclasses.asdict(self)}, **kwargs)


def verify(
    step: Callable[[optax.GradientTransformation, int], Sequence[PyTree]] | TrainStep,
    *batch: PyTree,
    num_shards: int | None = None,
    key: Key | None = None,
    groups: Groups | None = None,
    batch_axis: PyTree = 0,
) -> Verification:
    """Run a training step on 1 and on N shards with plain SGD, and say what differs.

    The update of each parameter on N shards is compared with that of one device on the whole batch.
    The two should be equal. If they are not, the result says where, and by which factor.

    Args:
      step: ``make_step(optimizer, num_shards) -> (step, *state)``: your code that builds the step
        and its first state for this number of devices, with the given optimizer in place of your
        own. The step is called as ``step(*state, *batch)`` and splits the batch itself. It returns
        the next state first, and then anything else; it may change NNX modules and optimizers in
        place. Or a ``TrainStep``, which is built again with SGD; the batch is then
        ``params, batch``. If there are several processes, all of them make this call with a
        ``TrainStep`` and all rows.
      *batch: the arguments after the state. Shard ``i`` of N should get the ``i``-th of N equal
        parts of their rows.
      num_shards: N; all devices if ``None``.
      key: a random key, typed or raw, that is passed to the step as its last argument, if it takes
        one. Keys that the step gets in another way need no argument here.
      groups: the groups of shards that reduce together; one group of all if ``None``.
      batch_axis: the axis of the rows in all arrays; or a list with one entry for each of
        ``*batch``: an axis, ``None`` if it has no rows, or a pytree prefix of it with these. A
        ``TrainStep`` has its own.

    Returns:
      A ``Verification`` with the faults and a comparison for each parameter: print it.

    Raises:
      ArgumentError: the step cannot be run as described, or not on N shards with these rows; it
        draws other random numbers there than on one device; the processes of a job pass different
        rows.
      ArgumentTypeError: ``make_step`` does not return a step with its state.

    >>> import jax, jax.numpy as jnp, optax
    >>> def make_step(optimizer, num_shards):
    ...     def step(w, state, x):
    ...         gradient = num_shards * jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
    ...         updates, state = optimizer.update(gradient, state, w)
    ...         return optax.apply_updates(w, updates), state
    ...
    ...     w = jnp.zeros(3)
    ...     return step, w, optimizer.init(w)
    >>> x = jax.random.normal(jax.random.key(0), (16, 3))
    >>> print(verify(make_step, x, num_shards=8))
    wrong on 8 shards and 16 rows:
      0: 8.000 = N times the update of one device
    """
    # The step also runs on one device, which is an error while a mesh of several devices is set.
    with _mesh.without_mesh():
        if isinstance(step, TrainStep):
            if type(batch_axis) is not int or batch_axis != 0:
                raise ArgumentError(
                    f"A TrainStep has its own batch_axis; leave "
                    f"batch_axis={_check.shown(batch_axis)} out."
                )
            measurement = _measure_train_step(step, batch, num_shards, key, groups)
            found = _compare(measurement, lambda found: _with_faults_of_others(found, step.mesh))
            beside = filter(None, (loss_over_rows_of(step), *without_in_proof(step)))
            return dataclasses.replace(found, notes=(*found.notes, *beside))
        if not callable(step):
            raise ArgumentTypeError(
                "verify takes make_step, a function of (optimizer, num_shards), or a TrainStep; "
                f"got {type(step).__name__}."
            )
        if jax.process_count() > 1:
            raise ArgumentError(
                f"In a job of {jax.process_count()} processes, verify takes a TrainStep. Verify "
                "make_step in one process, with virtual devices."
            )
        number = len(jax.devices()) if num_shards is None else check_num_shards(num_shards)
        members: tuple[tuple[int, ...], ...] = (tuple(range(number)),)
        if (checked := check_group_assignment(groups)) is not None:
            checked.check_covers(number)
            members = checked.groups
        several = isinstance(batch_axis, list | tuple)
        axes = axes_of(tuple(batch_axis)) if several else check_batch_axis(batch_axis)
        measurement = Measurement(step, batch, axes.of(batch), key, members)
        return _compare(measurement, lambda found: found)


def _compare(
    measurement: Measurement, agreed: Callable[[Verification], Verification]
) -> Verification:
    """Return what differs.

    Raises:
      ArgumentError: the step draws random numbers, and not those of one device.
    """
    found = agreed(_conclude(measurement))
    if found.ok or not measurement.is_random():
        return found
    raise ArgumentError(
        "The step draws random numbers, or changes from call to call in a way that no trace shows, "
        f"and another update on {found.num_shards} shards than on one device may come of that "
        "alone. Verify it without noise, such as with a dropout rate of 0."
    )


def _measure_train_step(
    step: TrainStep, given: Sequence[Any], num_shards: Any, key: Any, groups: Any
) -> Measurement:
    if num_shards is not None or groups is not None:
        raise ArgumentError(
            "A TrainStep has its own number of shards and groups; leave num_shards and groups out."
        )
    if len(given) not in (2, 3):
        raise ArgumentTypeError(
            "verify(train_step, params, batch), or (train_step, params, model_state, batch), as "
            f"the loss takes them; got {len(given)} arguments after the step."
        )
    params, *model_state, batch = given
    check_agreement(
        "verify",
        lambda: {"batch": checksum(batch)},
        step.mesh,
        "Pass all rows in every process; each takes those of its own shards.",
    )
    shards = groups_of(step)

    def make(optimizer: Any, number: int) -> Any:
        alone = number == 1
        built = with_optimizer(step, optimizer, alone=alone)
        arrays = (params, *model_state)
        if alone:
            arrays = map_arrays(lambda x: on_part_of_mesh(x, built.mesh), arrays)
        state = built.init(arrays[0], 0 if key is None else key, model_state=(*arrays[1:], None)[0])
        take = lambda state, batch: built(state, own_rows(built, batch))
        return built if alone else take, state

    axes = axes_of_batch(step).of(batch)
    equal = has_equal_shards(step)
    return Measurement(make, (batch,), axes, None, shards, has_equal_shards=equal)


def _with_faults_of_others(found: Verification, mesh: Mesh) -> Verification:
    """Add the faults that other processes found, since each compares only its own devices."""
    own = json.dumps([dataclasses.asdict(fault) for fault in found.faults])
    of_each = [list(map(_fault, json.loads(text))) for text in exchange("verify", own, mesh)]
    everywhere = [fault for fault in of_each[0] if all(fault in faults for faults in of_each)]
    others = [
        dataclasses.replace(fault, sentence=f"{fault.sentence} (found in process {process})")
        for process, faults in enumerate(of_each)
        for fault in faults
        if fault not in everywhere
    ]
    return dataclasses.replace(found, faults=(*everywhere, *others))


def _fault(fields: dict[str, Any]) -> Fault:
    return Fault(**fields | {name: tuple(fields[name]) for name in ("leaves", "shards")})


# From comparisons to faults: each fault once, with all arrays that have it.


class Verdict(NamedTuple):
    """The verdict on an array."""

    kind: str  # the kind of its fault, or one of ``_FINE``, ``_TOO_SMALL`` and ``_NOTED``
    case: Comparison
    words: str = ""  # what differs; empty if the fault says by how much updates differ
    factor: str = ""


def _conclude(measured: Measurement) -> Verification:
    """Return what differs, in words."""
    notes = list(measured.notes)
    updates, statistics = measured.of(UPDATE), measured.of(STATISTICS)
    largest = max(rms(np.stack([case.one for case in groups])) for groups in updates.values())
    verdicts = {name: _verdict_on_parameter(groups, largest) for name, groups in updates.items()}
    faults = _faults(verdicts)
    for what, compared in ((STATISTICS, statistics), (METRIC, measured.of(METRIC))):
        # If there are several groups, each has statistics and metrics of its own.
        of_all = {name: each[0] for name, each in compared.items() if len(each) == 1}
        beside = {name: _verdict_on_other(what, name, case) for name, case in of_all.items()}
        faults += _faults(beside)
        notes += dict.fromkeys(each.words for each in beside.values() if each.kind == _NOTED)
    leaves = tuple(
        LeafReport(
            name=name,
            shape=measured.shapes[name],
            ratio=case.ratio,
            residual=case.residual,
            tolerance=case.tolerance + case.rounding / max(norm(case.one), 1e-300),
            verdict=kind,
        )
        for name, (kind, case, *_) in verdicts.items()
    )
    return Verification(measured.number, measured.rows, tuple(faults), leaves, tuple(notes))


def _verdict_on_parameter(groups: Sequence[Comparison], largest: float) -> Verdict:
    off = next((case for case in groups if not case.is_fine()), None)
    if off is None:
        return Verdict(_FINE, groups[0])
    floor = _VANISHING * largest * np.sqrt(len(off.one)) + groups[0].rounding
    if off.copies_differ:
        return Verdict("copies", off, "differs between the shards")
    if len(groups[0].many) == 1 and max(norm(groups[0].update), norm(groups[0].one)) <= floor:
        return Verdict(_TOO_SMALL, off)
    return Verdict(UPDATE, off, factor=_name_of_factor(off))


def _faults(verdicts: Mapping[str, Verdict]) -> list[Fault]:
    """Return the faults, one for all arrays that have the same."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, (kind, case, words, factor) in verdicts.items():
        if kind not in (_FINE, _TOO_SMALL, _NOTED):
            shards = case.members if kind == "copies" else ()
            alike.setdefault((kind, words, factor, shards), []).append(name)
    faults = []
    for (kind, words, factor, shards), names in alike.items():
        cases = [verdicts[name].case for name in names]
        every = kind in (UPDATE, "copies") and len(names) == len(verdicts) > 1
        which = f"all {len(verdicts)} parameters" if every else listed(names, 4)
        which = f"metric {which}" if kind == METRIC else which
        ratio = cases[0].ratio if kind == UPDATE else None
        sentence = f"{which}: {words or _describe_ratio(factor, cases)}"
        faults.append(Fault(kind, sentence, tuple(names), ratio, factor, shards))
    return faults


def _name_of_factor(case: Comparison) -> str:
    """Return the name of the ratio of two updates; empty if it has none."""
    ratio, size = case.ratio, norm(case.update)
    if not size or (ratio is not None and abs(ratio) * 1e6 < 1 and case.residual < case.tolerance):
        return "0"
    # A factor can be named with fewer digits, even in 16 bits.
    is_coarse = ratio is not None and abs(ratio - 1) > 0.1 and case.residual <= COARSE
    if ratio is None or ratio < 0 or not (is_coarse or case.is_multiple):
        return ""
    within = COARSE if case.residual > 1e-4 else _NEAR
    apart = {name: abs(math.log(ratio / known)) for name, known in _named_factors(case)}
    name = min(apart, key=lambda name: apart[name])
    is_near = apart[name] <= math.log1p(within) and abs(math.log(ratio)) > math.log1p(_NEAR)
    return name if is_near else ""


def _named_factors(case: Comparison) -> list[tuple[str, float]]:
    """Return the factors that have a name; n is the size of a group."""
    n, all_ = len(case.members), case.of_all
    sizes: list[tuple[str, str, float]] = [("N", "1/N", all_), ("√N", "1/√N", all_**0.5)]
    if n != all_:
        sizes = [
            ("N/n", "n/N", all_ / n),
            ("N", "1/N", all_),
            ("n", "1/n", n),
            ("√n", "1/√n", n**0.5),
        ]
    of = [each for each in sizes if each[2] != 1]
    return [pair for up, down, size in of for pair in ((up, size), (down, 1 / size))]


def _describe_ratio(factor: str, cases: list[Comparison]) -> str:
    """Describe by how much updates differ."""
    # What one device rounds to nearly 0 divides nothing.
    some = [case for case in cases if norm(case.one) > case.rounding]
    ratios = sorted(case.ratio for case in some if case.ratio is not None)
    if not ratios:
        return "an update, where one device makes none"
    low, high = (f"{x:.3f}" if abs(x) < 1e6 else f"{x:.1e}" for x in (ratios[0], ratios[-1]))
    words = low if low == high else f"{low} to {high}"
    words += f" = {factor}" if factor not in ("", "0") else ""
    words += " times the update of one device"
    if factor or all(case.is_multiple for case in cases):
        return words
    rest = max(case.residual for case in cases)
    return f"{words}, and {'up to ' * (len(cases) > 1)}{100 * rest:.2g}% of it in another direction"


def _verdict_on_other(what: str, name: str, case: Comparison) -> Verdict:
    """Return the verdict on a statistic or a metric."""
    many, one, own = case.many, case.one, case.own
    fine = Verdict(_FINE, case)

    def near(one: np.ndarray, other: np.ndarray, within: float = 1e-3) -> bool:
        scale = max(norm(one), norm(other))
        return norm(one - other) <= within * scale + case.rounding

    if what == METRIC and (case.is_stacked or one.size > 1):
        return fine  # each shard may have its own
    if all(near(copy, one) for copy in many):
        return fine
    if any(not near(copy, many[0], 1e-5) for copy in many[1:]):
        return (
            Verdict(_NOTED, case, _STACKED)
            if case.is_stacked
            else Verdict(what, case, _EACH_ITS_OWN)
        )
    if own is None or near(many[0], own.mean(axis=0)):
        return fine
    for shard, alone in enumerate(own):
        if near(many[0], alone, 1e-4):
            return Verdict(what, case, f"that of shard {shard} alone")
    number = len(own)
    for factor, times in (("N", number), ("1/N", 1 / number)):
        if near(many[0], times * own.mean(axis=0)):
            words = f"{times:.3f} = {factor} times that of one device"
            return Verdict(what, case, words, factor)
    return fine if what == METRIC else Verdict(_NOTED, case, f"{name} {_NEITHER}")
