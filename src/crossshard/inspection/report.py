"""What a program sends, against the least that data parallelism can: as objects, table and JSON."""

import dataclasses
import json
import math
from collections.abc import Iterable

from crossshard.inspection.collectives import Collective
from crossshard.inspection.hlo import width
from crossshard.inspection.parameters import Parameters

# The properties that stand in JSON beside the attributes.
_COUNTED = (
    *("bytes_sent", "scalar_bytes_sent", "parameter_bytes", "parameter_dtypes"),
    *("lower_bound", "ratio"),
)

# XLA sums in what it is told to, or says that it does not; what it only moves, it may convert.
_SUMS = {"all-reduce", "reduce-scatter"}

HEAD = ("collective", "operands", "sent per shard", "groups", "when", "source")


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
      shards: over how many shards the parameters are kept the same, those of the most bytes where
        they differ; where no parameter is told, how many devices its collectives join.
      parameters: what is kept the same, by dtype and shards; empty where the program does not tell
        it and the caller did not either.
      memory: the compiler's own numbers; none where it gives none.

    >>> import jax, jax.numpy as jnp
    >>> import crossshard
    >>> report = crossshard.inspect(jax.jit(lambda w: 2 * w).lower(jnp.zeros(3)))
    >>> report.devices, report.bytes_sent, report.ratio
    (1, 0, None)
    """

    collectives: tuple[Collective, ...]
    devices: int
    shards: int
    parameters: tuple[Parameters, ...]
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
    def parameter_bytes(self) -> int | None:
        """The bytes of one whole copy of the parameters; none where they are not known."""
        return sum(each.bytes for each in self.parameters) or None

    @property
    def parameter_dtypes(self) -> tuple[str, ...]:
        """XLA's names of the parameters' dtypes, as far as they are known, each once."""
        return tuple(dict.fromkeys(each.dtype for each in self.parameters if each.dtype))

    @property
    def lower_bound(self) -> float | None:
        """2(N−1)/N · P: what one shard sends at least for N shards to average P bytes.

        It is added up where parameters are kept the same over different numbers of shards, and
        counts every update where a loop makes several.
        """
        return sum(each.lower_bound for each in self.parameters) if self.parameters else None

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
        """The dtypes that are sent and are wider than those of all parameters."""
        sent = (dtype for each in self._wide for dtype in each.dtypes)
        return tuple(dict.fromkeys(dtype for dtype in sent if self._is_wide(dtype)))

    def to_json(self, indent: int | None = None) -> str:
        """All of it as JSON.

        The keys are the attributes of this class and of those in it, and of the properties
        ``bytes_sent``, ``scalar_bytes_sent``, ``parameter_bytes``, ``parameter_dtypes``,
        ``lower_bound`` and ``ratio``.
        """
        fields = dataclasses.asdict(self)
        for key in _COUNTED:
            fields[key] = getattr(self, key)
        return json.dumps(fields, indent=indent)

    def table(self) -> str:
        """The collectives as a table of plain text, and under it the totals."""
        return "\n".join([collective_table(self.collectives), *self.totals()])

    def __str__(self) -> str:
        return self.table()

    def totals(self) -> list[str]:
        """The lines under the table: what is sent in all, against the least, and memory."""
        aside = f", and {_bytes(self.scalar_bytes_sent)} for scalars" * bool(self.scalar_bytes_sent)
        least = "at least " * bool(self.uncounted_loops)
        lines = [f"each of {self.devices} devices sends {least}{_bytes(self.bytes_sent)}{aside}"]
        if self.uncounted_loops:
            lines.append("how often a loop runs (?) is not told, so one run of it is counted")
        if any(each.in_branch for each in self.collectives):
            lines.append("all branches of a conditional are counted, though one of them is taken")
        lines += self._bound(least)
        if self._wide:
            lines.append(self._widening())
        if self.memory is not None:
            parts = dataclasses.asdict(self.memory).items()
            lines.append("memory per device: " + ", ".join(f"{k} {_bytes(n)}" for k, n in parts))
        return lines

    def _bound(self, least: str) -> list[str]:
        if self.lower_bound is None:
            return ["the parameters cannot be told from the program, so no bound is known"]
        ratio = "" if self.ratio is None else f"; ratio {least}{self.ratio:.3f}"
        alike = {(each.shards, each.updates) for each in self.parameters}
        bounds = [
            _bound_of(
                sum(each.bytes for each in self.parameters if (each.shards, each.updates) == kind),
                *kind,
            )
            for kind in sorted(alike, reverse=True)
        ]
        if len(bounds) == 1:
            return [bounds[0] + ratio]
        return [*bounds, f"together {_bytes(self.lower_bound)}{ratio}"]

    @property
    def _wide(self) -> list[Collective]:
        return [
            each
            for each in self.collectives
            if each.bytes_sent and any(map(self._is_wide, each.dtypes))
        ]

    def _is_wide(self, dtype: str) -> bool:
        return width(dtype) > max(map(width, self.parameter_dtypes), default=math.inf)

    def _widening(self) -> str:
        """What is sent wider than the parameters are, and who has widened it."""
        kinds: dict[str, list[str]] = {}
        for each in self._wide:
            who = "by the step, or by XLA for CPUs"
            if each.widened:
                who = "by XLA, as it does for CPUs"
            elif each.kind in _SUMS:
                who = "by the step itself"
            kinds.setdefault(who, []).append(each.kind)
        sent, own = ", ".join(self.widened), ", ".join(self.parameter_dtypes)
        by = [f"{', '.join(dict.fromkeys(found))} {who}" for who, found in kinds.items()]
        return f"sent as {sent}, the parameters being {own}; widened: {'; '.join(by)}"


def _bound_of(parameters: int, shards: int, updates: int) -> str:
    kind = Parameters(None, parameters, shards, updates)
    often = f" · {updates} updates" if updates != 1 else ""
    return (
        f"{shards} shards need 2(N−1)/N · P{often} = {_bytes(kind.lower_bound)} for "
        f"{_bytes(parameters)} of parameters"
    )


def collective_table(collectives: Iterable[Collective]) -> str:
    """Some collectives as a table of plain text."""
    rows = [HEAD, *map(row, collectives)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def row(each: Collective) -> tuple[str, ...]:
    """A collective in the words of the table, one for each column."""
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
        _where(each),
    )


def _where(each: Collective) -> str:
    line = each.source or each.op_name or each.name
    return f"{line} (1 of {each.combined} combined)" if each.combined > 1 else line


def _bytes(number: float | None) -> str:
    return f"{number or 0:,.0f} B"
