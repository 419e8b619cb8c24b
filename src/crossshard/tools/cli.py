"""The `crossshard` command: its five commands, each with its arguments, and their exit codes."""

import argparse
import contextlib
import io
import os
import pkgutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

import crossshard
from crossshard import _check
from crossshard.distributed.launcher import GRACE_SECONDS, launch
from crossshard.errors import ArgumentError, CrossshardError
from crossshard.shards.devices import cpu_devices
from crossshard.tools.diagnosis import SECONDS, SIZES, diagnose
from crossshard.tools.inspection.hlo import users_line
from crossshard.tools.inspection.inspect import bytes_of
from crossshard.tools.planning import KNOWN, topology

_REFUSED = 2
# 128 plus the number of the signal, as in shells.
_INTERRUPTED, _NOT_READ = 130, 141
# The longest message of user code that is shown, since those of JAX may fill pages.
_LONGEST = 600
# How long processes wait before they exit: a launcher ends all processes when one has ended, and
# the coordinator ends with process 0.
_FIRST_SECONDS, _OTHERS_SECONDS = 2.0, 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
      arguments: the arguments after ``crossshard``; those of this process if ``None``.
    """
    for stream in (sys.stdout, sys.stderr):
        # Replace characters that the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except CrossshardError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        # Otherwise Python flushes the rest at exit, and reports the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return _NOT_READ
        return _refuse(f"The report cannot be written: {error.strerror or error}.")
    return code


def _refuse(why: str) -> int:
    print("crossshard: " + " ".join(why.split()), file=sys.stderr)
    return _REFUSED


# The arguments of all commands.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}. See {self.prog} --help.")


def _parser() -> argparse.ArgumentParser:
    what = "Wrap any Optax optimizer, and every shard steps correctly."
    parser = _Parser(prog="crossshard", description=what, allow_abbrev=False)
    version = f"crossshard {crossshard.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: Callable[[Any], int], what: str, after: str, factory: str = "") -> Any:
        added = commands.add_parser(
            run.__name__.strip("_"),
            help=what,
            description=what,
            epilog=after,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.set_defaults(run=run)
        option = lambda name, help, **how: added.add_argument(name, help=help, **how)
        if factory:
            option("factory", f"returns {factory}", metavar="package.module:factory")
        if run is not _launch:
            option("--json", "JSON instead of words and tables", action="store_true")
        if run not in (_launch, _plan):
            what = "create N virtual CPU devices before JAX starts, as crossshard.cpu_devices does"
            option("--devices", what, type=int, metavar="N")
        return option

    what = "say what looks wrong with this machine, before you train on it"
    option = command(_doctor, what, _AFTER_DOCTOR)
    option("--no-self-test", "run no collective", dest="self_test", action="store_false")
    what = f"on each device; {' '.join(map(str, SIZES))}"
    option("--sizes", what, type=int, nargs="+", default=SIZES, metavar="BYTES")
    what = "seconds that JAX may take to start, and each sum; %(default)g"
    option("--timeout", what, type=float, default=SECONDS, metavar="S")

    what = "show what your step sends between its devices"
    option = command(_inspect, what, _AFTER_INSPECT, "the program")
    what = "the bytes of the parameters of one shard, P, unless they are of a TrainStep"
    option("--parameters", what, type=int, metavar="BYTES")
    what = "a mesh axis that splits the batch, where others split layers; may be repeated"
    option("--axis-name", what, action="append", metavar="AXIS")

    what = "run a script in several processes of this machine"
    option = command(_launch, what, _AFTER_LAUNCH)
    option("-n", "how many", dest="processes", type=int, required=True, metavar="N")
    what = "give each process M virtual CPU devices and no accelerator"
    option("--cpu-devices", what, type=int, metavar="M")
    option("--port", "where they meet; any free port", type=int, metavar="P")
    what = "seconds to end after a signal or a failure, before they are killed; %(default)g"
    option("--grace", what, type=float, default=GRACE_SECONDS, metavar="S")
    what = "start all of them again after a failure, R times at most"
    option("--restarts", what, type=int, default=0, metavar="R")
    what = "leave out the one that failed, and its GPU, while K are left"
    option("--min-processes", what, type=int, metavar="K")
    what = "keep S processes that have imported everything, and wait in initialize for a restart"
    option("--spares", what, type=int, default=0, metavar="S")
    option("command", "what each of them runs", nargs="+", metavar="-- COMMAND")

    what = "show what your step needs on a pod or cluster that you do not have"
    option = command(_plan, what, _AFTER_PLAN, "loss, parameters, batch and optimizer")
    option("--topology", "such as v5p:4x4x4", required=True, metavar="NAME")

    what = "check that your step on many shards is the step of one device"
    option = command(_verify, what, _AFTER_VERIFY, "make_step and the batch")
    option("--shards", "the number of shards; all devices by default", type=int, metavar="N")
    option("--key", "pass a random key to the step, the last argument", type=int, metavar="SEED")
    return parser


def _make_devices(number: int | None) -> None:
    """Create virtual CPU devices, if any were asked for, and make JAX use them."""
    if number is None:
        return
    cpu_devices(number)
    if not os.environ.get("JAX_PLATFORMS"):
        # Otherwise JAX prefers the machine's accelerators.
        jax.config.update("jax_platforms", "cpu")


# The end of each command's `--help`, after its arguments.

_FACTORY = """\
The factory is called without arguments; its own output goes to stderr. The current directory is on
the path, as with python -m. It returns"""
_REFUSES = "2 if the request cannot be\ncarried out, with one line on stderr."

_AFTER_DOCTOR = f"""\
It looks at versions, devices, settings and the job, sums arrays over all devices, and compares the
values with numpy's. Of a job it is run in every process, as training would be:

    crossshard launch -n 2 --cpu-devices 2 -- crossshard doctor

