"""Programs: whether all processes of a mesh are about to run the same one."""

from importlib.metadata import version

import jax
from jax.sharding import Mesh

from crossshard import _check, _jax
from crossshard._hash import crc32
from crossshard.distributed.agreement import Disagreement, compare, exchange, processes_of
from crossshard.errors import ArgumentError, ArgumentTypeError, ProgramMismatchError

# Lines of a program that are compared, to find the first that differs.
_MOST = 500_000


def check_same_program(lowered: jax.stages.Lowered, mesh: Mesh) -> None:
    """Raise, in every process of a mesh, unless all of them have lowered the same program.

    Every process must call it. XLA does not compare programs: one that adds where another takes
    the maximum gives numbers that nobody asked for, and one with other shapes aborts, or waits for
    ever. ``make_train_step`` calls it before the first run of each program; call it for a step that
    you compile yourself. On CPUs it also compiles the program, which a call of the same function
    then need not, and waits until all of them have. Addresses of Python objects are left out, so
    that Python functions which a program calls, as ``jax.debug.print`` does, are not compared.

    Args:
      lowered: the program, ``jax.jit(step).lower(*args)``.
      mesh: the mesh that it runs on.

    Raises:
      ArgumentTypeError: it is no program, or no mesh.
      ProgramMismatchError: names the process that differs, and the first line that does; or the
        one that has not reached this call, or is at another one.

    >>> import jax.numpy as jnp
    >>> lowered = jax.jit(jnp.sin).lower(1.0)
    >>> check_same_program(lowered, jax.make_mesh((1,), ("data",)))
    """
    if not isinstance(lowered, jax.stages.Lowered):
        raise ArgumentTypeError(
            f"lowered must be a program, as jax.jit(step).lower(*args) returns it; got "
            f"{_check.described(lowered)}."
        )
    if not isinstance(mesh, Mesh):
        raise ArgumentTypeError(f"mesh must be a jax.sharding.Mesh; got {_check.described(mesh)}.")
    if len(processes_of(mesh)) == 1:
        return
    try:
        found = _difference(lowered, mesh)
    except ArgumentError as error:
        raise ProgramMismatchError(str(error)) from None
    if found is None:
        return
    odd = ", ".join(map(str, found.odd))
    which = f"process {odd} differs" if len(found.odd) == 1 else f"processes {odd} differ"
    raise ProgramMismatchError(
        f"The processes would not run the same step: {which}. Its {found.name} is "
        f"{found.passed}; that of process {found.other} is {found.expected}. Every process "
        f"must build the same step, with the same optimizer, options and shapes; only the rows of "
        f"the batch are its own."
    )


def _difference(lowered: jax.stages.Lowered, mesh: Mesh) -> Disagreement | None:
    text = _jax.without_addresses(lowered)
    devices = [device.id for device in mesh.devices.flat]
    given = {
        "mesh": f"{dict(mesh.shape)} of devices {devices}",
        "JAX": f"{jax.__version__} with jaxlib {version('jaxlib')}",
        "program": f"checksum {crc32(text)} of {text.count(chr(10))} lines",
    }
    found = compare("a first step", lambda: given, mesh)
    if found is None and mesh.devices.flat[0].platform == "cpu":
        # In its first run gloo connects the processes, and gives up if one is half a minute late.
        lowered.compile()
        exchange("a compiled step", "", mesh, within="compile")
    if found is not None and found.name == "program":
        found = _first_line(text.splitlines(), mesh) or found
    return found


def _first_line(lines: list[str], mesh: Mesh) -> Disagreement | None:
    """The first line that differs."""
    # Numbers of one length, since what is given is compared in the order of its names.
    sums = {f"{number:08}": crc32(line) for number, line in enumerate(lines[:_MOST], 1)}
    found = compare("the lines of a program", lambda: sums, mesh)
    if found is None:
        return None
    number = int(found.name)
    line = f"`{lines[number - 1].strip():.200}`" if number <= len(lines) else "nothing"
    given = {f"line {number} of the lowered step": line}
    return compare("a line of a program", lambda: given, mesh)
