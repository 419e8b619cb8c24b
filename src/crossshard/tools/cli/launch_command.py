"""`crossshard launch`: runs a script in several processes of this machine."""

import argparse
import sys
from typing import Any

from crossshard import _check
from crossshard.distributed.supervisor.launcher import GRACE_SECONDS, launch_again, most_processes
from crossshard.errors import ArgumentError
from crossshard.tools.cli.command import add_command

_DESCRIPTION = """\
Run a command in several processes of this machine that train together. The script connects them:

    crossshard.distributed.initialize()   # before the first JAX operation

    crossshard launch -n 4 -- python train.py
    crossshard launch -n 2 --cpu-devices 4 -- python train.py

Each line of output starts with the number of its process. Ctrl-C and other signals go to all of
them. When one fails, the others are ended, and started again with --restarts. They meet on the
loopback interface only."""

_EPILOG = """\
The exit code is that of the first process that failed, 128 plus the number of a signal as in
shells, and 0 if none did; 2 if the command cannot be started. With --restarts, it is that of the
last run."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    what = "run a script in several processes of this machine"
    parser = add_command(commands, "launch", what, _DESCRIPTION, _EPILOG, _run)
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--cpu-devices",
        type=int,
        metavar="M",
        help="give each process M virtual CPU devices and no accelerator",
    )
    parser.add_argument("--port", type=int, metavar="P", help="where they meet; any free port")
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="S",
        help="seconds to end after a signal or a failure, before they are killed; %(default)g",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="start all of them again after a failure, R times at most",
    )
    parser.add_argument(
        "--min-processes",
        type=int,
        metavar="K",
        help="leave out the one that failed, and its GPU, while K are left",
    )
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="what each of them runs")


def _run(options: argparse.Namespace) -> int:
    for flag, value in (("-n", options.processes), ("--cpu-devices", options.cpu_devices)):
        if value is not None:
            _check.whole_number(flag, value)
    most, why = most_processes()
    if options.processes > most:
        raise ArgumentError(
            f"-n must be at most {most} on this machine, where {why}; got {options.processes}."
        )
    if options.port is not None and not 0 < options.port < 65536:
        raise ArgumentError(f"--port must be from 1 to 65535; got {options.port}.")
    if not options.grace >= 0:
        raise ArgumentError(f"--grace must be a number of seconds; got {options.grace}.")
    _check.whole_number("--restarts", options.restarts, least=0)
    fewest = options.min_processes
    if fewest is not None and not (0 < fewest <= options.processes and options.restarts):
        raise ArgumentError(
            f"--min-processes must be from 1 to {options.processes}, which -n is, and needs "
            f"--restarts; got {fewest}."
        )
    return launch_again(
        options.command,
        options.processes,
        options.restarts,
        fewest,
        stdout=sys.stdout.buffer,
        stderr=sys.stderr.buffer,
        cpu_devices=options.cpu_devices,
        port=options.port,
        grace=options.grace,
    )
