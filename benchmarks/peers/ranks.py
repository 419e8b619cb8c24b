"""Ranks: the processes of a peer, each of which answers every question; imports no framework."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

# What `crossshard launch --cpu-devices` sets, here for every framework.
TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:"
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
)

RunRank = Callable[[int, dict, str, Connection], None]


def serve(run_rank: RunRank, number: int, problem: dict, versions: dict[str, str]) -> None:
    """Start the ranks, pass every question on to all of them, and answer for the last one.

    Args:
      run_rank: called in each rank with its number, the problem, a folder that all share, and the
        pipe to the questions. It answers each of them, and leaves at ``None``.
      number: how many ranks there are.
      problem: what they solve.
      versions: what to answer to the first question.
    """
    os.environ.setdefault("GLIBCTUNABLES", TUNABLES)
    # Answers go where stdout went; whatever else is printed must not stand between them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        context = get_context("spawn")
        ranks, ends = [], []
        for rank in range(number):
            ours, theirs = context.Pipe()
            arguments = (rank, problem, folder, theirs)
            ranks.append(context.Process(target=run_rank, args=arguments, daemon=True))
            ranks[-1].start()
            # Or a rank that dies would leave us waiting for its answer.
            theirs.close()
            ends.append(ours)
        for line in sys.stdin:
            question = json.loads(line)
            if question["variant"] == "versions":
                answer = {"versions": versions}
            else:
                for end in ends:
                    end.send(question)
                answer = [end.recv() for end in ends][-1]
            print(json.dumps(answer), file=answers, flush=True)
        for end in ends:
            end.send(None)
        for rank_process in ranks:
            rank_process.join()
