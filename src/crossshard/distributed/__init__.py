"""Processes: one job on several hosts, or on one, that trains together."""

from crossshard.distributed.agreement import check_same_program
from crossshard.distributed.job import Job, initialize
from crossshard.distributed.judge import PROCESS_LOST, PROCESS_STALLED
from crossshard.distributed.programs import keep_programs
from crossshard.distributed.watch import entering

__all__ = [
    "PROCESS_LOST",
    "PROCESS_STALLED",
    "Job",
    "check_same_program",
    "entering",
    "initialize",
    "keep_programs",
]
