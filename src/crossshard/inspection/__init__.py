"""Communication analysis of compiled programs.

``crossshard.inspect`` returns a ``Communication``, whose fields have the other types here.
"""

from crossshard.inspection.collectives import Collective
from crossshard.inspection.hlo import Array
from crossshard.inspection.parameters import Parameters
from crossshard.inspection.program import inspect
from crossshard.inspection.report import Communication, Memory

__all__ = ["Array", "Collective", "Communication", "Memory", "Parameters", "inspect"]
