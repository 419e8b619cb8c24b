"""The programs: what each is, what was changed in it, and what the first try said.

A program stands here as it trains on eight shards; the patch beside it says what was changed, as
``diff -U1`` writes it. Where a change of the program is one of its lines, it is written anew.
"""

import ast
import dataclasses
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from examples._patch import patched

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Refused:
    """A first try that is refused.

    Attributes:
      changes: what a program says now, because the error said so, and what it said at first.
      said: what the error says.
      named: what the error says to write.
      written: the same, for the table.
    """

    changes: tuple[tuple[str, str], ...]
    said: str
    named: str
    written: str


_KNOWN = (
    Refused(
        ((', loss_over="batch"', ""),),
        "The loss compares rows of the batch",
        "loss_over='batch'",
        'loss_over="batch"',
    ),
    Refused(
        (("crossshard.Mean(total, count)", "total / count"),),
        "The loss divides a sum over the rows of the batch by another one",
        "return crossshard.Mean(total, count)",
        "crossshard.Mean(total, count)",
    ),
    Refused(
        (
            ("chain(noise, optimizer), preprocess=clip", "chain(clip, noise, optimizer)"),
            ("jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)", "tx.init"),
            ("    specs = tx.state_specs(params, num_shards=8)\n", ""),
            ("specs", "P()"),
        ),
        "per-example gradients",
        "preprocess=optax.contrib.differentially_private_aggregate",
        "preprocess=",
    ),
)
# Whose loss divides a sum over rows plus a number.
_ADDS_A_NUMBER = {"segmentation"}
# How a file says what it uses, and what a reader calls it.
_LIBRARIES = {
    "import equinox": "Equinox",
    "import haiku": "Haiku",
    "import keras": "Keras",
    "from flax import linen": "Flax Linen",
    "from flax import nnx": "Flax NNX",
}
_WAYS = {
    "crossshard.make_train_step(": "`make_train_step`",
    "crossshard.shard(": "`crossshard.shard`",
    "jax.shard_map(": "the Optax idiom in `shard_map`",
    "jax.device_put(": "the Optax idiom on global arrays",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program on one device, and the same on eight shards."""

    name: str

    @property
    def path(self) -> Path:
        """Where it is, as it trains on eight shards."""
        return HERE / f"{self.name}.py"

    def text(self, kind: str) -> str:
        """Its text, ``"before"`` or ``"after"``."""
        after = self.path.read_text(encoding="utf-8")
        return patched(after, self.diff(), back=True) if kind == "before" else after

    def module(self, text: str) -> ModuleType:
        """The program with this text, which may be another than the file's."""
        module = ModuleType(self.name)
        exec(compile(text, str(self.path), "exec"), vars(module))
        return module

    def run(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Train, and return what is trained, as numpy arrays."""
        return jax.device_get(self.module(self.text(kind)).main(*args, **kwargs))

    @property
    def what(self) -> str:
        """What it trains: the first line of the file."""
        return (ast.get_docstring(ast.parse(self.text("after"))) or "").removesuffix(".")

    @property
    def library(self) -> str:
        """What its model is written with."""
        found = [name for line, name in _LIBRARIES.items() if line in self.text("before")]
        return found[0] if found else "JAX"

    @property
    def way(self) -> str:
        """The way in that it uses."""
        return next(way for line, way in _WAYS.items() if line in self.text("after"))

    @property
    def refused(self) -> Refused | None:
        """The first try, where that is refused; ``None`` where it is right."""
        text = self.text("after")
        known = next((each for each in _KNOWN if each.changes[0][0] in text), None)
        if known is not None and self.name in _ADDS_A_NUMBER:
            said = "The loss compares rows of the batch: div of a sum over rows plus a number"
            return dataclasses.replace(known, said=said)
        return known

    def first_try(self) -> str:
        """The text of the first try."""
        text, refused = self.text("after"), self.refused
        for now, first in () if refused is None else refused.changes:
            text = re.sub(rf"(?<!_){re.escape(now)}", first, text)
        return text

    def diff(self) -> str:
        """What was changed, as ``diff -U1`` shows it: its patch, without the names of files."""
        return "".join(self.path.with_suffix(".patch").read_text("utf-8").splitlines(True)[2:])

    @property
    def changed(self) -> int:
        """How many lines were changed or added."""
        return sum(line.startswith("+") for line in self.diff().splitlines())


PROGRAMS = tuple(Program(path.stem) for path in sorted(HERE.glob("*.patch")))


def table(folder: str) -> str:
    """All programs in Markdown; ``folder`` is that of the programs, from where the table is."""
    lines = [
        "| program | library | way in | lines | the first try |",
        "|---|---|---|---|---|",
    ]
    for each in PROGRAMS:
        program, changes = (f"{folder}/{each.name}{ending}" for ending in (".py", ".patch"))
        refused = each.refused
        said = "right"
        if refused is not None:
            said = f"“{refused.said} …”: write `{refused.written}`"
        what = f"[{each.what}]({program}) ([changes]({changes}))"
        row = what, each.library, each.way, each.changed, said
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines) + "\n"


def difference(found: Any, expected: Any) -> float:
    """The largest difference of two trees of arrays, relative to the largest element."""
    flat = lambda tree: jax.tree_util.tree_leaves_with_path(tree)
    pairs = list(zip(flat(found), flat(expected), strict=True))
    for (path, one), (other_path, other) in pairs:
        if jax.tree_util.keystr(path) != jax.tree_util.keystr(other_path):
            raise ValueError(f"{jax.tree_util.keystr(path)} is there only once")
        if np.shape(one) != np.shape(other):
            raise ValueError(f"{jax.tree_util.keystr(path)}: {np.shape(one)}, {np.shape(other)}")
    wide = [(np.asarray(one, float), np.asarray(other, float)) for (_, one), (_, other) in pairs]
    scale = max(abs(other).max() for _, other in wide)
    return float(max(abs(one - other).max() for one, other in wide) / scale)
