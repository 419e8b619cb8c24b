"""How much a reader meets: what a plain Adam passes through, and what crosses a file's border.

    python tools/measures.py

Run it before and after a change of the house. What is called is counted by a profile of Python's
calls; a call over a border is one from the innermost function of the package that is running.
"""

import ast
import collections
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1] / "src" / "crossshard"
# The words by which a file knows a way of the step.
FEATURES = {
    "workers": r"\bsync_(every|streaming)\b|\bouter_(optimizer|reduce_dtype)\b|\bLocalSGD",
    "virtual shards": r"\bvirtual_shards\b|\bVirtualLoss\b",
    "a loss over the batch": r"\bhas_one_state\b|\bover_batch\b|\bBatchLoss\b",
}


class Calls:
    """The functions of the package that run, and the calls over a file's border."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, int]] = set()
        self.borders: collections.Counter[tuple[str, str]] = collections.Counter()
        self._stack: list[str] = []

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(str(PACKAGE)):
            return
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        if self._stack and self._stack[-1] != file:
            self.borders[self._stack[-1], file] += 1
        self._stack.append(file)
        self.functions.add((file, frame.f_code.co_firstlineno))

    def of(self, call: Callable[[], Any]) -> Any:
        """Count while something is called."""
        self._stack.clear()
        sys.setprofile(self._event)
        try:
            return call()
        finally:
            sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        """The files of these functions."""
        return {file for file, _ in self.functions}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of files that call each other."""
        found = self.borders.keys()
        return sorted((one, other) for one, other in found if one < other and (other, one) in found)


def lines_of(files: Iterator[Path]) -> tuple[int, int]:
    """How many files there are, and how many lines they have."""
    counts = [len(file.read_text(encoding="utf-8").splitlines()) for file in files]
    return len(counts), sum(counts)


def reading_path() -> int:
    """How many lines CONTRIBUTING.md lists: of some files up to, through, from or only a name."""
    text = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d\. .*", text.split("## Read it in an afternoon")[1], re.MULTILINE)
    link = r"\]\((src/crossshard/[^)]+)\)(?:, (up to|through|from|only) `(\w+)`)?"
    number = 0
    for file, how, name in re.findall(link, "\n".join(listed)):
        code = (PACKAGE.parents[1] / file).read_text(encoding="utf-8")
        found: list[Any] = [x for x in ast.walk(ast.parse(code)) if getattr(x, "name", 0) == name]
        begins, ends = 0, len(code.splitlines())
        if how in ("from", "only"):
            begins = found[0].lineno - 1
        if how in ("up to", "through", "only"):
            ends = found[0].lineno - 1 if how == "up to" else found[0].end_lineno
        number += ends - begins
    return number


def crossing() -> tuple[int, int]:
    """The names that another file of the package imports, and those of one importer alone."""
    users: collections.Counter[tuple[str, str]] = collections.Counter()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crossshard"):
                users.update((str(node.module), each.name) for each in node.names)
    return len(users), sum(count == 1 for count in users.values())


def main() -> None:
    """Measure, and print a line for each measure."""
    os.environ.setdefault("NPROC", "32")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax.numpy as jnp
    import numpy as np
    import optax

    import crossshard

    loss_fn = lambda params, batch: ((batch["x"] @ params["w"] + params["b"]) ** 2).mean()
    params = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
    batch = {"x": np.ones((16, 16), np.float32)}
    calls = Calls()
    adam = optax.adam(1e-3)
    step = calls.of(lambda: crossshard.make_train_step(loss_fn, adam, num_shards=8))
    state = calls.of(lambda: step.init(params))
    calls.of(lambda: step(state, batch))

    files, lines = lines_of(PACKAGE.rglob("*.py"))
    root = PACKAGE.parents[1]
    print(f"src: {lines:,} lines in {files} files")
    for name in ("tests", "benchmarks", "examples", "tools"):
        number, of_name = lines_of((root / name).rglob("*.py"))
        print(f"{name}: {of_name:,} lines in {number} files")
    print(f"the reading path: {reading_path():,} lines")
    over = sum(calls.borders.values())
    print(f"a plain Adam enters {len(calls.files)} files, {len(calls.functions)} functions")
    print(f"calls over a file's border: {over:,}")
    print(f"pairs of files that call each other: {len(calls.pairs)}")
    for one, other in calls.pairs:
        short = [Path(each).relative_to(PACKAGE) for each in (one, other)]
        print(f"  {short[0]} and {short[1]}")
    texts = {file: file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    for feature, words in FEATURES.items():
        named = sum(re.search(words, text) is not None for text in texts.values())
        print(f"files that name {feature}: {named}")
    names, alone = crossing()
    print(f"names that cross a file's border: {names}, {1000 * names / lines:.1f} per 1,000 lines")
    print(f"  of one user: {alone}")
    print(f"Flax is loaded: {'flax' in sys.modules}")


if __name__ == "__main__":
    main()
