"""Processes: one job on several hosts, or on one, that trains together."""

from crossshard.distributed.initialize import initialize
from crossshard.distributed.job import Job
from crossshard.distributed.programs import check_same_program

__all__ = ["Job", "check_same_program", "initialize"]
