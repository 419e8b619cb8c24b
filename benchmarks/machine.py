"""The machine and the versions that a result was seen with."""

import dataclasses
import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path

import crossshard
from benchmarks.floor import cores


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a result depends on besides the code.

    Attributes:
      cpu: the model's name.
      cores: how many this process may use.
      memory_gib: of the machine.
      system: the operating system.
      load: runnable processes of the last minute, before the bench began.
      date: of the run, in UTC.
      versions: by package; those of the peers are added when they have answered.
    """

    cpu: str
    cores: int
    memory_gib: float
    system: str
    load: float
    date: str
    versions: dict[str, str]


def this_machine() -> Machine:
    """The one that this runs on, now."""
    versions = {name: version(name) for name in ("jax", "optax", "flax", "numpy")}
    return Machine(
        cpu=_cpu(),
        cores=cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}",
        load=round(os.getloadavg()[0], 2),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions={
            "crossshard": crossshard.__version__,
            "Python": platform.python_version(),
            **versions,
        },
    )


def _cpu() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def free_memory() -> int:
    """The bytes that could be taken without swapping."""
    listed = Path("/proc/meminfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    # Elsewhere the system says only how much there is; half of it is a guess on the safe side.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
