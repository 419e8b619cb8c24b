"""Diagnosis: what ``doctor`` has seen, as plain data and in words."""

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from typing import Any

from crossshard._annotations import Json
from crossshard._text import rate, size, table, time


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that looks wrong, or a note.

    Attributes:
      kind: its name, such as ``"proxy"``; the page on ``doctor`` lists them.
      sentence: the setting, why it is wrong, and what to write instead.
    """

    kind: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that JAX has found.

    Attributes:
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      kind: the name of the first, such as ``"NVIDIA H100 80GB HBM3"``.
      number: how many all processes have together.
      local: how many this process has.
      processes: the number of processes.
      process: which of them this is.
      memory: bytes of one device; those of the machine for CPUs; ``None`` if unknown.
    """

    platform: str
    kind: str
    number: int
    local: int
    processes: int
    process: int
    memory: int | None


@dataclasses.dataclass(frozen=True)
class CollectiveTest:
    """One collective of one size, run on all devices.

    Attributes:
      kind: ``"all-reduce"`` and so on.
      size: bytes of the larger of operand and result, on each device.
      bytes_sent: that a device sends, with the optimal algorithm.
      seconds: of one run, the median of several.
      expected: bytes/s that a device should send by published figures, or on CPUs as a copy in
        memory, measured in turn; ``None`` if unknown.
      right: whether the devices of this process got the values that numpy has.
    """

    kind: str
    size: int
    bytes_sent: float
    seconds: float
    expected: float | None
    right: bool

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a device has sent."""
        return self.bytes_sent / self.seconds


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What ``crossshard.doctor`` has seen: print it, or read its attributes.

    Attributes:
      versions: of Python, crossshard and the packages that it runs on.
      devices: what JAX has found; ``None`` if it found nothing in time.
      mesh: the mesh that crossshard uses if it is given none: names and sizes of the axes.
      job: which processes train together: ``num_processes``, ``process_id``,
        ``coordinator_address``, ``local_device_ids``; ``found_in`` says who told, and ``connected``
        whether they have met.
      settings: the environment variables that JAX, XLA and crossshard read here.
      tests: the collectives that were run; empty without a self-test.
      findings: what looks wrong. Of several processes, the first has its own; each other one has
        those that the first does not have.
      notes: what is no fault, but has a price.
      stuck: whether a collective, or JAX itself, has not come to an end.

    >>> Diagnosis({}, None, {}, {}, {}, (), (), ()).ok
    True
    """

    versions: Mapping[str, str]
    devices: Devices | None
    mesh: Mapping[str, int]
    job: Mapping[str, Json]
    settings: Mapping[str, str]
    tests: tuple[CollectiveTest, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    stuck: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing looks wrong."""
        return not self.findings

    def describe(self) -> str:
        """The machine, a line for each collective, and what looks wrong."""
        rows = [
            ("versions", ", ".join(f"{name} {each}" for name, each in self.versions.items())),
            ("devices", _of_devices(self.devices)),
            ("processes", _of_job(self.job)),
            ("mesh", ", ".join(f"{name} = {each}" for name, each in self.mesh.items()) or "none"),
            ("settings", " ".join(f"{name}={each}" for name, each in self.settings.items())),
        ]
        lines = [_wrapped(f"{name:<11}{text or 'none'}") for name, text in rows]
        if self.tests:
            is_cpu = self.devices is not None and self.devices.platform == "cpu"
            lines += ["", _table(self.tests, "memory copy" if is_cpu else "published")]
        return "\n".join([*lines, "", *self._conclusion()])

    __str__ = describe

    def _conclusion(self) -> list[str]:
        """What looks wrong and the notes, a line for each."""
        number = len(self.findings)
        head = {0: "Nothing looks wrong.", 1: "One thing looks wrong:"}
        return [
            head.get(number, f"{number} things look wrong:"),
            *(f"  {each.sentence}" for each in self.findings),
            *(f"note: {each.sentence}" for each in self.notes),
        ]

    def to_json(self, **kwargs: Any) -> str:
        """The attributes, and ``ok``, as a JSON object; the arguments are those of json.dumps."""
        return json.dumps({"ok": self.ok, **dataclasses.asdict(self)}, **kwargs)


def _wrapped(line: str) -> str:
    indent = " " * 11
    return textwrap.fill(
        line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _of_devices(devices: Devices | None) -> str:
    if devices is None:
        return "none"
    own = f", {devices.local} of this process" if devices.processes > 1 else ""
    of = "on a machine with " if devices.platform == "cpu" else "with "
    memory = "" if devices.memory is None else f", {of}{size(devices.memory)}"
    kind = "" if devices.kind == devices.platform else f" ({devices.kind})"
    return f"{devices.number} × {devices.platform}{kind}{own}{memory}"


def _of_job(job: Mapping[str, Any]) -> str:
    number = job.get("num_processes", 1)
    if number == 1:
        return "1"
    address = job.get("coordinator_address")
    told = "" if job["found_in"] == "nothing" else f", from {job['found_in']}"
    met = "connected" if job["connected"] else "not connected"
    where = f", at {address}" if address else ""
    return f"{number}{told}; this is {job['process_id']}, {met}{where}"


def _table(tests: tuple[CollectiveTest, ...], expected: str) -> str:
    head = ("collective", "size", "sent", "time", "speed", expected, "part", "values")
    rows = []
    for each in tests:
        sent = (size(each.size), size(each.bytes_sent), time(each.seconds), rate(each.bandwidth))
        part = ("?", "?")
        if each.expected:
            part = (rate(each.expected), f"{100 * each.bandwidth / each.expected:.3g} %")
        rows.append((each.kind, *sent, *part, "right" if each.right else "WRONG"))
    return table(head, rows)
