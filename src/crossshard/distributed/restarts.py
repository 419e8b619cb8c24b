"""Restarts: starts a job again after a failure, with fewer processes if told so."""

from collections.abc import Sequence
from typing import IO, Any

from crossshard.distributed.launcher import launch


def launch_again(
    command: Sequence[str],
    number: int,
    restarts: int,
    min_processes: int | None,
    *,
    stderr: IO[bytes],
    **options: Any,
) -> int:
    """Run a command as ``launch`` does, again after each failure; the exit code of the last run.

    A run that a signal to the launcher has ended is not started again.

    Args:
      command: the program and its arguments.
      number: how many processes.
      restarts: how often to start it again, at most.
      min_processes: leave out the process that has failed, and its GPU, while so many are left;
        ``None`` to start as many again.
      stderr: where a line goes for each start.
      options: those of ``launch``.

    Raises:
      ArgumentError: the command cannot be started.
    """
    slots = list(range(number))
    for left in range(restarts, -1, -1):
        ending = launch(command, slots, stderr=stderr, **options)
        if ending.code == 0 or ending.interrupted or left == 0:
            break
        may_drop = min_processes is not None and len(slots) > min_processes
        if may_drop and ending.failed is not None:
            del slots[ending.failed]
        many = f"{len(slots)} process{'es' * (len(slots) > 1)}"
        times = f"{left - 1} more restart{'s' * (left != 2)}"
        stderr.write(f"crossshard: started again with {many}; {times} left.\n".encode())
        stderr.flush()
    return ending.code
