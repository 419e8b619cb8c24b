"""`crossshard launch`: runs a script in several processes of this machine."""

import argparse
import sys
from typing import Any

from crossshard.distributed.launcher import GRACE_SECONDS, launch
from crossshard.errors import ArgumentError

_DESCRIPTION = """\
Run a command in several processes of this machine that train together. The script connects them:

    crossshard.distributed.initialize()   # before the first JAX operation

    crossshard launch -n 4 -- python train.py
    crossshard launch -n 2 --cpu-devices 4 -- python train.py

Each line of output starts with the number of its process. Ctrl-C and other signals go to all of
them. When one fails, the others are ended. They meet on the loopback interface only."""

_EPILOG = """\
The exit code is that of the first process that failed, 128 plus the number of a signal as in
shells, and 0 if none did; 2 if the command cannot be started."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "launch",
        help="run a script in several processes of this machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
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
        help="seconds that the others have to end, before they are killed; %(default)g",
    )
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="what each of them runs")


def _run(options: argparse.Namespace) -> int:
    for flag, value in (("-n", options.processes), ("--cpu-devices", options.cpu_devices)):
        if value is not None and value < 1:
            raise ArgumentError(f"{flag} must be at least 1; got {value}.")
    if options.port is not None and not 0 < options.port < 65536:
        raise ArgumentError(f"--port must be from 1 to 65535; got {options.port}.")
    if not options.grace >= 0:
        raise ArgumentError(f"--grace must be a number of seconds; got {options.grace}.")
    return launch(
        options.command,
        options.processes,
        stdout=sys.stdout.buffer,
        stderr=sys.stderr.buffer,
        cpu_devices=options.cpu_devices,
        port=options.port,
        grace=options.grace,
    )
