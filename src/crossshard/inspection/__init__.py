"""What a compiled program sends between its devices, read from the program alone.

``crossshard.inspect`` gives a ``Communication``, whose parts have the types that stand here.
"""

from crossshard.inspection.collectives import Collective
from crossshard.inspection.hlo import Array
from crossshard.inspection.parameters import Parameters
from crossshard.inspection.program import inspect
from crossshard.inspection.report import Communication, Memory

__all__ = ["Array", "Collective", "Communication", "Memory", "Parameters", "inspect"]
