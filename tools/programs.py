"""Proof of value: writes the compiled programs of many training steps, and compares two such sets.

A change that should be neutral leaves every program as it was. Write them before and after it::

    PYTHONPATH=BEFORE/src python tools/programs.py write before
    PYTHONPATH=AFTER/src python tools/programs.py write after
    python tools/programs.py compare before after

With `--for v5e:2x4` or `--for h100:1x8` the steps of make_train_step are compiled for such devices,
of which none need be here, and not run.

The steps are those of program_cases.py, and what counts is what XLA compiles while one is called:
the setup before it is not looked at. A package without crossshard.tools.inspection, which reads the
programs, is written by its own tools/programs.py.
"""

import argparse
import difflib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DEVICES = 8
# How much of each difference `compare` prints.
_LINES, _WIDTH = 16, 200
# How each program in a file starts.
_START = "HloModule "


# Writing.


def _set_up_devices() -> None:
    """Eight virtual CPU devices, and compilers that depend on this machine as little as can be."""
    # In-process collectives deadlock unless the backend finds enough processors, and how a loop is
    # split over threads is in the program.
    os.environ["NPROC"] = "32"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
    )
    # A cached program may differ from the one that would be compiled.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)


def _compiled_by(call: Callable[[], Any]) -> list[str]:
    """The HLO text of everything that is compiled while `call` runs."""
    from jax.extend.backend import get_backend

    client = get_backend()
    before = client.live_executables()
    call()
    # `before` is held, so no executable of it can have made room for a new one.
    new = [executable for executable in client.live_executables() if executable not in before]
    return [_text(module) for executable in new for module in executable.hlo_modules()]


def _compiled_for(name: str) -> list[str]:
    """The names of the cases that can be compiled for devices that are not here; from now on."""
    import program_cases

    from crossshard.tools.planning import topology

    program_cases.NOT_HERE += topology(name).devices
    made = {name: getattr(case, "func", None) for name, case in program_cases.CASES.items()}
    # Arrays that are placed need devices.
    is_placed = lambda name: "model-axis" in name
    return [
        name for name, make in made.items() if make is program_cases.whole and not is_placed(name)
    ]


def _text(module: Any) -> str:
    # The default leaves out the elements of constants, which may be all that differs. There is no
    # public name for these options.
    options = sys.modules[type(module).__module__].HloPrintOptions()
    options.print_large_constants = True
    options.print_metadata = False
    return module.to_string(options)


# program_text imports crossshard, and with it JAX, which reads what _set_up_devices sets.


def _of_the_step(texts: Iterable[str]) -> list[str]:
    """The programs that do the step's work, in an order of their own.

    The others make or move single arrays: they send nothing and are short beside it.
    """
    from program_text import normalised, sends

    programs = sorted(map(normalised, texts))
    longest = max((text.count("\n") for text in programs), default=0)
    return [text for text in programs if 2 * text.count("\n") >= longest or sends(text)]


def write(folder: Path, pattern: str, devices: str | None) -> int:
    """Writes one file for each case whose name the pattern is found in; 1 if one failed."""
    _set_up_devices()
    import program_cases

    folder.mkdir(parents=True, exist_ok=True)
    known = program_cases.CASES if devices is None else _compiled_for(devices)
    chosen = {name: program_cases.CASES[name] for name in known if re.search(pattern, name)}
    if not chosen:
        near = difflib.get_close_matches(pattern, program_cases.CASES, 8, 0.3)
        print(f"No case has {pattern!r} in its name; near it are {', '.join(near or known)}.")
        return 1
    # Files of an earlier run would be compared as if they were of this one.
    for file in folder.glob("*.hlo"):
        if file.stem in chosen or file.stem not in program_cases.CASES:
            file.unlink()
    if others := len(list(folder.glob("*.hlo"))):
        print(f"{others} steps of an earlier run stay in {folder}, and will be compared as well.")
    failed, number, began = [], 0, time.monotonic()
    for place, (name, make) in enumerate(chosen.items(), 1):
        started = time.monotonic()
        try:
            call = make()
            if devices is None:
                # Twice, to show a step that recompiles for its own output.
                found = _of_the_step([*_compiled_by(call), *_compiled_by(call)])
            else:
                found = _of_the_step([call().as_text()])
            if not found:
                raise RuntimeError("Nothing was compiled while the step was called.")
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        (folder / f"{name}.hlo").write_text("\n".join(found), encoding="utf-8")
        number += len(found)
        seconds = time.monotonic() - started
        print(f"{place:4} of {len(chosen)}  {seconds:5.1f} s  {name}: {len(found)}", flush=True)
    took = time.monotonic() - began
    print(f"{number} programs of {len(chosen) - len(failed)} steps in {folder}, {took:.0f} s")
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}")
    return 1 if failed else 0


# Comparing.


def _difference(name: str, before: str, after: str, context: int) -> list[str]:
    lines = before.splitlines(), after.splitlines()
    return list(
        difflib.unified_diff(*lines, f"{name}, before", f"{name}, after", "", "", context, "")
    )


def compare(before: Path, after: Path, name: str | None) -> int:
    """Prints which programs are identical and how the others differ; 1 if one differs."""
    from program_text import instructions

    first, second = (
        {file.stem: file.read_text() for file in folder.glob("*.hlo")} for folder in (before, after)
    )
    for folder, texts in ((before, first), (after, second)):
        if not texts or name not in (None, *texts):
            print(f"There is nothing to compare in {folder}: write the programs first.")
            return 1
    if name is not None:
        print("\n".join(_difference(name, first[name], second[name], 3)))
        return int(first[name] != second[name])
    both = sorted(first.keys() & second.keys())
    same = [name for name in both if first[name] == second[name]]
    unlike = [name for name in both if first[name] != second[name]]
    moved = [name for name in unlike if instructions(first[name]) == instructions(second[name])]
    different = [name for name in unlike if name not in moved]
    for name in different:
        lines = _difference(name, first[name], second[name], 0)
        print(*(line[:_WIDTH] for line in lines[:_LINES]), sep="\n")
        print(f"… {len(lines)} lines in all: --diff {name}\n")
    print(f"{sum(first[name].count(_START) for name in same)} programs identical")
    for what, names in (
        ("of the same instructions, in another order or with other operands", moved),
        ("different", different),
        (f"not in {after}", sorted(first.keys() - second.keys())),
        (f"not in {before}", sorted(second.keys() - first.keys())),
    ):
        if names:
            print(f"{len(names)} {what}:", *names, sep="\n  ")
    return int(len(same) < len(first.keys() | second.keys()))


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="write the programs into a folder")
    writing.add_argument("folder", type=Path)
    writing.add_argument(
        "--only", default="", metavar="PATTERN", help="found in the names of cases"
    )
    writing.add_argument("--for", dest="devices", metavar="DEVICES", help="such as v5e:2x4")
    comparing = commands.add_parser("compare", help="compare two folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--diff", metavar="NAME", help="show all of one difference")
    asked = parser.parse_args()
    if asked.command == "write":
        return write(asked.folder, asked.only, asked.devices)
    return compare(asked.before, asked.after, asked.diff)


if __name__ == "__main__":
    sys.exit(main())
