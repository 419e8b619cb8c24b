"""`crossshard plan`: what a step needs on a pod or cluster, and which mesh to choose."""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import crossshard
from crossshard.cli.commands import add_command
from crossshard.cli.exit_codes import BROKEN, FINE
from crossshard.cli.factory import call_factory
from crossshard.cli.failures import in_one_sentence
from crossshard.errors import ArgumentError
from crossshard.plans.topology import known_topologies, topology

_DESCRIPTION = """\
Compile a training step for a TPU slice, a GPU cluster or the CPU devices of this machine, with the
weights updated on every shard and in parts, over the meshes that are worth a look; say what each
needs, what it sends, how long it might take, and which to choose. No accelerator is needed, nothing
is run on one, and no parameter is allocated."""

_EPILOG = f"""\
The factory is called without arguments and returns the arguments of crossshard.plan as a dict:

    # train.py
    def make():
        return {{"loss_fn": loss_fn, "params": init_params, "batch": batch_of_devices,
                "optimizer": optax.adamw(1e-3)}}

    crossshard plan train:make --topology v5e:4x4

loss_fn is that of make_train_step; params arrays, types, or a function without arguments that makes
them, which is only traced; batch the global batch, as arrays or types, or a function of the number
of devices. Also model_specs, how parameters may lie over an axis "model", and options of
make_train_step, such as has_aux or accumulate_steps. Without a factory, in a clone of the
repository, the model of the demo is planned, and --layers, --width, --context, --batch and --split
are its options.

Topologies: {known_topologies()}.

Exit codes: 0 if one fits; 1 if none does; 2 if the request cannot be carried out, with one line on
stderr."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    what = "show what your step needs on a pod or cluster that you do not have"
    parser = add_command(commands, "plan", what, _DESCRIPTION, _EPILOG, _run)
    parser.add_argument(
        "factory",
        metavar="package.module:factory",
        nargs="?",
        help="returns loss, parameters, batch and optimizer; the demo's model if left out",
    )
    parser.add_argument("--topology", required=True, metavar="NAME", help="such as v5p:4x4x4")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw memory and time to a PNG, SVG or PDF file",
    )
    for name, what in (
        ("layers", "layers of the demo's model"),
        ("width", "its width, a multiple of 32"),
        ("context", "bytes in a row of its batch"),
        ("batch", "rows in its batch, over all shards"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    parser.add_argument(
        "--split", action="store_true", help="also meshes on which devices share the demo's model"
    )


def _run(options: argparse.Namespace) -> int:
    # Accelerators that this machine has stay free: what is compiled for is described, not used.
    jax.config.update("jax_platforms", "cpu")
    if options.picture is not None:
        _check_picture(options.picture)
    # Before the factory: JAX starts at its first array, and creates no CPU devices after that.
    topology(options.topology)
    given = _given(options)
    with in_one_sentence(f"The step of {options.factory or 'the demo'} cannot be planned"):
        plan = crossshard.plan(**given, topology=options.topology)
    print(plan.to_json(indent=2) if options.json else plan.table())
    if options.picture is not None:
        from crossshard.plans.picture import draw

        draw(plan, options.picture)
    return FINE if plan.recommended is not None else BROKEN


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``crossshard.plan`` that the user's factory returns, or the demo's."""
    of_demo = {
        name: getattr(options, name)
        for name in ("layers", "width", "context", "batch", "split")
        if getattr(options, name) is not None and getattr(options, name) is not False
    }
    if options.factory is None:
        return _of_the_demo(of_demo)
    if of_demo:
        raise ArgumentError(
            f"--{next(iter(of_demo))} is for the demo's model; leave it or the factory out."
        )
    given = call_factory(options.factory)
    needed = {"loss_fn", "params", "batch", "optimizer"}
    if not isinstance(given, Mapping) or not needed <= set(given):
        found = sorted(given) if isinstance(given, Mapping) else type(given).__name__
        raise ArgumentError(
            f"{options.factory} must return a dict with {', '.join(sorted(needed))}; got {found}."
        )
    if "topology" in given:
        raise ArgumentError(f"{options.factory} returns a topology; pass it as --topology.")
    return dict(given)


def _of_the_demo(options: dict[str, Any]) -> dict[str, Any]:
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    try:
        module: Any = importlib.import_module("examples.byte_lm.planned")
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "Name a factory as package.module:factory. Without one the demo's model is planned, in "
            f"a clone of the repository only ({error})."
        ) from error
    given: dict[str, Any] = module.planned(**options)
    return given


def _check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ArgumentError(f"--picture takes a .png, .svg or .pdf file; got {str(path)!r}.")
    if not path.parent.is_dir():
        raise ArgumentError(f"--picture: there is no folder {path.parent}.")
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ArgumentError(
            '--picture needs matplotlib: pip install "crossshard[examples]".'
        ) from error
