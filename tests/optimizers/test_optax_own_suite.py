"""Optax's own alias_test.py and sharding_test.py, with every optimizer wrapped, on one shard.

As a test this file starts itself as a script, in processes of their own: the suites import Optax
whole and set what JAX reads once, and what is wrapped there must stay wrapped there.
"""

import collections
import contextlib
import functools
import importlib.util
import inspect
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.deep

# Each part is a process; the tests of both files are in exactly one. With how many must pass at
# least, or a part that finds nothing would pass, and how many optimizers must have been wrapped.
PARTS = [
    ("sharding_test.py", "ShardingTest", 78, 25),
    ("alias_test.py", "LBFGSTest", 47, 1),
    ("alias_test.py", "AliasTest and stability", 150, 30),
    ("alias_test.py", "AliasTest and not stability", 330, 30),
]

# Optax's lbfgs broadcasts a sharded array into one that is not, whoever wraps it.
FAIL_UNWRAPPED = {
    "ShardingTest::test_state_sharding_type_init_match_update_lbfgs",
    "ShardingTest::test_state_sharding_type_preserved_with_jit_lbfgs",
}


@pytest.mark.parametrize(("file", "selection", "passes", "factories"), PARTS)
def test_the_suite_passes_with_every_optimizer_wrapped(
    file: str, selection: str, passes: int, factories: int, tmp_path: pathlib.Path
) -> None:
    outcomes, counts = run_in_process(file, selection, "wrapped", tmp_path)
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} <= FAIL_UNWRAPPED
    assert list(outcomes.values()).count("passed") >= passes
    assert counts.pop("reductions") >= passes / 3
    assert len(counts) >= factories


def test_what_may_fail_fails_unwrapped_too(tmp_path: pathlib.Path) -> None:
    outcomes, counts = run_in_process("sharding_test.py", "lbfgs", "plain", tmp_path)
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == FAIL_UNWRAPPED
    assert counts == {}


def run_in_process(
    file: str, selection: str, how: str, folder: pathlib.Path
) -> tuple[dict[str, str], dict[str, int]]:
    """The outcome of each test, and how often each factory's product was wrapped."""
    assert importlib.util.find_spec("sklearn"), "alias_test.py needs scikit-learn to be imported"
    optax = importlib.util.find_spec("optax")
    assert optax is not None
    assert optax.origin is not None
    suite = pathlib.Path(optax.origin).parent / "_src" / file
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, __file__, str(suite), selection, how, str(report)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    print(done.stdout[-20_000:], done.stderr[-2_000:])  # pytest shows it if the test fails
    assert report.exists(), "the suite did not run to its end"
    return tuple(json.loads(report.read_text()))


class Recorder:
    """A pytest plugin that notes the outcome of each test; of subtests, the worst."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed or (report.skipped and self.outcomes.get(name) != "failed"):
            self.outcomes[name] = report.outcome
        elif report.when == "call":
            self.outcomes.setdefault(name, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid or "collection"] = "failed"


@contextlib.contextmanager
def every_optimizer_wrapped(counts: dict[str, int]) -> Iterator[None]:
    """Let each optimizer that ``optax`` and its ``alias`` make be a CrossShardOptimizer."""
    import optax
    from optax._src import alias

    import crossshard
    from crossshard.pipeline.stages.aggregate import Aggregate

    making: list[str] = []

    def wrapped(name: str, factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            making.append(name)
            try:
                made = factory(*args, **kwargs)
            finally:
                making.pop()
            if making:  # a factory that calls another wants what Optax wrote it for
                return made
            counts[name] += 1
            return crossshard.CrossShardOptimizer(made)

        return make

    def counted(self: Aggregate, *args: Any, **kwargs: Any) -> Any:
        counts["reductions"] += 1
        return update(self, *args, **kwargs)

    update, Aggregate.update = Aggregate.update, counted
    for name, factory in list(vars(alias).items()):
        if getattr(optax, name, None) is factory and _makes_optimizer(factory):
            both = wrapped(name, factory)
            setattr(alias, name, both)
            setattr(optax, name, both)
    with crossshard.shard_context(1):
        yield


def _makes_optimizer(factory: Any) -> bool:
    import optax

    if inspect.isclass(factory) or not callable(factory):
        return False
    try:
        made = inspect.signature(factory).return_annotation
    except ValueError:  # a type alias
        return False
    return made is optax.GradientTransformationExtraArgs


def main(suite: str, selection: str, how: str, report: str) -> None:
    """Run the tests of a file that are selected; write the outcomes and the counts as JSON."""
    import jax

    jax.devices()  # now, because sharding_test.py sets XLA_FLAGS, and not to what we want
    if suite.endswith("sharding_test.py"):
        # It compares versions as text, so it would skip what "0.10" is older than "0.7" for.
        jax.__version__ = "0.9"
    counts: dict[str, int] = collections.Counter()
    recorder = Recorder()
    with every_optimizer_wrapped(counts) if how == "wrapped" else contextlib.nullcontext():
        options = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "no:xdist"]
        pytest.main([*options, "-k", selection, suite], plugins=[recorder])
    pathlib.Path(report).write_text(json.dumps([recorder.outcomes, counts]))


if __name__ == "__main__":
    main(*sys.argv[1:])
