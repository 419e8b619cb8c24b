"""Contracts on communication: the most bytes, the kinds of collectives, and what must be hidden."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from crossshard import _check
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools.inspection.collectives import KINDS, PRODUCTS, Collective, bytes_sent
from crossshard.tools.inspection.hlo import width
from crossshard.tools.inspection.report import Communication, collective_table

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


@dataclasses.dataclass(frozen=True)
class Breach:
    """A violation of a contract.

    Attributes:
      sentence: the violation, and how to fix it.
      shown: a table of the offending collectives.
    """

    sentence: str
    shown: str

    def __str__(self) -> str:
        return f"{self.sentence}:\n{self.shown}"


@dataclasses.dataclass(frozen=True)
class Contract:
    """Limits on the communication of a step.

    Attributes:
      max_bytes_ratio: the allowed multiple of the lower bound.
      forbid: kinds of collectives that must not occur.
      in_loop: whether collectives are allowed in loops; those of a step that sends no more than the
        lower bound always are: each turn sends another layer.
      min_hidden: the least share of the bytes that must be sent behind matrix products, or one for
        each of some kinds; ``None`` for no limit.

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
        object.__setattr__(self, "forbid", _checked_kinds(self.forbid))
        object.__setattr__(self, "max_bytes_ratio", _checked_ratio(self.max_bytes_ratio))
        _check.flag("in_loop", self.in_loop)
        object.__setattr__(self, "min_hidden", _checked_shares(self.min_hidden))

    def breaches(self, report: Communication) -> list[Breach]:
        """The violations of a step; scalars are not counted."""
        # Over the axes of a model the user communicates as the model needs it.
        sending = [each for each in report.collectives if each.bytes_sent and not each.within_shard]
        found = [self._forbidden(sending), self._looping(sending, report)]
        found += [self._too_much(sending, report), self._not_hidden(sending, report)]
        return [breach for breaches in found for breach in breaches]

    def _forbidden(self, sending: list[Collective]) -> Iterator[Breach]:
        if found := [each for each in sending if each.kind in self.forbid]:
            kinds = ", ".join(kind for kind in self.forbid if kind in {each.kind for each in found})
            table = collective_table(found)
            yield Breach(f"The step has forbidden collectives, {kinds}", table)

    def _looping(self, sending: list[Collective], report: Communication) -> Iterator[Breach]:
        found = [each for each in sending if each.in_loop and not self.in_loop]
        if found and not _in_rows(sending, report):
            yield Breach(
                "The step communicates within a loop; reduce gradients once after it, or pass "
                "in_loop=True if that is intended, for example for a loop over steps",
                collective_table(found),
            )

    def _not_hidden(self, sending: list[Collective], report: Communication) -> Iterator[Breach]:
        if self.min_hidden is None:
            return
        given = self.min_hidden
        shares = given if isinstance(given, Mapping) else {None: given}
        for kind, share in shares.items():
            kinds = KINDS if kind is None else (kind,)
            hidden = report.hidden_share_of(*kinds)
            if hidden is None or hidden >= share:
                continue
            exposed = [each for each in sending if each.kind in kinds and each.behind != PRODUCTS]
            of_kind = "" if kind is None else f" of {kind}"
            reason = "" if any(each.asynchronous for each in exposed) else _SYNCHRONOUS
            yield Breach(
                f"The step sends {hidden:.1%} of its bytes{of_kind} behind matrix products, but at "
                f"least {share:.1%} must be{reason}",
                collective_table(exposed),
            )

    def _too_much(self, sending: list[Collective], report: Communication) -> Iterator[Breach]:
        most = self.max_bytes_ratio
        if not sending or math.isinf(most):
            return
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
                collective_table(report.uncounted_loops),
            )
        else:
            sent = report.bytes_between_shards - _widening(sending, report)
            if sent > _allowed(most, report):
                ratio = f"{_times(sent, sending, report.lower_bound)}, but only {most:g} is allowed"
                yield Breach(f"The step sends {ratio}", report.table())


def _allowed(ratio: float, report: Communication) -> float:
    """The bytes of so many times the lower bound, with what padding and numbers add."""
    allowance = bytes_sent("all-reduce", report.shards, _NUMBERS * 4)
    return ratio * (report.lower_bound or 0) * (1 + _PADDING) + allowance


def _in_rows(sending: list[Collective], report: Communication) -> bool:
    """Whether no turn of a loop sends what another one does: all of them send the least."""
    sent = report.bytes_between_shards - _widening(sending, report)
    return not report.uncounted_loops and sent <= _allowed(1, report)


def _times(sent: float, sending: list[Collective], bound: float) -> str:
    times = f"{sent / bound:.3f} times the lower bound"
    if in_branches := sum(each.bytes_sent for each in sending if each.counted and each.in_branch):
        rest = (sent - in_branches) / bound
        return f"at most {times} ({rest:.3f} without what is in branches)"
    return times


def _checked_kinds(forbid: Any) -> tuple[str, ...]:
    if not isinstance(forbid, Iterable) or hasattr(forbid, "dtype"):
        raise ArgumentTypeError(
            f'forbid must be kinds of collectives, such as ("all-reduce",); got '
            f"{_check.shown(forbid)}."
        )
    kinds = (forbid,) if isinstance(forbid, str) else tuple(forbid)
    _check_known("forbid", kinds)
    return kinds


def _check_known(name: str, kinds: Iterable[Any]) -> None:
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            known = ", ".join(KINDS)
            raise ArgumentError(f"{name} must name kinds among {known}; got {_check.shown(kind)}.")


def _checked_ratio(ratio: Any) -> float:
    if not isinstance(ratio, numbers.Real) or isinstance(ratio, bool) or not float(ratio) >= 0:
        raise ArgumentError(
            f"max_bytes_ratio must be a number of at least 0; got {_check.shown(ratio)}."
        )
    return float(ratio)


def _checked_shares(shares: Any) -> float | dict[str, float] | None:
    if shares is None:
        return None
    if isinstance(shares, Mapping):
        _check_known("min_hidden", shares)
    for share in shares.values() if isinstance(shares, Mapping) else [shares]:
        is_number = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not is_number or not 0 <= float(share) <= 1:
            raise ArgumentError(
                f"min_hidden must be a share from 0 to 1, or one for each of some kinds, such as "
                f'{{"reduce-scatter": 0.8}}; got {_check.shown(shares)}.'
            )
    return dict(shares) if isinstance(shares, Mapping) else float(shares)


def _widening(sending: list[Collective], report: Communication) -> float:
    """The extra bytes of summing narrow gradients in 32 bits instead of the parameters' dtypes.

    At most one reduction of each gradient counts.
    """
    narrow = {
        width(dtype): total
        for dtype, total in report.parameters.items()
        if 0 < width(dtype) < _SUMMED_IN
    }
    if not narrow:
        return 0
    wide = sum(
        each.bytes_sent * (1 - min(narrow) / _SUMMED_IN)
        for each in sending
        if each.counted and {width(dtype) for dtype in each.dtypes} == {_SUMMED_IN}
    )
    added = sum(total * (_SUMMED_IN / bits - 1) for bits, total in narrow.items())
    return min(wide, bytes_sent("all-reduce", report.shards, added))
