"""Processes: one job on several hosts, or on one, that trains together."""

from crossshard.distributed.initialize import initialize
from crossshard.distributed.job import Job

__all__ = ["Job", "initialize"]
