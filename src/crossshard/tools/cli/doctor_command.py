"""`crossshard doctor`: what looks wrong with this machine and JAX, before a run."""

import argparse
import os
import sys
import time
from typing import Any

from crossshard.tools.cli.command import BROKEN, FINE, add_command, add_devices, make_devices
from crossshard.tools.diagnosis.doctor import SECONDS, SIZES, diagnose
from crossshard.tools.diagnosis.report import Diagnosis

_DESCRIPTION = """\
Look at this machine, JAX and the job before a run: versions, devices, the mesh, settings, and what
describes the processes. Sum arrays over all devices, and compare the values with numpy's. Say what
looks wrong, and what to write instead."""

_EPILOG = """\
Of a job it is run in every process, as training would be; the first one prints the report, and each
other one what is wrong only there:

    crossshard launch -n 2 --cpu-devices 2 -- crossshard doctor

Speeds are bytes that a device sends in a second.

Exit codes: 0 nothing looks wrong; 1 something does; 2 the request cannot be carried out, with one
line on stderr."""

# A launcher ends all processes when one has ended, and the coordinator goes with process 0.
_FIRST_SECONDS, _OTHERS_SECONDS = 2.0, 1.0


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    what = "say what looks wrong with this machine, before you train on it"
    parser = add_command(commands, "doctor", what, _DESCRIPTION, _EPILOG, _run)
    parser.add_argument("--json", action="store_true", help="JSON instead of words")
    add_devices(parser)
    parser.add_argument(
        "--no-self-test",
        dest="self_test",
        action="store_false",
        help="run no collective",
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=SIZES,
        metavar="BYTES",
        help=f"on each device; {' '.join(map(str, SIZES))}",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=SECONDS,
        metavar="S",
        help="seconds that JAX may take to start, and each sum; %(default)g",
    )


def _run(options: argparse.Namespace) -> int:
    make_devices(options.devices)
    found = diagnose(options.self_test, options.sizes, options.timeout, as_command=True)
    is_first = found.job["process_id"] == 0 or not found.job["connected"]
    _print(found, options.json, is_first)
    code = FINE if found.ok else BROKEN
    if found.stuck:
        sys.stdout.flush()
        if found.job["connected"]:
            time.sleep(_FIRST_SECONDS if is_first else _OTHERS_SECONDS)
        # The runtime would wait for what does not end.
        os._exit(code)
    return code


def _print(found: Diagnosis, as_json: bool, is_first: bool) -> None:
    if is_first:
        print(found.to_json(indent=2) if as_json else found.describe())
        return
    for each in found.findings:
        print(each.sentence, file=sys.stderr if as_json else sys.stdout)
