"""The examples and the benchmarks use crossshard as its users do: by its public names alone."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossshard

ROOT = Path(__file__).parents[2]
FILES = sorted(f for folder in ("examples", "benchmarks") for f in (ROOT / folder).rglob("*.py"))
MODULES = "checkpoints distributed errors guards nnx pipeline step tf1 tools".split()
PUBLIC = {"crossshard": {*crossshard.__all__, "__version__", *MODULES}} | {
    f"crossshard.{name}": {*importlib.import_module(f"crossshard.{name}").__all__}
    for name in MODULES
}


def used(code: str) -> Iterator[str]:
    """What of crossshard the code names, dotted."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def is_public(name: str) -> bool:
    # Of an attribute of a class, or a further one, only the beginning is a name of the package.
    parts = name.split(".")
    if parts[0] != "crossshard" or len(parts) == 1:
        return True
    if len(parts) > 2 and ".".join(parts[:2]) in PUBLIC:
        return parts[2] in PUBLIC[".".join(parts[:2])]
    return parts[1] in PUBLIC["crossshard"]


def test_only_public_names_are_used():
    internal = {
        str(file.relative_to(ROOT)): [x for x in used(file.read_text()) if not is_public(x)]
        for file in FILES
    }
    assert len(internal) > 50
    assert not {file: names for file, names in internal.items() if names}


@pytest.mark.parametrize(
    "code",
    [
        "from crossshard.shards.devices import cpu_devices",
        "import crossshard.shards",
        "from crossshard import _jax",
        "from crossshard.errors import _hidden",
        "import crossshard; crossshard.shards.devices",
    ],
)
def test_internal_names_are_found(code: str):
    assert not all(map(is_public, used(code)))
