"""`crossshard verify`: whether a user's step on many shards is the step of one device."""

import argparse
import json
from typing import Any

import jax

import crossshard
from crossshard.errors import ArgumentError
from crossshard.tools.cli.command import BROKEN, FINE, add_command, add_devices, make_devices
from crossshard.tools.cli.factory import call_factory, in_one_sentence

_DESCRIPTION = """\
Run a training step on 1 and on N shards with plain SGD, and say what differs, and by which factor:
updates of parameters, the shards' copies, statistics, metrics, random keys, the work."""

_EPILOG = """\
The factory is called without arguments and returns what crossshard.verify takes: (make_step,
batch...), where make_step(optimizer, num_shards) returns (step, *state) and the step is called
step(*state, *batch) and returns the next state first; or (train_step, params, batch). The current
directory is on the path, as with python -m. The factory's own output goes to stderr.

    # train.py
    def make_step(optimizer, num_shards):
        ...
        return step, params, optimizer.init(params)

    def check():
        return make_step, x, y

    crossshard verify train:check --devices 8

Exit codes: 0 the step is right; 1 it is not; 2 the request cannot be carried out, with one line on
stderr."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    what = "check that your step on many shards is the step of one device"
    parser = add_command(commands, "verify", what, _DESCRIPTION, _EPILOG, _run)
    parser.add_argument(
        "factory", metavar="package.module:factory", help="returns make_step and the batch"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of words")
    add_devices(parser)
    parser.add_argument(
        "--shards", type=int, metavar="N", help="the number of shards; all devices by default"
    )
    parser.add_argument(
        "--key", type=int, metavar="SEED", help="pass a random key to the step, the last argument"
    )
    parser.add_argument(
        "--batch-axis",
        type=int,
        default=0,
        metavar="AXIS",
        help="the axis of the rows in all arrays of the batch; 0 by default",
    )
    parser.add_argument(
        "--groups", metavar="LISTS", help="the shards that reduce together, as [[0, 1], [2, 3]]"
    )


def _run(options: argparse.Namespace) -> int:
    groups = None if options.groups is None else _parsed(options.groups)
    make_devices(options.devices)
    returned = call_factory(options.factory)
    if not isinstance(returned, tuple) or len(returned) < 2:
        raise ArgumentError(
            f"{options.factory} must return (make_step, batch…) or (train_step, params, batch); "
            f"it returned {type(returned).__name__}."
        )
    step, *batch = returned
    key = None if options.key is None else jax.random.key(options.key)
    with in_one_sentence(f"The step of {options.factory} cannot be verified"):
        found = crossshard.verify(
            step,
            *batch,
            num_shards=options.shards,
            key=key,
            groups=groups,
            batch_axis=options.batch_axis,
        )
    print(found.to_json(indent=2) if options.json else found.describe())
    return FINE if found.ok else BROKEN


def _parsed(groups: str) -> Any:
    try:
        return json.loads(groups)
    except json.JSONDecodeError:
        raise ArgumentError(
            f"--groups takes lists of shards, such as [[0, 1], [2, 3]]; got {groups!r}."
        ) from None
