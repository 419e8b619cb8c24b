"""Guard: a program that ends the processes of a launcher which was killed. It imports no package.

The launcher writes the id of each process group that it starts. It ends this program when all of
them have ended; if its end of the pipe closes before, nobody else would end them. Then the guard
removes the launcher's file, too.
"""

import contextlib
import os
import signal
import sys
import time


def main(grace: float, file: str) -> None:
    """End all groups when standard input closes, and kill them ``grace`` later."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = list(map(int, sys.stdin))
    _send(groups, signal.SIGTERM)
    until = time.monotonic() + grace
    while _send(groups, 0) and time.monotonic() < until:
        time.sleep(0.1)
    _send(groups, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)


def _send(groups: list[int], number: int) -> bool:
    """Send a signal to all groups; whether one of them is still there."""
    there = False
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            there = True
    return there


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
