"""Verification: what ``verify`` found, as plain data and in words."""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is wrong with a step.

    >>> Fault("summed", "w: 8.000 = N: summed over the shards, not averaged", ("w",), 8.0).leaves
    ('w',)

    Attributes:
      kind: its name, such as ``"summed"``; the page on ``verify`` lists them.
      sentence: what is wrong, in words.
      leaves: the names of the arrays that it is in.
      ratio: the update on N shards over that on one, if the fault is a factor.
      shards: the shards that it is about, if not all.
    """

    kind: str
    sentence: str
    leaves: tuple[str, ...] = ()
    ratio: float | None = None
    shards: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """How the update of one parameter compares.

    >>> LeafReport("w", (3,), 8.0, 1e-7, 1e-4, "summed").ratio
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
      faults: what is wrong; empty if nothing is.
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
