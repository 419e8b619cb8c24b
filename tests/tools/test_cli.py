"""`crossshard inspect`, `plan` and `verify`: words, JSON, exit codes, one line for a refusal."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import crossshard
from tests.tools.command import Command, Ended, bare_environment, process

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "guide" / "inspect.md"

# What pip writes for the command; the folder it lies in is first on the path, not the current one.
COMMAND = "import sys\nfrom crossshard.tools.cli import main\nsys.exit(main())\n"

TRAIN = """
import crossshard
import jax, jax.numpy as jnp, optax
from jax.sharding import PartitionSpec as P

W, X = jnp.full((16, 32), 0.01), jnp.ones((64, 16))


def grad(w, x):
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def over(step, x=P("s")):
    mesh = jax.make_mesh((8,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), x), out_specs=P(), check_vma=False)


def lowered(*args):
    print("this is not part of the report")
    step = jax.jit(over(lambda w, x: w - jax.lax.pmean(grad(w, x), "s")))
    return step.lower(*(args or (W, X)))


def compiled():
    return lowered().compile()


def placed():
    mesh = jax.make_mesh((8,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    lies = tuple(jax.sharding.NamedSharding(mesh, spec) for spec in (P(), P("s")))
    return lowered(*jax.device_put((W, X), lies))


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def a_step():
    return crossshard.make_train_step(loss, optax.sgd(0.1), num_shards=8)


def train_step():
    step = a_step()
    return step.lower(step.abstract_init(W), X)


class Steps:
    make = staticmethod(lowered)


def fail(how):
    raise how


raises = lambda: fail(ValueError("the data\\nis gone"))
leaves = lambda: fail(SystemExit(3))
which_devices = lambda: fail(ValueError(f"on {jax.config.jax_platforms}"))
stops = lambda: fail(KeyboardInterrupt())
returns_nothing = lambda: None
returns_no_step = lambda: (3, W)
fails_in_the_step = lambda: jax.jit(lambda w: w.nothing).lower(W)


def needs_more(size):
    return lowered()


number = 3

# For plan.


def plan():
    print("this is not part of the report")
    rows = lambda devices: jax.ShapeDtypeStruct((2 * devices, 64), jnp.float32)
    # Arrays start JAX, which must have its devices by then.
    return {"loss_fn": loss, "params": jnp.zeros((64, 64)), "batch": rows,
            "optimizer": optax.sgd(0.1)}


def too_large():
    large = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
    return {**plan(), "params": large, "loss_fn": lambda w, x: jnp.sum(w**2) + jnp.sum(x)}


plan_of_a_tuple = lambda: (1, 2)
plan_fails = lambda: {**plan(), "loss_fn": lambda w, x: w.nothing}

# For verify.


def check_wrong():
    def make(optimizer, n):
        @jax.jit
        def step(w, state, x):
            updates, state = optimizer.update(n * grad(w, x), state, w)
            return optax.apply_updates(w, updates), state

        return step, W, optimizer.init(W)

    return make, X


def check_step():
    return a_step(), W, X


check_fails = lambda: ((lambda optimizer, n: 1 / 0), X)
"""

BYTES = 4 * 16 * 32
SENT = 2 * 7 / 8 * BYTES


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of the user's, and beside it the command."""
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "bin").mkdir()
    (folder / "bin" / "crossshard").write_text(COMMAND)
    here = folder / "here"
    (here / "mine").mkdir(parents=True)
    (here / "mine" / "__init__.py").touch()
    (here / "mine" / "train.py").write_text(TRAIN)
    (here / "mine" / "broken.py").write_text("import numpy\nimport not_installed\n")
    (here / "mine" / "misspelt.py").write_text("def make(:\n")
    return here


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> Command:
    """The command in the user's folder, in this interpreter."""
    return Command(monkeypatch, capsys, folder)


def as_script(folder: Path, *words: str, **kwargs: Any) -> Ended:
    """As pip's script starts it."""
    script = folder.parent / "bin" / "crossshard"
    return process(folder, *words, command=(sys.executable, script), **kwargs)


def inspected(run: Command, name: str, *options: str) -> Ended:
    return run("inspect", f"mine.train:{name}", "--devices", "8", *options)


def test_a_table_from_a_process_with_nothing_set(folder: Path):
    words = ["--devices", "8", "--parameters", str(BYTES)]
    done = as_script(folder, "inspect", "mine.train:lowered", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "this is not part of the report\n"
    line = TRAIN.splitlines().index(next(x for x in TRAIN.splitlines() if "w - jax.lax.pmean" in x))
    head, only, *totals = done.stdout.splitlines()
    columns = ["collective", "operands", "sent per shard", "groups", "when", "source"]
    assert re.split("  +", head) == columns
    assert re.split("  +", only) == [
        "all-reduce", "f32[16,32]", f"{SENT:,.0f} B", "1 of 8",
        f"{folder}/mine/train.py:{line + 1}",
    ]  # fmt: skip
    assert totals[0] == f"each of 8 devices sends {SENT:,.0f} B"
    assert totals[1].endswith(f"= {SENT:,.0f} B for {BYTES:,} B of parameters; ratio 1.000")
    assert totals[2] == "no collective is asynchronous, so all bytes are exposed"
    assert totals[3].startswith("memory per device: argument ")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("name", ["lowered", "placed", "compiled", "train_step", "Steps.make"])
def test_all_that_a_factory_may_return(run: Command, name: str):
    named = [] if name == "train_step" else ["--parameters", str(BYTES)]
    done = inspected(run, name, "--json", *named)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert (read["devices"], read["shards"], read["parameter_bytes"]) == (8, 8, BYTES)
    assert read["ratio"] == pytest.approx(1, abs=0.01)
    assert "train.py" in read["collectives"][0]["source"]


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_the_keys_of_the_json_are_those_that_are_documented(run: Command):
    read = json.loads(inspected(run, "lowered", "--json", "--parameters", str(BYTES)).stdout)
    keys = keys_of(read)
    assert (read["bytes_sent"], read["lower_bound"]) == (SENT, SENT)
    rows = DOCS.read_text().partition("## JSON")[2]
    (table,) = re.findall(r"^\| key .*\Z", rows, re.DOTALL | re.MULTILINE)
    first, said = zip(*(row.split("|")[1:3] for row in table.splitlines()[2:]), strict=True)
    documented = {*re.findall("`([a-z_]+)`", "".join(first))}
    inner = set("dtype dimensions argument output temp alias peak".split())
    assert inner <= {*re.findall("`([a-z_]+)`", "".join(said))}
    assert keys == documented | inner


def test_help_says_how_it_is_used_and_how_it_ends(run: Command):
    done = run("inspect", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("step.lower(state, batch)", "Exit codes: 0 success; 2 "):
        assert part in done.stdout
    options = re.findall("^  (?:-., )?(--[a-z-]+)", done.stdout, re.MULTILINE)
    assert options == ["--help", "--json", "--devices", "--parameters", "--axis-name"]
    assert all(f"`{option}" in DOCS.read_text() for option in options[1:])
    assert "inspect" in run("--help").stdout
    assert run("--version").stdout == f"crossshard {crossshard.__version__}\n"


REFUSED = {
    "": "COMMAND",
    "inspekt": "'inspekt'.*inspect",
    "inspect": "package.module:factory",
    "inspect mine.train": "package.module:factory.*got 'mine.train'",
    "inspect mine/train.py:jitted": "package.module:factory.*got 'mine/train.py:jitted'",
    "inspect mine.train:lowered --jsn": "--jsn",
    "inspect mine.train:lowered --devices many": "--devices.*'many'",
    "inspect mine.train:lowered --devices 0": "0",
    "inspect mine.train:lowered --parameters 1.5": "--parameters.*'1.5'",
    "inspect mine.train:lowered --parameters 0": "0 bytes",
    "inspect mine.train:placed --devices 8 --axis-name t": "axes of the program's mesh, s; .*'t'",
    "inspect nothing.here:make": r"cannot be imported in /.*here: .*No module named 'nothing'",
    "inspect mine.broken:make": r"mine\.broken.*No module named 'not_installed' .*broken\.py:2\)",
    "inspect mine.misspelt:make": r"mine\.misspelt:make cannot be .*: SyntaxError.*line 1",
    "inspect mine.train:Steps.take": r"'Steps' has no attribute 'take'",
    "inspect mine.train:number": "must be a function without arguments; got int",
    "inspect mine.train:raises": r"ValueError: the data is gone \(/.*/mine/train\.py:\d+\)",
    "inspect mine.train:leaves": r"mine\.train:leaves raised: SystemExit: 3",
    "inspect mine.train:needs_more": r"raised: TypeError: needs_more\(\).*'size'",
    "inspect mine.train:returns_no_step": r"jax\.jit\(step\)\.lower\(\*args\); got tuple",
    "inspect mine.train:fails_in_the_step": r"raised: .*nothing \(/.*train\.py:\d+\)",
    "plan --topology cpu:1": "package.module:factory",
    "plan mine.train:plan --topology v9:4x4": "no topology 'v9:4x4'. Known are v5e:4x4",
    "plan mine.train:plan_of_a_tuple --topology cpu:1": "must return a dict with loss_fn",
    "plan mine.train:plan_fails --topology cpu:1": "has no attribute nothing",
    "verify mine.train:returns_nothing": r"must return \(make_step, batch…\)",
    "verify mine.train:check_fails --shards 2": "ZeroDivisionError",
    "verify mine.train:check_step --shards 2": "has its own number of shards",
    "doctor --timeout 0": "timeout must be above 0",
    "doctor --sizes -1": "-1",
    "doctor --devices 0": "0",
}


def check_refused(done: Ended, why: str) -> None:
    said = done.stderr.replace("this is not part of the report\n", "")
    assert (done.returncode, done.stdout) == (2, ""), said
    assert said.startswith("crossshard: ")
    assert said.count("\n") == 1
    assert re.search(why, said), said


def test_what_cannot_be_done_is_one_line_and_two(run: Command):
    for words, why in REFUSED.items():
        check_refused(run(*words.split()), why)


def test_ctrl_c_ends_it_quietly(run: Command):
    done = inspected(run, "stops")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_page_about_it_runs(folder: Path, run: Command):
    page = DOCS.read_text()
    example, factory = re.findall("^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(example, DOCS.name, "exec"), {"__name__": "page"})
    (folder / "train.py").write_text(example + factory)
    (shown,) = re.findall(r"^\$ (crossshard inspect .*?)^```", page, re.DOTALL | re.MULTILINE)
    words, _, output = shown.partition("\n")
    done = run(*words.split()[1:])
    assert done.returncode == 0, done.stderr
    totals = [line for line in output.splitlines() if line.startswith(("each of", "8 shards"))]
    assert len(totals) == 2
    assert set(totals) <= set(done.stdout.splitlines())


# Interpreters of its own.


@pytest.mark.deep
def test_devices_of_a_process(folder: Path):
    # Virtual devices stand before accelerators; what the user has set stays.
    words = ["inspect", "mine.train:which_devices", "--devices", "8"]
    of = lambda platforms: bare_environment(JAX_PLATFORMS=platforms)
    said = [as_script(folder, *words, env=of(each)).stderr for each in ("", "cpu,cuda")]
    assert ["raised: ValueError: on cpu (" in each for each in said] == [True, False]
    assert "on cpu,cuda (" in said[1]
    # Where there are too few, the user's line is named.
    done = as_script(folder, "inspect", "mine.train:lowered")
    check_refused(done, r"raised: .*8.*\(/.*train\.py:\d+\)")
    # It is a module too.
    done = process(folder, "plan", "mine.train:plan", "--topology", "cpu:2")
    assert (done.returncode, done.stderr) == (0, "this is not part of the report\n")
    lines = done.stdout.splitlines()
    assert lines[0] == "4,096 parameters on cpu:2, 2 devices"
    ways = ["replicated", "sharded", "params sharded"]
    rows = [line.split("  ")[0] for line in lines]
    assert [row for row in rows if row in ways] == ways * 2


@pytest.mark.deep
def test_output_that_nobody_reads_or_that_has_no_room(folder: Path):
    words = ["inspect", "mine.train:lowered", "--devices", "8"]
    kept = {"capture_output": False, "stderr": subprocess.PIPE}
    full = Path("/dev/full")
    if full.exists():
        with full.open("w") as stdout:
            done = as_script(folder, *words, stdout=stdout, **kept)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].endswith("No space left on device.")
        assert "Traceback" not in done.stderr
    read, written = os.pipe()
    os.close(read)
    done = as_script(folder, *words, "--json", stdout=written, **kept)
    os.close(written)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr


# Plan and verify.


def test_json_of_a_plan_of_what_does_not_fit(run: Command):
    done = run("plan", "mine.train:too_large", "--topology", "cpu:1", "--json")
    assert done.returncode == 1, done.stderr
    read: Any = json.loads(done.stdout)
    assert read["candidates"][0]["fits"] is False
    assert read["candidates"][0]["memory"]["parameters"] == 4 * 2**40


def test_a_wrong_step_as_json_and_a_right_one(run: Command):
    done = run("verify", "mine.train:check_wrong", "--json", "--shards", "2")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["num_shards"], found["rows"]) == (False, 2, 64)
    assert (found["faults"][0]["kind"], found["faults"][0]["factor"]) == ("update", "N")
    assert found["leaves"][0]["ratio"] == pytest.approx(2)
    done = run("verify", "mine.train:check_step")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fine: on 8 shards and 64 rows")
