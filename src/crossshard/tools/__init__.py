"""Tools: inspect, plan, verify, doctor, meter, the command; ``crossshard`` loads them if asked."""

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
from crossshard.tools.meter import Flops, Meter, count_flops, peak_flops
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
    "Flops",
    "LeafReport",
    "LinkUse",
    "Memory",
    "MemoryUse",
    "Meter",
    "Plan",
    "Topology",
    "Verification",
    "count_flops",
    "doctor",
    "inspect",
    "peak_flops",
    "plan",
    "topology",
    "verify",
]
