"""What ``doctor`` has seen, as plain data and in words."""

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from typing import Any

from crossshard import _text
from crossshard._annotations import Json


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that looks wrong.

    Attributes:
      kind: its name, such as ``"versions"``; the page on ``doctor`` lists them.
      sentence: what it is, and what to write instead.
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

    def __str__(self) -> str:
        own = f", {self.local} of this process" if self.processes > 1 else ""
        of = "on a machine with " if self.platform == "cpu" else "with "
        memory = "" if self.memory is None else f", {of}{_text.size(self.memory)}"
        kind = "" if self.kind == self.platform else f" ({self.kind})"
        return f"{self.number} × {self.platform}{kind}{own}{memory}"


@dataclasses.dataclass(frozen=True)
class CollectiveTest:
    """One collective of one size, run on all devices.

    Attributes:
      kind: ``"all-reduce"``.
      size: bytes of the array on each device.
      bytes_sent: that a device sends, with the optimal algorithm.
      seconds: of one run, the median of several.
      right: whether the devices of this process got the values that numpy has.
    """

    kind: str
    size: int
    bytes_sent: float
    seconds: float
    right: bool

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a device has sent."""
        return self.bytes_sent / self.seconds

    def _row(self) -> tuple[str, ...]:
        sizes = (_text.size(self.size), _text.size(self.bytes_sent), _text.time(self.seconds))
        return (self.kind, *sizes, _text.rate(self.bandwidth), "right" if self.right else "WRONG")


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
      tests: the collective, in each size; empty without a self-test.
      findings: what looks wrong. Of several processes, the first has its own; each other one has
        those that the first does not have.
      stuck: whether a collective, or JAX itself, has not come to an end.

    >>> Diagnosis({}, None, {}, {}, {}, (), ()).ok
    True
    """

    versions: Mapping[str, str]
    devices: Devices | None
    mesh: Mapping[str, int]
    job: Mapping[str, Json]
    settings: Mapping[str, str]
    tests: tuple[CollectiveTest, ...]
    findings: tuple[Finding, ...]
    stuck: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing looks wrong."""
        return not self.findings

    def describe(self) -> str:
        """The machine, a line for each size of the collective, and what looks wrong."""
        rows = {
            "versions": ", ".join(f"{name} {each}" for name, each in self.versions.items()),
            "devices": str(self.devices or ""),
            "processes": _of_job(self.job),
            "mesh": ", ".join(f"{name} = {each}" for name, each in self.mesh.items()),
            "settings": " ".join(f"{name}={each}" for name, each in self.settings.items()),
        }
        wrapped = textwrap.TextWrapper(
            100, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False
        )
        lines = [wrapped.fill(f"{name:<11}{text or 'none'}") for name, text in rows.items()]
        if self.tests:
            head = ("collective", "size", "sent", "time", "speed", "values")
            lines += ["", _text.table(head, [each._row() for each in self.tests])]
        heads = {0: "Nothing looks wrong.", 1: "One thing looks wrong:"}
        number = len(self.findings)
        lines += ["", heads.get(number, f"{number} things look wrong:")]
        return "\n".join([*lines, *(f"  {each.sentence}" for each in self.findings)])

    __str__ = describe

    def to_json(self, **kwargs: Any) -> str:
        """The attributes, and ``ok``, as a JSON object; the arguments are those of json.dumps."""
        return json.dumps({"ok": self.ok, **dataclasses.asdict(self)}, **kwargs)


def _of_job(job: Mapping[str, Any]) -> str:
    number = job.get("num_processes", 1)
    if number == 1:
        return "1"
    told = "" if job["found_in"] == "nothing" else f", from {job['found_in']}"
    met = "connected" if job["connected"] else "not connected"
    where = f", at {address}" if (address := job["coordinator_address"]) else ""
    return f"{number}{told}; this is {job['process_id']}, {met}{where}"
