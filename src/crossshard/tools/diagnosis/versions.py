"""The packages that crossshard needs: which versions are installed, and whether they fit."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping

import jax

import crossshard
from crossshard.tools.diagnosis.report import Finding

# They must be of the version of jaxlib, or JAX leaves them aside.
_PLUGINS = (
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("jax-rocm7-plugin", "jax-rocm7-pjrt"),
)
_SHOWN = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint", "libtpu", *_PLUGINS)


def installed() -> dict[str, str]:
    """The versions of Python, crossshard and what it runs on."""
    found = {name: version for name in _SHOWN if (version := _version(name))}
    # What was imported, whatever else is installed.
    ours = {"crossshard": crossshard.__version__, "Python": platform.python_version()}
    return ours | found | {"jax": jax.__version__}


def findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """What does not fit together.

    Args:
      versions: as ``installed`` returns them.
    """
    jaxlib = versions.get("jaxlib", "")
    if jaxlib and _numbers(jaxlib) != _numbers(versions["jax"]):
        yield Finding(
            "versions",
            f"jax is {versions['jax']} and jaxlib {jaxlib}; they are released together: "
            f'pip install "jax=={versions["jax"]}" "jaxlib=={versions["jax"]}".',
        )
    for name in _PLUGINS:
        if jaxlib and name in versions and _numbers(versions[name]) != _numbers(jaxlib):
            extra = name.split("-")[1]
            yield Finding(
                "versions",
                f"{name} is {versions[name]} and jaxlib {jaxlib}, so JAX does not use the "
                f'accelerator: pip install "jax[{extra}]=={versions["jax"]}".',
            )
    is_installed = _version("crossshard") is not None
    for line in (importlib.metadata.requires("crossshard") or []) if is_installed else []:
        found = re.fullmatch(r"([\w-]+)\s*\(?([<>=,.\d\s]+)\)?", line)
        if found and found[1] in versions and not _fits(versions[found[1]], found[2]):
            name, wanted = found.groups()
            yield Finding(
                "versions",
                f"{name} is {versions[name]}, and crossshard supports {wanted}: "
                f'pip install "{name}{wanted}".',
            )


def _fits(version: str, wanted: str) -> bool:
    """Whether a version is in a range of ``>=`` and ``<``.

    >>> _fits("0.10.2", "<0.13,>=0.10.0"), _fits("0.13.0", "<0.13,>=0.10.0")
    (True, False)
    """
    has = _numbers(version)
    return all(
        (has >= _numbers(bound)) == (sign == ">=")
        for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted)
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Three of them, so that 0.13 is 0.13.0; what follows, as in ``rc1``, is left out."""
    found = re.findall(r"\d+", re.split(r"[^\d.]", version)[0])
    return tuple(int(each) for each in (*found, 0, 0, 0)[:3])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
