"""``verify``: runs a step on 1 and on N shards, and says what differs."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    loss_over_rows_of,
    of_few_bits,
    on_part_of_mesh,
    own_rows,
    with_sgd,
)
from crossshard.tools.verification.measurement import (
    COARSE,
    Comparison,
    Measurement,
    is_weighted,
    norm,
    rms,
)
from crossshard.tools.verification.runs import METRIC, STATISTICS, UPDATE, map_arrays

# Steps of a random one, with other keys each, of which the mean is compared.
_SAMPLES = 64
# Smaller than the largest leaf by so much, a gradient may be nothing but rounding.
_VANISHING = 1e-5
# How far a factor may be from one that has a name.
_NEAR = 5e-3
_FINE, _TOO_SMALL = "fine", "too small"
_OWN_STATISTICS = (
    "each shard normalises by the statistics of its own rows; one device would by those of all rows"
)

_EACH_ITS_OWN = "each shard has its own: not reduced"
_STACKED = "each shard keeps statistics of its own: reduce them before you evaluate or save"
_NEITHER = "is neither that of all rows nor the mean of the shards'"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What differs between N shards and one device.

    >>> Fault("update", "w: 8.000 = N times the update of one device", ("w",), 8.0, "N").factor
    'N'

    Attributes:
      kind: what differs: ``"update"``, ``"copies"``, ``"statistics"``, ``"metric"`` or ``"keys"``;
        the page on ``verify`` says what each is.
      sentence: what differs, where and by how much.
      leaves: the names of the arrays that differ.
      ratio: what the first of them has on N shards over what it has on one, by least squares;
        ``None`` if that is 0, or is not compared.
      factor: the ratio's name if it has one, such as ``"N"``, ``"1/N"`` or ``"√N"``; else empty.
      shards: the shards of the group that it is found in.
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
      ratio: the update on N shards over that on one, by least squares; ``None`` if that is 0.
      residual: what the ratio leaves unexplained, relative to the update; the standard is
        ``tolerance``.
      tolerance: up to which relative difference the two count as equal.
      verdict: ``"fine"``, the kind of its fault, or ``"too small"`` for a gradient that is nothing
        but rounding, or is hidden by noise.
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
      rows: the rows of the batch.
      faults: what differs; empty if nothing does.
      leaves: the comparison of each parameter.
      notes: what is no fault, but good to know.

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
        """The verdict, a line for each fault and each note."""
        size, number = f"{self.num_shards} shards and {self.rows} rows", len(self.leaves)
        take = f"all {number} parameters take" if number > 1 else "the parameter takes"
        verdict = [f"fine: on {size}, {take} the step of one device"]
        if self.faults:
            verdict = [f"wrong on {size}:", *(f"  {each.sentence}" for each in self.faults)]
        return "\n".join([*verdict, *(f"note: {note}" for note in self.notes)])

    __str__ = describe

    def to_json(self, **kwargs: Any) -> str:
        """The attributes, and ``ok``, as a JSON object; the arguments are those of json.dumps."""
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

    The update on N shards is compared, for each parameter, with that of one device on the whole
    batch. The two should be equal; if they are not, it says where, and by which factor.

    Args:
      step: ``make_step(optimizer, num_shards) -> (step, *state)``: your code that builds the step
        and its first state, with this optimizer in the place of your own, for so many devices. The
        step is called ``step(*state, *batch)`` and returns the next state first, and then what it
        likes; NNX modules and optimizers may be changed in place. It splits the batch itself. Or a
        ``TrainStep``, which is built again with SGD; the batch is then ``params, batch``. If there
        are several processes, all of them make this call with a ``TrainStep`` and all rows.
      *batch: the arguments after the state. Shard ``i`` of N should get the ``i``-th of N equal
        parts of their rows.
      num_shards: N; all devices if ``None``.
      key: a random key, typed or raw, which is passed to the step as the last argument, if it takes
        one. Keys that it has from elsewhere need no word. If the shards draw other numbers than one
        device, the means of 64 steps are compared, and a note says how exactly.
      groups: the shards that reduce together, if they are not all.
      batch_axis: the axis of the rows in all arrays; or a list with one entry for each of
        ``*batch``: an axis, ``None`` if it has no rows, or a pytree prefix of it with these. A
        ``TrainStep`` has its own.

    Returns:
      The faults, a comparison for each parameter, and the words: print it.

    Raises:
      ArgumentError: the step cannot be run as described, or N shards with these rows; the
        processes of a job pass different rows.
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
    # The step is run on one device, too, which no mesh of several can be set for.
    with _mesh.without_mesh():
        if isinstance(step, TrainStep):
            # It splits the batch by itself.
            if type(batch_axis) is not int or batch_axis != 0:
                raise ArgumentError(
                    f"A TrainStep has its own batch_axis; leave "
                    f"batch_axis={_check.shown(batch_axis)} out."
                )
            measurement = _of_train_step(step, batch, num_shards, key, groups)
            found = _found(measurement, lambda found: _with_those_of_others(found, step.mesh))
            params, *model_state, rows = batch
            of_loss = loss_over_rows_of(step, params, own_rows(step, rows), *model_state)
            few = "it was verified in float32: it sends {}, which no single step is exact in"
            sent = of_few_bits(step)
            beside = (of_loss, few.format(sent) if sent else "")
            return dataclasses.replace(found, notes=(*found.notes, *filter(None, beside)))
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
        return _found(measurement, lambda found: found)


def _found(
    measurement: Measurement, agreed: Callable[[Verification], Verification]
) -> Verification:
    """What differs; of a random step, what its mean differs in."""
    found = agreed(_conclude(measurement))
    if found.ok or not measurement.is_random():
        return found
    measurement.take_samples(_SAMPLES)
    return agreed(_conclude(measurement))


def _of_train_step(
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
    shards, factor = groups_of(step)

    def make(optimizer: Any, number: int) -> Any:
        alone = number == 1
        built = with_sgd(step, optimizer, alone=alone)
        arrays = (params, *model_state)
        if alone:
            arrays = map_arrays(lambda x: on_part_of_mesh(x, built.mesh), arrays)
        state = built.init(arrays[0], 0 if key is None else key, model_state=(*arrays[1:], None)[0])
        take = lambda state, batch: built(state, own_rows(built, batch))
        return built if alone else take, state

    axes = axes_of_batch(step).of(batch)
    return Measurement(make, (batch,), axes, None, shards, factor)


def _with_those_of_others(found: Verification, mesh: Mesh) -> Verification:
    """With the faults that other processes found, since each looks at its own devices."""
    own = json.dumps([dataclasses.asdict(fault) for fault in found.faults])
    of_each = [list(map(_fault, json.loads(told))) for told in exchange("verify", own, mesh)]
    everywhere = [fault for fault in of_each[0] if all(fault in faults for faults in of_each)]
    others = [
        dataclasses.replace(fault, sentence=f"{fault.sentence} (found in process {process})")
        for process, faults in enumerate(of_each)
        for fault in faults
        if fault not in everywhere
    ]
    return dataclasses.replace(found, faults=(*everywhere, *others))


def _fault(told: dict[str, Any]) -> Fault:
    return Fault(**told | {name: tuple(told[name]) for name in ("leaves", "shards")})


# From what was measured to faults, each once, with the parameters that have it.

Found = dict[str, Fault | str]


def _conclude(measured: Measurement) -> Verification:
    """What differs, in words."""
    notes, is_random = list(measured.notes), measured.samples > 1
    cases, statistics = measured.of(UPDATE), measured.of(STATISTICS)
    found, shown = _of_parameters(cases)
    excused = _of_own_statistics(found, shown) if _are_of_rows(statistics, cases) else []
    found |= dict.fromkeys(excused, _FINE)
    notes += [_OWN_STATISTICS] * bool(excused)
    faults = _joined(found, shown)
    for what, beside_them in ((STATISTICS, statistics), (METRIC, measured.of(METRIC))):
        beside, more = _beside(what, beside_them)
        faults, notes = faults + beside, notes + more
    if is_random and measured.keys_are_equal():
        words = "random keys are equal on all shards: shards that swap rows leave the step as it is"
        # What a shared key does to the mean is no fault of its own.
        faults = [x for x in faults if x.kind != UPDATE or x.factor]
        faults.insert(0, Fault("keys", words))
    if is_random:
        notes.append(_of_noise(measured, cases, found))
    leaves = tuple(
        LeafReport(
            name=name,
            shape=measured.shapes[name],
            ratio=case.ratio,
            residual=case.residual,
            tolerance=case.tolerance + case.noise / max(norm(case.one), 1e-300),
            verdict=fault.kind if isinstance(fault := found[name], Fault) else fault,
        )
        for name, case in shown.items()
    )
    return Verification(measured.number, measured.rows, tuple(faults), leaves, tuple(notes))


def _of_parameters(
    cases: Mapping[str, list[Comparison]],
) -> tuple[Found, dict[str, Comparison]]:
    """A fault of each, without a sentence if it is of a factor, or a verdict; and the case."""
    largest = max(rms(np.stack([case.one for case in of_leaf])) for of_leaf in cases.values())
    found: Found = {}
    shown = {}
    for name, of_leaf in cases.items():
        first = of_leaf[0]
        off = next((case for case in of_leaf if not case.is_fine()), None)
        case = shown[name] = off or first
        floor = _VANISHING * largest * np.sqrt(len(first.one)) + first.noise
        if case.copies_differ:
            found[name] = Fault("copies", "differs between the shards", shards=case.members)
        elif off is None and any(each.is_hidden for each in of_leaf):
            found[name] = _TOO_SMALL
        elif off is None:
            found[name] = _FINE
        elif len(first.many) == 1 and max(norm(first.update), norm(first.one)) <= floor:
            found[name] = _TOO_SMALL
        else:
            found[name] = Fault(UPDATE, "", ratio=case.ratio, factor=_factor(case))
    return found, shown


def _factor(case: Comparison) -> str:
    """The name of the ratio of two updates, of which one is a multiple of the other."""
    ratio, size = case.ratio, norm(case.update)
    if not size or (ratio is not None and abs(ratio) * 1e6 < 1 and case.residual < case.tolerance):
        return "0"
    # A factor is told with fewer digits, in 16 bits too.
    is_coarse = ratio is not None and abs(ratio - 1) > 0.1 and case.residual <= COARSE
    if ratio is None or ratio < 0 or not (is_coarse or case.is_multiple):
        return ""
    within = COARSE if case.residual > 1e-4 else _NEAR
    if case.runs > 1:
        within = min(0.3, _NEAR + case.noise / size)
    apart = {name: abs(math.log(ratio / known)) for name, known in _known(case)}
    name = min(apart, key=lambda name: apart[name])
    is_near = apart[name] <= math.log1p(within) and abs(math.log(ratio)) > math.log1p(_NEAR)
    return name if is_near else ""


def _known(case: Comparison) -> list[tuple[str, float]]:
    """The factors that have a name; n is the size of a group."""
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


def _are_of_rows(
    statistics: Mapping[str, list[Comparison]], updates: Mapping[str, list[Comparison]]
) -> bool:
    """Whether any of these is a statistic of rows, such as one of batch norm, not of gradients."""
    along = lambda x, y: x.size == y.size and abs(x @ y) > 0.9 * norm(x) * norm(y)
    ones = [[first.one for first, *_ in each.values()] for each in (statistics, updates)]
    return any(x.size > 1 and not any(along(x, y) for y in ones[1]) for x in ones[0])


def _of_own_statistics(found: Found, shown: Mapping[str, Comparison]) -> list[str]:
    """The parameters that differ only as each shard normalises by statistics of its own rows."""
    excused = []
    for members in {case.members for case in shown.values()}:
        names = [
            name
            for name, case in shown.items()
            if isinstance(fault := found[name], Fault) and fault.kind == UPDATE
            if not fault.factor and case.members == members and case.is_mean_of_own()
        ]
        owns = [own for name in names if (own := shown[name].own) is not None]
        if not owns:
            continue
        # It takes many numbers to tell this from a clip of each shard's gradient, and from weights.
        own = np.concatenate(owns, axis=1)
        sizes = np.linalg.norm(own, axis=1)
        one = np.concatenate([shown[name].one for name in names])
        within = max(shown[name].tolerance for name in names)
        is_clipped = np.ptp(sizes) <= 1e-3 * sizes.max()
        if shown[names[0]].runs > 1 or not (is_clipped or is_weighted(own, one, within)):
            excused += names
    return excused


def _joined(found: Found, shown: Mapping[str, Comparison]) -> list[Fault]:
    """One fault for all parameters that have it."""
    alike: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for name, fault in found.items():
        if isinstance(fault, Fault):
            alike.setdefault((fault.kind, fault.factor, fault.shards), []).append(name)
    faults = []
    for names in alike.values():
        fault = found[names[0]]
        assert isinstance(fault, Fault)
        every = len(names) == len(found) > 1
        which = f"all {len(found)} parameters" if every else listed(names, 4)
        words = fault.sentence or _times(fault.factor, [shown[name] for name in names])
        sentence = f"{which}: {words}"
        faults.append(dataclasses.replace(fault, sentence=sentence, leaves=tuple(names)))
    return faults


def _times(factor: str, cases: list[Comparison]) -> str:
    """By how much updates differ."""
    ratios = sorted(case.ratio for case in cases if case.ratio is not None)
    if not ratios:
        return "an update, where one device makes none"
    low, high = f"{ratios[0]:.3f}", f"{ratios[-1]:.3f}"
    words = low if low == high else f"{low} to {high}"
    words += f" = {factor}" if factor not in ("", "0") else ""
    words += " times the update of one device"
    if factor or all(case.is_multiple for case in cases):
        return words
    rest = max(case.residual for case in cases)
    return f"{words}, and {'up to ' * (len(cases) > 1)}{100 * rest:.2g}% of it in another direction"


def _beside(what: str, compared: Mapping[str, list[Comparison]]) -> tuple[list[Fault], list[str]]:
    """What differs of statistics or metrics, by their names, and what should be noted."""
    found: dict[tuple[str, str], list[str]] = {}
    notes: dict[str, None] = {}
    for name, (mean, *of_other_groups) in compared.items():
        if of_other_groups or (what == METRIC and (mean.is_stacked or mean.one.size > 1)):
            continue  # each group has its own
        words, factor = _told(mean)
        if words == _EACH_ITS_OWN and mean.is_stacked:
            notes[_STACKED] = None
        elif words == _NEITHER and what == STATISTICS:
            notes[f"{name} {words}"] = None
        elif words and words != _NEITHER:
            found.setdefault((words, factor), []).append(name)
    before = "metric " if what == METRIC else ""
    faults = [
        Fault(what, f"{before}{listed(names, 4)}: {words}", tuple(names), factor=factor)
        for (words, factor), names in found.items()
    ]
    return faults, list(notes)


def _told(mean: Comparison) -> tuple[str, str]:
    """How a statistic or a metric differs, and by which factor; empty if it does not."""
    many, one, own, chance = mean.many, mean.one, mean.own, mean.chance
    of_own = mean.noise_of_own * chance

    def near(one: np.ndarray, other: np.ndarray, off: float, within: float = 1e-3) -> bool:
        scale = max(norm(one), norm(other))
        return norm(one - other) <= within * scale + off + mean.rounding

    if all(near(copy, one, chance) for copy in many):
        return "", ""
    if any(not near(copy, many[0], 0.0, 1e-5) for copy in many[1:]):
        return _EACH_ITS_OWN, ""
    if own is None or near(many[0], own.mean(axis=0), of_own):
        return "", ""
    number = len(own)
    for shard, alone in enumerate(own):
        if near(many[0], alone, of_own, 1e-4):
            return f"that of shard {shard} alone", ""
    for name, factor in (("N", number), ("1/N", 1 / number)):
        if near(many[0], factor * own.mean(axis=0), factor * of_own):
            return f"{factor:.3f} = {name} times that of one device", name
    return _NEITHER, ""


def _of_noise(measured: Measurement, cases: Mapping[str, list[Comparison]], found: Found) -> str:
    """How exactly a random step was compared, and what was not."""
    words = (
        f"the step draws other random numbers on {measured.number} shards than on one device, so "
        f"means of {measured.samples} steps are compared"
    )
    off = lambda of_leaf: max(case.noise / max(norm(case.one), 1e-300) for case in of_leaf)
    fine = [off(of_leaf) for name, of_leaf in cases.items() if found[name] == _FINE]
    hidden = [name for name, of_leaf in cases.items() if any(case.is_hidden for case in of_leaf)]
    words += f", to within {100 * max(fine):.0f}% of an update" if fine else ""
    return words + (f"; noise hides that of {listed(hidden, 4)}" if hidden else "")
