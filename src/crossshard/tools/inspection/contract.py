"""Contracts on communication: the most bytes, the kinds of collectives, and what must be hidden."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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


class Breach(NamedTuple):
    """A violation of a contract: what it is, how to fix it, and a table of who does it."""

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
        object.__setattr__(self, "forbid", _checked_kinds(self.forbid))
        if not _is_number(self.max_bytes_ratio, 0, math.inf):
            shown = _check.shown(self.max_bytes_ratio)
            raise ArgumentError(f"max_bytes_ratio must be a number of at least 0; got {shown}.")
        _check.flag("in_loop", self.in_loop)
        _check_shares(self.min_hidden)

    def breaches(self, report: Communication) -> Iterator[Breach]:
        """The violations of a step; scalars are not counted."""
        # Over the axes of a model the user communicates as the model needs it.
        sending = [each for each in report.collectives if each.bytes_sent and not each.within_shard]
        sent = report.bytes_between_shards - _widening(sending, report)
        if found := [each for each in sending if each.kind in self.forbid]:
            named = ", ".join(kind for kind in self.forbid if kind in {each.kind for each in found})
            yield Breach(f"The step has forbidden collectives, {named}", collective_table(found))
        found = [each for each in sending if each.in_loop and not self.in_loop]
        # Each turn sends another layer if all of them send the least.
        if found and (report.uncounted_loops or sent > _allowed(1, report)):
            yield Breach(
                "The step communicates within a loop; reduce gradients once after it, or pass "
                "in_loop=True if that is intended, for example for a loop over steps",
                collective_table(found),
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
                collective_table(exposed),
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
                collective_table(report.uncounted_loops),
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


def _checked_kinds(forbid: Any) -> tuple[str, ...]:
    if not isinstance(forbid, Iterable) or hasattr(forbid, "dtype"):
        shown = _check.shown(forbid)
        raise ArgumentTypeError(
            f'forbid must be kinds of collectives, such as ("all-reduce",); got {shown}.'
        )
    kinds = (forbid,) if isinstance(forbid, str) else tuple(forbid)
    _check_known("forbid", kinds)
    return kinds


def _check_known(name: str, kinds: Iterable[Any]) -> None:
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            known = ", ".join(KINDS)
            raise ArgumentError(f"{name} must name kinds among {known}; got {_check.shown(kind)}.")


def _check_shares(given: Any) -> None:
    if isinstance(given, Mapping):
        _check_known("min_hidden", given)
    shares = given.values() if isinstance(given, Mapping) else [0 if given is None else given]
    if not all(_is_number(each, 0, 1) for each in shares):
        raise ArgumentError(
            f"min_hidden must be a share from 0 to 1, or one for each of some kinds, such as "
            f'{{"reduce-scatter": 0.8}}; got {_check.shown(given)}.'
        )


def _is_number(given: Any, least: float, most: float) -> bool:
    is_real = isinstance(given, numbers.Real) and not isinstance(given, bool)
    return is_real and least <= float(given) <= most
