"""Tools: inspect, plan, verify, doctor and the command; each is loaded when it is asked for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossshard.tools.diagnosis.doctor import (
        CollectiveTest,
        Devices,
        Diagnosis,
        Finding,
        doctor,
    )
    from crossshard.tools.inspection.collectives import Collective
    from crossshard.tools.inspection.hlo import Array
    from crossshard.tools.inspection.inspect import inspect
    from crossshard.tools.inspection.report import Communication, Memory
    from crossshard.tools.planning.plan import Candidate, LinkUse, MemoryUse, Plan, plan
    from crossshard.tools.planning.topology import Topology, topology
    from crossshard.tools.verification.verify import Fault, LeafReport, Verification, verify

__all__ = [
    "Array",
    "Candidate",
    "Collective",
    "CollectiveTest",
    "Communication",
    "Devices",
    "Diagnosis",
    "Fault",
    "Finding",
    "LeafReport",
    "LinkUse",
    "Memory",
    "MemoryUse",
    "Plan",
    "Topology",
    "Verification",
    "doctor",
    "inspect",
    "plan",
    "topology",
    "verify",
]

# The same once more for Python, which skips the imports above: importing crossshard loads no tool.
_HOMES = {
    "diagnosis.doctor": "CollectiveTest Devices Diagnosis Finding doctor",
    "inspection.collectives": "Collective",
    "inspection.hlo": "Array",
    "inspection.inspect": "inspect",
    "inspection.report": "Communication Memory",
    "planning.plan": "Candidate LinkUse MemoryUse Plan plan",
    "planning.topology": "Topology topology",
    "verification.verify": "Fault LeafReport Verification verify",
}


# To a type checker the names above are all that there are.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names.split():
                return getattr(importlib.import_module(f"{__name__}.{home}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