Exit codes: 0 if nothing looks wrong; 1 if something does; {_REFUSES}"""

_AFTER_INSPECT = f"""\
{_FACTORY} a lowered or compiled step, such as
step.lower(state, batch), of arrays or jax.ShapeDtypeStruct. It is compiled and not run.

    crossshard inspect train:make --devices 8

Exit codes: 0 success; {_REFUSES}"""

_AFTER_LAUNCH = """\
The script calls crossshard.distributed.initialize() before the first JAX operation:

    crossshard launch -n 4 -- python train.py

Each line of output starts with the number of its process. When one fails, the others are ended, and
started again with --restarts.

The exit code is that of the first process that failed, 128 plus the number of a signal as in
shells, and 0 if none did; 2 if the command cannot be started. With --restarts, it is that of the
last run."""

_AFTER_PLAN = f"""\
The step is compiled for the devices of a topology; nothing is run, and nothing allocated.
{_FACTORY} the arguments of crossshard.plan as a dict:
"loss_fn", "params", "batch" and "optimizer".

    crossshard plan train:make --topology v5e:4x4

Topologies: {KNOWN}.

Exit codes: 0 if one way fits; 1 if none does; {_REFUSES}"""

_AFTER_VERIFY = f"""\
{_FACTORY} what crossshard.verify takes: (make_step,
batch...), where make_step(optimizer, num_shards) returns (step, *state) and the step is called
step(*state, *batch) and returns the next state first; or (train_step, params, batch).

    crossshard verify train:check --devices 8

