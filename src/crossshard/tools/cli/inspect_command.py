"""`crossshard inspect`: the communication of a user's step, as a table or as JSON."""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import crossshard
from crossshard.errors import ArgumentError
from crossshard.tools.cli.command import BROKEN, FINE, add_command, add_devices, make_devices
from crossshard.tools.cli.factory import in_one_sentence, make_program
from crossshard.tools.inspection.collectives import KINDS
from crossshard.tools.inspection.contract import Contract
from crossshard.tools.inspection.inspect import named_bytes

_DESCRIPTION = """\
List every collective of a step with its bytes per shard, groups and source line; the total bytes
next to the lower bound for N shards that average P bytes of parameters, 2(N-1)/N * P; and memory.
The step is compiled but not run, so it may be for devices that you do not have."""

_EPILOG = f"""\
The factory is called without arguments and returns (step, args...): a function, with jax.jit or
without, a TrainStep, or anything else with a method lower, and the arguments to lower it with, as
arrays or jax.ShapeDtypeStruct. Or it returns a lowered or compiled program. The current directory
is on the path, as with python -m. The factory's own output goes to stderr.

    # train.py
    def make():
        step = crossshard.make_train_step(loss_fn, optax.adamw(1e-3), num_shards=8)
        return step, step.abstract_init(params), batch

    crossshard inspect train:make --devices 8

Kinds of collectives: {", ".join(KINDS)}.

Exit codes: 0 success; 1 the step breaks --max-bytes-ratio, --forbid or --min-hidden, with the
reason on stderr; 2 the request cannot be carried out, with one line on stderr."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    what = "show what your step sends between its devices"
    parser = add_command(commands, "inspect", what, _DESCRIPTION, _EPILOG, _run)
    parser.add_argument("factory", metavar="package.module:factory", help="returns the step")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    add_devices(parser)
    parser.add_argument(
        "--parameters",
        type=int,
        metavar="BYTES",
        help="the bytes of the parameters of one shard, P, unless the step is a TrainStep",
    )
    parser.add_argument(
        "--axis-name",
        action="append",
        metavar="AXIS",
        help="a mesh axis that splits the batch, where others split layers; may be repeated",
    )
    parser.add_argument(
        "--max-bytes-ratio",
        type=float,
        metavar="R",
        help="fail if a shard sends more than R times the lower bound",
    )
    parser.add_argument(
        "--forbid",
        action="append",
        default=[],
        metavar="KIND",
        help="fail if the step has this kind of collective; may be repeated",
    )
    parser.add_argument(
        "--min-hidden",
        action="append",
        default=[],
        metavar="[KIND=]SHARE",
        help="fail if a smaller share of the bytes sent, or of this kind, is behind matrix "
        "products; may be repeated",
    )


def _run(options: argparse.Namespace) -> int:
    # Check only what the options forbid: a collective in a loop is not a breach here.
    ratio = math.inf if options.max_bytes_ratio is None else options.max_bytes_ratio
    contract = Contract(ratio, options.forbid, True, _shares(options.min_hidden))
    if options.parameters is not None:
        named_bytes(options.parameters)
    make_devices(options.devices)
    program = make_program(options.factory)
    with in_one_sentence(f"The step of {options.factory} cannot be inspected"):
        report = crossshard.inspect(program, options.parameters, axis_name=options.axis_name)
    print(report.to_json(indent=2) if options.json else report.table())
    breaches = contract.breaches(report)
    for breach in breaches:
        print(f"crossshard: {breach.sentence}.", file=sys.stderr)
    return BROKEN if breaches else FINE


def _shares(given: Sequence[str]) -> Any:
    """``["0.5"]`` as 0.5, and ``["all-reduce=0.5", …]`` by kind."""
    pairs = [each.rpartition("=")[::2] for each in given]
    try:
        shares = {kind: float(share) for kind, share in pairs}
    except ValueError:
        raise ArgumentError(
            f"--min-hidden takes a share from 0 to 1, or KIND=SHARE; got {' '.join(given)!r}."
        ) from None
    if "" in shares and len(pairs) > 1:
        raise ArgumentError(
            f"--min-hidden takes one share of all bytes, or one for each kind; got "
            f"{' '.join(given)!r}."
        )
    return shares.get("", shares) if shares else None
