"""What a program sends, against the least that data parallelism can: as objects, table and JSON."""

import dataclasses
import json
import math
from collections.abc import Iterable

from crossshard.inspection.collectives import Collective
from crossshard.inspection.hlo import width

_HEAD = ("collective", "operands", "sent per shard", "groups", "when", "source")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device, as the compiler counts them.

    Attributes:
      argument: the arguments.
      output: the results.
      temp: what is needed in between.
      alias: of the arguments, what results are written over.
      peak: the most that is held at once.
    """

    argument: int
    output: int
    temp: int
    alias: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Communication:
    """The communication of one call of a compiled program, on each of its devices.

    Operands of one element, as losses and metrics are, stand aside: they are listed, and are not
    in ``bytes_sent``, the lower bound or the ratio.

    Attributes:
      collectives: in the order in which they run.
      devices: how many devices the program runs on.
      shards: over how many of them the parameters are kept the same: those that are joined by
        collectives between a parameter and its new value, or by any where no parameter is told.
      parameter_bytes: the bytes of one whole copy of the parameters; none where the program does
        not tell them and the caller did not either.
      parameter_dtypes: XLA's names of the dtypes of those that the program tells.
      memory: the compiler's own numbers; none where it gives none.
    """

    collectives: tuple[Collective, ...]
    devices: int
    shards: int
    parameter_bytes: int | None
    parameter_dtypes: tuple[str, ...]
    memory: Memory | None

    @property
    def bytes_sent(self) -> float:
        """What one shard sends, scalars aside."""
        return sum(each.bytes_sent for each in self.collectives)

    @property
    def scalar_bytes_sent(self) -> float:
        """What one shard sends for scalars."""
        return sum(each.scalar_bytes_sent for each in self.collectives)

    @property
    def lower_bound(self) -> float | None:
        """2(N−1)/N · P: what one shard sends at least for N shards to average P bytes."""
        if self.parameter_bytes is None:
            return None
        return 2 * (self.shards - 1) * self.parameter_bytes / self.shards

    @property
    def ratio(self) -> float | None:
        """``bytes_sent`` over the lower bound; none where there is no bound to compare with."""
        return self.bytes_sent / self.lower_bound if self.lower_bound else None

    @property
    def uncounted_loops(self) -> tuple[Collective, ...]:
        """The collectives in loops of unknown length, of which one run is counted."""
        return tuple(each for each in self.collectives if each.times is None)

    @property
    def widened(self) -> tuple[str, ...]:
        """The dtypes that are sent and are wider than all of the parameters."""
        widest = max((width(dtype) for dtype in self.parameter_dtypes), default=math.inf)
        sent = (dtype for each in self.collectives if each.bytes_sent for dtype in each.dtypes)
        return tuple(dict.fromkeys(dtype for dtype in sent if width(dtype) > widest))

    def to_json(self, indent: int | None = None) -> str:
        """All of it as JSON: the attributes of this class, and of each collective, by name."""
        fields = dataclasses.asdict(self)
        for key in ("bytes_sent", "scalar_bytes_sent", "lower_bound", "ratio"):
            fields[key] = getattr(self, key)
        return json.dumps(fields, indent=indent)

    def table(self) -> str:
        """The collectives as a table of plain text, and under it the totals."""
        return "\n".join([collective_table(self.collectives), *self._totals()])

    def __str__(self) -> str:
        return self.table()

    def _totals(self) -> list[str]:
        aside = f", and {_bytes(self.scalar_bytes_sent)} for scalars" * bool(self.scalar_bytes_sent)
        least = "at least " * bool(self.uncounted_loops)
        lines = [f"each of {self.devices} devices sends {least}{_bytes(self.bytes_sent)}{aside}"]
        if self.uncounted_loops:
            lines.append("how often a loop runs (?) is not told, so one run of it is counted")
        if any(each.in_branch for each in self.collectives):
            lines.append("all branches of a conditional are counted, though one of them is taken")
        if self.lower_bound is None:
            lines.append("the parameters cannot be told from the program, so no bound is known")
        else:
            bound = f"{_bytes(self.lower_bound)} for {_bytes(self.parameter_bytes)} of parameters"
            ratio = "" if self.ratio is None else f"; ratio {least}{self.ratio:.3f}"
            lines.append(f"{self.shards} shards need 2(N−1)/N · P = {bound}{ratio}")
        if self.widened:
            sent, own = ", ".join(self.widened), ", ".join(self.parameter_dtypes)
            lines.append(f"sent as {sent}, the parameters being {own}; XLA for CPUs widens these")
        if self.memory is not None:
            parts = dataclasses.asdict(self.memory).items()
            lines.append("memory per device: " + ", ".join(f"{k} {_bytes(n)}" for k, n in parts))
        return lines


def collective_table(collectives: Iterable[Collective]) -> str:
    """Some collectives as a table of plain text."""
    rows = [_HEAD, *map(_row, collectives)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(each: Collective) -> tuple[str, ...]:
    shown = [str(operand) for operand in each.operands[:2]]
    more = len(each.operands) - len(shown)
    if more:
        shown.append(f"and {more} more")
    when = [f"{'?' if each.times is None else each.times} times"] * each.in_loop
    when += ["in a branch"] * each.in_branch
    among = f"{len(each.groups)} of {each.group_size}"
    if each.kind == "collective-permute":
        among = f"{len(each.groups)} pairs"
    return (
        each.kind,
        ", ".join(shown),
        _bytes(each.bytes_sent + each.scalar_bytes_sent),
        among,
        ", ".join(when),
        each.source or each.op_name or each.name,
    )


def _bytes(number: float | None) -> str:
    return f"{number or 0:,.0f} B"