Exit codes: 0 if the step is right; 1 if it is not; {_REFUSES}"""


# The commands, each from its arguments to its exit code.


def _shown(report: Any, options: argparse.Namespace, ok: bool) -> int:
    print(report.to_json(indent=2) if options.json else report)
    return int(not ok)


def _doctor(options: argparse.Namespace) -> int:
    _make_devices(options.devices)
    found = diagnose(options.self_test, options.sizes, options.timeout, as_command=True)
    is_first = found.job["process_id"] == 0 or not found.job["connected"]
    for each in () if is_first else found.findings:
        print(each.sentence, file=sys.stderr if options.json else sys.stdout)
    code = _shown(found, options, found.ok) if is_first else int(not found.ok)
    if found.stuck:
        sys.stdout.flush()
        if found.job["connected"]:
            time.sleep(_FIRST_SECONDS if is_first else _OTHERS_SECONDS)
        # A normal exit would wait for the collective that does not end.
        os._exit(code)
    return code


def _inspect(options: argparse.Namespace) -> int:
    if options.parameters is not None:
        bytes_of(options.parameters)
    _make_devices(options.devices)
    program = _call_factory(options.factory)
    with _in_one_sentence(f"What {options.factory} returned cannot be inspected"):
        report = crossshard.inspect(program, options.parameters, axis_name=options.axis_name)
    return _shown(report, options, ok=True)


def _launch(options: argparse.Namespace) -> int:
    _check.whole_number("-n", options.processes, most=10_000)
    if options.cpu_devices is not None:
        _check.whole_number("--cpu-devices", options.cpu_devices)
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
    _check.whole_number("--spares", options.spares, least=0, most=10_000)
    if options.spares and not options.restarts:
        raise ArgumentError(
            f"--spares needs --restarts; got {options.spares} spares for no restart."
        )
    return launch(
        options.command,
        options.processes,
        options.restarts,
        fewest,
        spares=options.spares,
        stdout=sys.stdout.buffer,
        stderr=sys.stderr.buffer,
        cpu_devices=options.cpu_devices,
        port=options.port,
        grace=options.grace,
    )


def _plan(options: argparse.Namespace) -> int:
    # Leaves this machine's accelerators free: the compiler only needs a description of the target.
    jax.config.update("jax_platforms", "cpu")
    # Before the factory: JAX starts at its first array, and creates no CPU devices after that.
    topology(options.topology)
    given, name = _call_factory(options.factory), options.factory
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"{name} must return a dict with loss_fn, params, batch and optimizer; got "
            f"{type(given).__name__}."
        )
    with _in_one_sentence(f"The step of {name} cannot be planned"):
        plan = crossshard.plan(**given, topology=options.topology)
    return _shown(plan, options, any(each.fits for each in plan.candidates))


def _verify(options: argparse.Namespace) -> int:
    _make_devices(options.devices)
    returned = _call_factory(options.factory)
    if not isinstance(returned, tuple) or len(returned) < 2:
        raise ArgumentError(
            f"{options.factory} must return (make_step, batch…) or (train_step, params, batch); "
            f"it returned {type(returned).__name__}."
        )
    key = None if options.key is None else jax.random.key(options.key)
    with _in_one_sentence(f"The step of {options.factory} cannot be verified"):
        found = crossshard.verify(*returned, key=key, num_shards=options.shards)
    return _shown(found, options, found.ok)


# The user's factory.


def _call_factory(name: str) -> Any:
    """Call ``package.module:factory``, with the current directory on the path.

    Raises:
      ArgumentError: the factory does not exist, or fails.
    """
    module, _, attribute = name.partition(":")
    if not attribute or module.endswith(".py"):
        raise ArgumentError(
            f"Name the factory as package.module:factory, for example train:make for make in "
            f"train.py; got {name!r}."
        )
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _in_one_sentence(f"{name} cannot be imported in {os.getcwd()}"):
        factory = pkgutil.resolve_name(name)
    if not callable(factory):
        what = type(factory).__name__
        raise ArgumentError(f"{name} must be a function without arguments; got {what}.")
    with _in_one_sentence(f"{name} raised"):
        return factory()


@contextlib.contextmanager
def _in_one_sentence(what: str) -> Iterator[None]:
    """Run user code: any exception becomes an ``ArgumentError``, and its output goes to stderr.

    Args:
      what: the start of the sentence, which names what failed.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line = users_line(f"{frame.filename}:{frame.lineno}" for frame in frames)
        message = textwrap.shorten(str(error), _LONGEST, placeholder=" …")
        if line or not isinstance(error, CrossshardError):
            message = f"{type(error).__name__}: {message}" if message else type(error).__name__
        raise ArgumentError(f"{what}: {message}{f' ({line})' if line else ''}") from error


if __name__ == "__main__":
    sys.exit(main())
