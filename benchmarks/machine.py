"""The machine and the package versions of a result."""

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
    """The machine, system and versions of a run.

    Attributes:
      cpu: the name of the CPU model.
      cores: the number of cores that this process may use.
      memory_gib: the memory of the machine.
      system: the operating system.
      load: the load average of the minute before the benchmark.
      date: the date of the run, in UTC.
      versions: the versions of packages; those of the baselines in `peers/` are added later.
    """

    cpu: str
    cores: int
    memory_gib: float
    system: str
    load: float
    date: str
    versions: dict[str, str]


def this_machine() -> Machine:
    """Describe the current machine."""
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
    return _listed("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def free_memory() -> int:
    """The bytes that can be allocated without swapping."""
    if available := _listed("/proc/meminfo", "MemAvailable"):
        return int(available.split()[0]) * 1024
    # Other systems report only the total; half of it is a safe guess.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _listed(file: str, name: str) -> str:
    """What stands after a name in a file of Linux; empty without one."""
    lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
