"""tools/programs.py: what counts as the same program, and its two commands."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tools import program_text

ROOT = Path(__file__).parents[2]
A, B = np.ones(40, np.float32), np.ones(40, np.float32)


def hlo(function: Any, *args: Any) -> str:
    return jax.jit(function).lower(*args).compile().as_text()


def same(one: str, other: str) -> tuple[bool, bool]:
    """Whether two programs are the same, and whether they have the same instructions."""
    texts = program_text.normalised(one), program_text.normalised(other)
    instructions = [program_text.instructions(text) for text in texts]
    return texts[0] == texts[1], instructions[0] == instructions[1]


def loop(x: jax.Array, factor: float) -> jax.Array:
    return jax.lax.fori_loop(0, 7, lambda i, x: jnp.sin(x) * factor + i, x)


def test_names_and_places_in_the_source_do_not_count():
    def one(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sort(loop(x, 2.0)), "i")

    def other(y: jax.Array) -> jax.Array:
        with jax.named_scope("elsewhere"):
            turned = loop(y, 2.0)
        return jax.lax.psum(jnp.sort(turned), "i")

    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    texts = [
        hlo(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P()), A) for f in (one, other)
    ]
    assert texts[0] != texts[1]
    assert same(texts[0], texts[1]) == (True, True)
    assert "channel_id=1," in texts[0]
    renumbered = texts[0].replace("%", "%p.7.").replace("channel_id=1,", "channel_id=9,")
    assert same(texts[0], renumbered) == (True, True)


def test_a_number_in_a_loop_counts():
    assert same(hlo(lambda x: loop(x, 2.0), A), hlo(lambda x: loop(x, 3.0), A)) == (False, False)


def test_another_order_has_the_same_instructions():
    sine_first = lambda p: {"a": jnp.sin(p["a"]) * 2, "b": jnp.cos(p["b"]).cumsum()}
    sine_last = lambda p: {"b": jnp.sin(p["b"]) * 2, "a": jnp.cos(p["a"]).cumsum()}
    assert same(*(hlo(f, {"a": A, "b": B}) for f in (sine_first, sine_last))) == (False, True)


@pytest.mark.parametrize(
    ("one", "other", "instructions"),
    [
        (lambda a, b: jnp.sin(a) - b, lambda a, b: b - jnp.sin(a), True),
        (lambda a, b: jnp.sin(a) - b, lambda a, b: jnp.sin(a) - a + 0 * b, False),
        (lambda a, b: (a.sum(), a * b), lambda a, b: (a.sum(), a * a * b), False),
    ],
)
def test_the_order_of_operands_counts(one: Any, other: Any, instructions: bool):
    assert same(hlo(one, A, B), hlo(other, A, B)) == (False, instructions)


def run(*words: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.deep
def test_written_twice_and_compared(tmp_path: Path):
    tool, before, after = "tools/programs.py", tmp_path / "before", tmp_path / "after"
    only = "^(sum-unchecked|whole-replicated-sgd|stateful-sgd)$"
    for folder in (before, after):
        code, said = run(tool, "write", str(folder), "--only", only)
        assert code == 0, said
        assert "3 programs of 3 steps" in said
    code, said = run(tool, "compare", str(before), str(after))
    assert (code, said) == (0, "3 programs identical\n")

    file = after / "whole-replicated-sgd.hlo"
    file.write_text(file.read_text().replace(" tanh(", " sine(", 1))
    (after / "sum-unchecked.hlo").unlink()
    code, said = run(tool, "compare", str(before), str(after))
    assert code == 1
    assert any(line.startswith("+") and " sine(" in line for line in said.splitlines())
    assert "1 programs identical\n1 different:\n  whole-replicated-sgd\n1 not in" in said
    assert run(tool, "compare", str(before), str(after), "--diff", "whole-replicated-sgd")[0] == 1
    assert run(tool, "compare", str(before), str(after), "--diff", "stateful-sgd")[0] == 0


@pytest.mark.deep
def test_a_step_that_compiles_nothing_fails(tmp_path: Path):
    code = f"""
import sys
sys.path.insert(0, "tools")
from pathlib import Path
import programs
programs._set_up_devices()
import program_cases
assert len(program_cases.CASES) >= 60
program_cases.CASES = {{"nothing": lambda: lambda: None}}
sys.exit(programs.write(Path({str(tmp_path)!r}), "", None))
"""
    returned, said = run("-c", code)
    assert returned == 1
    assert "Nothing was compiled" in said
    assert "1 failed: nothing" in said
