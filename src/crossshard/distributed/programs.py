"""Programs: keeps what was compiled, so that a process that starts again compiles nothing."""

import os
from typing import Any

import jax

from crossshard.distributed.identity import private_folder

# JAX keeps only what took a second to compile, and a step has dozens of smaller programs.
_ALL: dict[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_FOLDER = "jax_compilation_cache_dir"


def keep_programs(folder: str | os.PathLike[str]) -> None:
    """Keep all compiled programs in a folder, and take from it what was compiled before.

    It is JAX's own compilation cache, with programs of any size, in a folder of this user alone:
    whoever writes there decides what runs here. Call it before the first JAX operation.
    ``crossshard launch`` with ``--restarts`` does it for the processes that it starts.

    Args:
      folder: the folder, such as ``"runs/mine/programs"``; it is created if it does not exist.

    Raises:
      ArgumentError, ArgumentTypeError: not a folder, or one that others may read or write.
      DistributedError: it cannot be created.

    >>> import tempfile
    >>> keep_programs(tempfile.mkdtemp())
    """
    path = private_folder("folder", folder, "'runs/mine/programs'")
    for name, value in {_FOLDER: str(path), **_ALL}.items():
        jax.config.update(name, value)


def variables_for(folder: str) -> dict[str, str]:
    """Return the variables that make JAX keep all programs in a folder, if no other one is set."""
    if _FOLDER.upper() in os.environ:
        return {}
    return {name.upper(): str(value) for name, value in {_FOLDER: folder, **_ALL}.items()}
