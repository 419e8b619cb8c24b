"""Verification: what ``verify`` found, as plain data and in words."""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fault:
    """What differs between N shards and one device.

    >>> Fault("update", "w: 8.000 = N times the update of one device", ("w",), 8.0, "N").factor
    'N'

    Attributes:
      kind: what differs: ``"update"``, ``"copies"``, ``"bits"``, ``"statistics"``, ``"metric"``,
        ``"rows"``, ``"keys"`` or ``"work"``; the page on ``verify`` says what each is.
      sentence: what differs, where and by how much.
      leaves: the names of the arrays that differ.
      ratio: what the first of them has on N shards over what it has on one, by least squares;
        ``None`` if that is 0, or is not compared.
      factor: the ratio's name if it has one, such as ``"N"``, ``"1/N"`` or ``"√N"``; else empty.
      shards: the shards that it is about, if not all.
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
        return "\n".join([*self._verdict(), *(f"note: {note}" for note in self.notes)])

    __str__ = describe

    def to_json(self, **kwargs: Any) -> str:
        """The attributes, and ``ok``, as a JSON object; the arguments are those of json.dumps."""
        return json.dumps({"ok": self.ok, **dataclasses.asdict(self)}, **kwargs)

    def _verdict(self) -> list[str]:
        size, number = f"{self.num_shards} shards and {self.rows} rows", len(self.leaves)
        if self.ok:
            take = f"all {number} parameters take" if number > 1 else "the parameter takes"
            return [f"fine: on {size}, {take} the step of one device"]
        return [f"wrong on {size}:", *(f"  {each.sentence}" for each in self.faults)]
