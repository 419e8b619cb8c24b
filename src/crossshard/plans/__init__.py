"""Plans: which mesh and weight update fit a machine that is not there, and how long a step takes.

``crossshard.plan`` returns a ``Plan``, whose fields have the other types here.
"""

from crossshard.plans.planning import plan
from crossshard.plans.report import Candidate, LinkUse, MemoryUse, Plan, Seconds

__all__ = ["Candidate", "LinkUse", "MemoryUse", "Plan", "Seconds", "plan"]
