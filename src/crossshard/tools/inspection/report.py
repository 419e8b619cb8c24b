"""Communication reports: data, JSON, the table of collectives with its totals, and contracts."""

import dataclasses
import json
import math
import numbers
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from crossshard import _check
from crossshard._text import count, exact_size, table
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools.inspection.collectives import (
    KERNELS,
    KINDS,
    NOTHING,
    PRODUCTS,
    Collective,
    bytes_sent,
)
from crossshard.tools.inspection.hlo import width

# The dtype of parameters of which only the bytes are given.
UNKNOWN = "unknown"

_HEAD = ("collective", "operands", "sent per shard", "groups", "when", "source")

# Allowance for padding, relative to the bytes of the parameters.
_PADDING = 0.005
# Allowance for losses and metrics in a bucket of gradients, in numbers of 32 bits.
_NUMBERS = 16
_SYNCHRONOUS = (
    ". The others are synchronous: compile for the devices that train, since XLA for CPUs does not "
    "compute while it sends"
)
# The bits in which narrower gradients are summed.
_SUMMED_IN = 32

# The properties that JSON has in addition to the attributes.
_TOTALS = (
    *("bytes_sent", "scalar_bytes_sent", "parameter_bytes", "parameter_dtypes"),
    *("bytes_in_branches", "bytes_by_axes", "bytes_between_shards", "lower_bound", "ratio"),
    *("bytes_behind_matrix_products", "bytes_behind_other_kernels", "bytes_exposed"),
    "hidden_share",
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device, from the compiler's memory analysis.

    Attributes:
      argument: the arguments.
      output: the results.
      temp: the temporaries.
      alias: the arguments that are aliased to outputs.
      peak: the peak memory.
    """

    argument: int
    output: int
    temp: int
    alias: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Communication:
    """The communication of one call of a compiled program, on each of its devices.

    Scalar operands, such as losses and metrics, are listed but not counted in ``bytes_sent``, the
    lower bound or the ratio. Of a conditional's branches, that which sends most is counted, so that
    a call sends at most as much.

    Attributes:
      collectives: in the order in which they run.
      devices: the number of devices that the program runs on.
      shards: N, the number of shards that collectives connect.
      parameters: the bytes of one shard's copy of the parameters by dtype: ``f32``, ``bf16``, or
        ``unknown`` if their bytes were given; empty if they are not known.
      memory: the compiler's memory analysis, or ``None``.

    >>> import jax, jax.numpy as jnp
    >>> import crossshard
    >>> report = crossshard.inspect(jax.jit(lambda w: 2 * w).lower(jnp.zeros(3)))
    >>> report.devices, report.bytes_sent, report.ratio
    (1, 0, None)
    """

    collectives: tuple[Collective, ...]
    devices: int
    shards: int
    parameters: Mapping[str, int]
    memory: Memory | None

    @property
    def counted(self) -> tuple[Collective, ...]:
        """The collectives without those in branches that send less than another, and rare ones."""
        return tuple(each for each in self.collectives if each.counted)

    @property
    def bytes_sent(self) -> float:
        """The bytes that one shard sends, without scalars."""
        return sum(each.bytes_sent for each in self.counted)

    @property
    def bytes_in_branches(self) -> float:
        """Those of them that it sends only if a conditional takes the branch that sends most."""
        return sum(each.bytes_sent for each in self.counted if each.in_branch)

    @property
    def scalar_bytes_sent(self) -> float:
        """The bytes that one shard sends for scalars."""
        return sum(each.scalar_bytes_sent for each in self.counted)

    @property
    def bytes_by_axes(self) -> dict[str, float]:
        """The bytes that one shard sends along each mesh axis, or several, without scalars.

        Those of collectives whose axes are unknown are left out.
        """
        found: dict[str, float] = defaultdict(float)
        for each in self.counted:
            if each.bytes_sent and each.axes:
                found[", ".join(each.axes)] += each.bytes_sent
        return dict(found)

    @property
    def bytes_between_shards(self) -> float:
        """``bytes_sent`` without what the devices of one shard send to each other."""
        return sum(each.bytes_sent for each in self.counted if not each.within_shard)

    @property
    def bytes_behind_matrix_products(self) -> float:
        """The bytes that a shard sends while matrix products are scheduled, without scalars."""
        return self._bytes_behind(PRODUCTS)

    @property
    def bytes_behind_other_kernels(self) -> float:
        """The bytes that it sends while only other kernels are, such as those of the update."""
        return self._bytes_behind(KERNELS)

    @property
    def bytes_exposed(self) -> float:
        """The bytes that it sends while nothing else is; all those of synchronous collectives."""
        return self._bytes_behind(NOTHING)

    @property
    def hidden_share(self) -> float | None:
        """The share of ``bytes_sent`` behind matrix products; ``None`` if nothing is sent."""
        return self.hidden_share_of(*KINDS)

    def hidden_share_of(self, *kinds: str) -> float | None:
        """``hidden_share`` of some kinds of collectives only; ``None`` if they send nothing.

        Gradients travel in ``"all-reduce"`` and ``"reduce-scatter"``; between CPUs of a job in
        ``"all-to-all"``, too.
        """
        sent = sum(each.bytes_sent for each in self.counted if each.kind in kinds)
        return self._bytes_behind(PRODUCTS, kinds) / sent if sent else None

    def _bytes_behind(self, what: str, kinds: Iterable[str] = KINDS) -> float:
        return sum(
            each.bytes_sent for each in self.counted if each.behind == what and each.kind in kinds
        )

    @property
    def parameter_bytes(self) -> int | None:
        """P, the bytes of one copy of the parameters; ``None`` if unknown."""
        return sum(self.parameters.values()) or None

    @property
    def parameter_dtypes(self) -> tuple[str, ...]:
        """The known dtypes of the parameters by XLA's names."""
        return tuple(dtype for dtype in self.parameters if dtype != UNKNOWN)

    @property
    def lower_bound(self) -> float | None:
        """2(N−1)/N · P: the least that one of N shards sends to average P bytes, once."""
        total = self.parameter_bytes
        return None if total is None else bytes_sent("all-reduce", self.shards, total)

    @property
    def ratio(self) -> float | None:
        """``bytes_between_shards`` over the lower bound; ``None`` if there is no bound."""
        return self.bytes_between_shards / self.lower_bound if self.lower_bound else None

    @property
    def uncounted_loops(self) -> tuple[Collective, ...]:
        """The collectives in loops of unknown length, counted once."""
        return tuple(each for each in self.collectives if each.times is None)

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON: its attributes and theirs, and the properties that are totals."""
        totals = {key: getattr(self, key) for key in _TOTALS}
        return json.dumps(dataclasses.asdict(self) | totals, indent=indent)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The collectives as a plain text table, and the total bytes, bound, overlap and memory."""
        scalars, least = self.scalar_bytes_sent, ""
        if any(each.in_branch for each in self.counted):
            least = "at most "
        if self.uncounted_loops:
            least = "at least "
        lines = [
            _collective_table(self.collectives),
            f"each of {self.devices} devices sends {least}{exact_size(self.bytes_sent)}"
            + f", and {exact_size(scalars)} for scalars" * bool(scalars),
        ]
        within = {", ".join(each.axes) for each in self.collectives if each.within_shard}
        if len(self.bytes_by_axes) > 1 or within:
            parts = (
                f"{axes} {exact_size(sent)}"
                + ", within a shard and not in the bound" * (axes in within)
                for axes, sent in self.bytes_by_axes.items()
            )
            lines.append(f"along {'; '.join(parts)}")
        if any(each.in_branch for each in self.counted):
            lines.append(
                f"of each conditional the branch that sends most is counted: "
                f"{exact_size(self.bytes_in_branches)} of these"
            )
        if self.lower_bound is None:
            lines.append("the parameters are unknown, so there is no lower bound")
        elif self.shards == 1:
            lines.append("no array is sent between shards, so the lower bound is 0 B")
        else:
            lines.append(
                f"{self.shards} shards need 2(N−1)/N · P = {exact_size(self.lower_bound)} for "
                f"{exact_size(self.parameter_bytes or 0)} of parameters; "
                f"ratio {least}{self.ratio or 0:.3f}"
            )
        if any(each.asynchronous and each.bytes_sent for each in self.collectives):
            lines.append(
                f"{exact_size(self.bytes_behind_matrix_products)} ({self.hidden_share or 0:.0%}) "
                f"behind matrix products, {exact_size(self.bytes_behind_other_kernels)} behind "
                f"other kernels, {exact_size(self.bytes_exposed)} exposed"
            )
        elif self.bytes_sent:
            lines.append("no collective is asynchronous, so all bytes are exposed")
        if self.memory is not None:
            kinds = dataclasses.asdict(self.memory).items()
            words = (f"{name} {exact_size(number)}" for name, number in kinds)
            lines.append(f"memory per device: {', '.join(words)}")
        return "\n".join(lines)


def _collective_table(collectives: Iterable[Collective]) -> str:
    """A plain text table of collectives."""
    return table(_HEAD, list(map(_row, collectives)))


def _row(each: Collective) -> tuple[str, ...]:
    """A collective as a row of the table, one text for each column."""
    shown = [str(operand) for operand in each.operands[:2]]
    if (more := len(each.operands) - 2) > 0:
        shown.append(f"and {more} more")
    when = [f"{'?' if each.times is None else each.times} times"] * each.in_loop
    when += ["in a branch"] * each.in_branch
    if each.asynchronous and each.matrix_products:
        when.append(f"behind {count(each.matrix_products, 'matrix product')}")
    elif each.asynchronous:
        kernels = each.other_kernels
        when.append(f"behind {count(kernels, 'kernel')}" if kernels else "exposed")
    among = f"{len(each.groups)} of {each.group_size}" + " in a shard" * each.within_shard
    if each.kind == "collective-permute":
        among = f"{len(each.groups)} pairs"
    sent = exact_size(each.bytes_sent + each.scalar_bytes_sent)
    where = each.source or each.op_name or each.name
    # The operands of an all-to-all are one array.
    if "to-all" not in each.kind and len(each.operands) > 1:
        where += f" (1 of {len(each.operands)} combined)"
    return (each.kind, ", ".join(shown), sent, among, ", ".join(when), where)


# Contracts: the most bytes, the kinds of collectives, and what must be hidden.


class Breach(NamedTuple):
    """A violation of a contract: what it is and how to mend it, and a table of who does it."""

    sentence: str
    shown: str

    def __str__(self) -> str:
        return f"{self.sentence}:\n{self.shown}"


@dataclasses.dataclass(frozen=True)
class Contract:
    """Limits on the communication of a step; see ``assert_communication``.

    Raises:
      ArgumentError: an unknown kind, a ratio that is not a number of at least 0, or a share that is
        not one from 0 to 1.
      ArgumentTypeError: ``forbid`` or ``in_loop`` has an invalid type.
    """

    max_bytes_ratio: float = 1.0
    forbid: Iterable[str] = ()
    in_loop: bool = False
    min_hidden: float | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        forbid, hidden = self.forbid, self.min_hidden
        if not isinstance(forbid, Iterable) or hasattr(forbid, "dtype"):
            raise ArgumentTypeError(
                f'forbid must be kinds of collectives, such as ("all-reduce",); got '
                f"{_check.shown(forbid)}."
            )
        forbid = (forbid,) if isinstance(forbid, str) else tuple(forbid)
        object.__setattr__(self, "forbid", forbid)
        shares = hidden if isinstance(hidden, Mapping) else {}
        for name, kinds in (("forbid", forbid), ("min_hidden", shares)):
            for kind in kinds:
                if not isinstance(kind, str) or kind not in KINDS:
                    raise ArgumentError(
                        f"{name} must name kinds among {', '.join(KINDS)}; got "
                        f"{_check.shown(kind)}."
                    )
        if not _is_number(self.max_bytes_ratio, math.inf):
            shown = _check.shown(self.max_bytes_ratio)
            raise ArgumentError(f"max_bytes_ratio must be a number of at least 0; got {shown}.")
        _check.flag("in_loop", self.in_loop)
        one = [0 if hidden is None else hidden]
        given = hidden.values() if isinstance(hidden, Mapping) else one
        if not all(_is_number(each, 1) for each in given):
            raise ArgumentError(
                f"min_hidden must be a share from 0 to 1, or one for each of some kinds, such as "
                f'{{"reduce-scatter": 0.8}}; got {_check.shown(hidden)}.'
            )

    def breaches(self, report: Communication) -> Iterator[Breach]:
        """The violations of a step; scalars are not counted."""
        # Over the axes of a model the user communicates as the model needs it.
        sending = [each for each in report.collectives if each.bytes_sent and not each.within_shard]
        sent = report.bytes_between_shards - _widening(sending, report)
        if found := [each for each in sending if each.kind in self.forbid]:
            named = ", ".join(kind for kind in self.forbid if kind in {each.kind for each in found})
            yield Breach(f"The step has forbidden collectives, {named}", _collective_table(found))
        found = [each for each in sending if each.in_loop and not self.in_loop]
        # Each turn sends another layer if all of them send the least.
        if found and (report.uncounted_loops or sent > _allowed(1, report)):
            yield Breach(
                "The step communicates within a loop; reduce gradients once after it, or pass "
                "in_loop=True if that is intended, for example for a loop over steps",
                _collective_table(found),
            )
        if sending and not math.isinf(self.max_bytes_ratio):
            yield from self._too_much(sending, sent, report)
        given = self.min_hidden
        for kind, share in (given if isinstance(given, Mapping) else {None: given}).items():
            kinds = KINDS if kind is None else (kind,)
            hidden = report.hidden_share_of(*kinds)
            if share is None or hidden is None or hidden >= share:
                continue
            exposed = [each for each in sending if each.kind in kinds and each.behind != PRODUCTS]
            of_kind = "" if kind is None else f" of {kind}"
            reason = "" if any(each.asynchronous for each in exposed) else _SYNCHRONOUS
            yield Breach(
                f"The step sends {hidden:.1%} of its bytes{of_kind} behind matrix products, but at "
                f"least {share:.1%} must be{reason}",
                _collective_table(exposed),
            )

    def _too_much(
        self, sending: list[Collective], sent: float, report: Communication
    ) -> Iterator[Breach]:
        if not report.lower_bound:
            yield Breach(
                "The step communicates, but its parameters are unknown. Pass parameters=, as "
                "arrays or a number of bytes (--parameters on the command line), or "
                'max_bytes_ratio=float("inf")',
                report.table(),
            )
        elif report.uncounted_loops:
            yield Breach(
                "The step communicates in a loop of unknown length, so its bytes cannot be "
                'counted. Give the loop a fixed length, or pass max_bytes_ratio=float("inf")',
                _collective_table(report.uncounted_loops),
            )
        elif sent > _allowed(self.max_bytes_ratio, report):
            times = f"{sent / report.lower_bound:.3f} times the lower bound"
            counted = (each for each in sending if each.counted and each.in_branch)
            if in_branches := sum(each.bytes_sent for each in counted):
                rest = (sent - in_branches) / report.lower_bound
                times = f"at most {times} ({rest:.3f} without what is in branches)"
            allowed = f"but only {self.max_bytes_ratio:g} is allowed"
            yield Breach(f"The step sends {times}, {allowed}", report.table())


def _allowed(ratio: float, report: Communication) -> float:
    """The bytes of so many times the lower bound, with what padding and numbers add."""
    allowance = bytes_sent("all-reduce", report.shards, _NUMBERS * 4)
    return ratio * (report.lower_bound or 0) * (1 + _PADDING) + allowance


def _widening(sending: list[Collective], report: Communication) -> float:
    """The extra bytes of summing narrow gradients in 32 bits instead of the parameters' dtypes.

    At most one reduction of each gradient counts.
    """
    widths = {dtype: width(dtype) for dtype in report.parameters if 0 < width(dtype) < _SUMMED_IN}
    wide = sum(
        each.bytes_sent * (1 - min(widths.values()) / _SUMMED_IN)
        for each in sending
        if widths and each.counted and {width(dtype) for dtype in each.dtypes} == {_SUMMED_IN}
    )
    added = sum(report.parameters[x] * (_SUMMED_IN / bits - 1) for x, bits in widths.items())
    return min(wide, bytes_sent("all-reduce", report.shards, added))


def _is_number(given: Any, most: float) -> bool:
    is_real = isinstance(given, numbers.Real) and not isinstance(given, bool)
    return is_real and 0 <= float(given) <= most
