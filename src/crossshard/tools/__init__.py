"""Tools: inspect, plan, verify, doctor and the command; ``crossshard`` loads them when asked."""

from crossshard.tools.diagnosis import (
    CollectiveTest,
    Devices,
    Diagnosis,
    Finding,
    doctor,
)
from crossshard.tools.inspection.collectives import Collective
from crossshard.tools.inspection.hlo import Array
from crossshard.tools.inspection.inspect import Communication, Memory, inspect
from crossshard.tools.planning import Candidate, LinkUse, MemoryUse, Plan, Topology, plan, topology
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
