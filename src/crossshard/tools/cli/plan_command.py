"""`crossshard plan`: what a step needs on a pod or cluster, in each way to run it."""

import argparse
from collections.abc import Mapping
from typing import Any

import jax

import crossshard
from crossshard.errors import ArgumentError
from crossshard.tools.cli.command import BROKEN, FINE, add_command
from crossshard.tools.cli.factory import call_factory, in_one_sentence
from crossshard.tools.planning.topology import KNOWN, topology

_DESCRIPTION = """\
Compile a training step for a TPU slice, a GPU cluster or the CPU devices of this machine, with the
weights updated on every shard, updated in parts, and resting in parts, over the meshes that are
worth a look; say what each needs, whether that fits, and what it sends over which links. No
accelerator is needed, nothing is run on one, and no parameter is allocated."""

_EPILOG = f"""\
The factory is called without arguments and returns those of crossshard.plan as a dict:

    # train.py
    def make():
        return {{"loss_fn": loss_fn, "params": init_params, "batch": batch_of_devices,
                "optimizer": optax.adamw(1e-3)}}

    crossshard plan train:make --topology v5e:4x4

loss_fn is that of make_train_step; params arrays, types, or a function without arguments that makes
them, which is only traced; batch the global batch, as arrays or types, or a function of the number
of devices. Also model_specs, how parameters may be split over an axis "model", and options of
make_train_step, such as has_aux or accumulate_steps; gather_dtype is for parameters in parts.

Topologies: {KNOWN}.

Exit codes: 0 if one fits; 1 if none does; 2 if the request cannot be carried out, with one line on
stderr."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    what = "show what your step needs on a pod or cluster that you do not have"
    parser = add_command(commands, "plan", what, _DESCRIPTION, _EPILOG, _run)
    parser.add_argument(
        "factory",
        metavar="package.module:factory",
        help="returns loss, parameters, batch and optimizer",
    )
    parser.add_argument("--topology", required=True, metavar="NAME", help="such as v5p:4x4x4")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")


def _run(options: argparse.Namespace) -> int:
    # Accelerators that this machine has stay free: what is compiled for is described, not used.
    jax.config.update("jax_platforms", "cpu")
    # Before the factory: JAX starts at its first array, and creates no CPU devices after that.
    topology(options.topology)
    given = _given(options.factory)
    with in_one_sentence(f"The step of {options.factory} cannot be planned"):
        plan = crossshard.plan(**given, topology=options.topology)
    print(plan.to_json(indent=2) if options.json else plan.table())
    return FINE if any(each.fits for each in plan.candidates) else BROKEN


def _given(factory: str) -> dict[str, Any]:
    """The arguments of ``crossshard.plan`` that the user's factory returns."""
    given = call_factory(factory)
    needed = {"loss_fn", "params", "batch", "optimizer"}
    if not isinstance(given, Mapping) or not needed <= set(given):
        found = sorted(given) if isinstance(given, Mapping) else type(given).__name__
        raise ArgumentError(
            f"{factory} must return a dict with {', '.join(sorted(needed))}; got {found}."
        )
    if "topology" in given:
        raise ArgumentError(f"{factory} returns a topology; pass it as --topology.")
    return dict(given)
