"""`crossshard inspect`: tables, JSON, contracts, one line for what is wrong, and as a process."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import crossshard
from tests.tools.cli import command
from tests.tools.cli.command import Command, Ended

DOCS = Path(__file__).parents[3] / "docs" / "guide" / "inspect.md"

# What pip writes for the command; the folder it lies in is first on the path, not the current one.
COMMAND = "import sys\nfrom crossshard.tools.cli import main\nsys.exit(main())\n"

TRAIN = """
import crossshard
import jax, jax.numpy as jnp, optax
from jax.sharding import PartitionSpec as P

W, X = jnp.ones((16, 32)), jnp.ones((64, 16))


def grad(w, x):
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def over(step, x=P("s")):
    mesh = jax.make_mesh((8,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), x), out_specs=P(), check_vma=False)


def function():
    print("this is not part of the report")
    return over(lambda w, x: w - jax.lax.pmean(grad(w, x), "s")), W, X


def jitted():
    step, *args = function()
    return jax.jit(step), *args


def lowered():
    step, *args = jitted()
    return step.lower(*args)


def compiled():
    return lowered().compile()


def placed():
    step, *args = jitted()
    mesh = jax.make_mesh((8,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    lies = [jax.sharding.NamedSharding(mesh, spec) for spec in (P(), P("s"))]
    return step, *jax.device_put(args, lies)


def train_step():
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    step = crossshard.make_train_step(loss, optax.sgd(0.1), num_shards=8)
    return step, step.abstract_init(W), X


def twice():
    mean = lambda g: jax.lax.pmean(g, "s")
    return over(lambda w, x: w - mean(jnp.tanh(mean(grad(w, x))))), W, X


class Steps:
    make = staticmethod(function)


def fail(how):
    raise how


raises = lambda: fail(ValueError("the data\\nis gone"))
leaves = lambda: fail(SystemExit(3))
which_devices = lambda: fail(ValueError(f"on {jax.config.jax_platforms}"))
stops = lambda: fail(KeyboardInterrupt())
returns_nothing = lambda: None
returns_no_step = lambda: (3, W)
fails_in_the_step = lambda: ((lambda w: w.nothing), W)


def needs_more(size):
    return function()


number = 3
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


def process(folder: Path, *words: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """As pip's script starts it."""
    return command.process(folder, *words, script=folder.parent / "bin" / "crossshard", **kwargs)


@pytest.fixture
def run(command: Command, folder: Path) -> Command:
    """The command in the user's folder, in this interpreter."""
    return command.inside(folder)


def inspected(run: Command, name: str, *options: str) -> Ended:
    return run("inspect", f"mine.train:{name}", "--devices", "8", *options)


def test_a_table_from_a_process_with_nothing_set(folder):
    words = ["--devices", "8", "--parameters", str(BYTES)]
    done = process(folder, "inspect", "mine.train:function", *words)
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


@pytest.mark.parametrize(
    "name", ["jitted", "lowered", "compiled", "train_step", "Steps.make"]
)  # and "function", above
def test_all_that_a_factory_may_return(run, name):
    named = [] if name == "train_step" else ["--parameters", str(BYTES)]
    done = inspected(run, name, "--json", *named)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert (read["devices"], read["shards"], read["parameter_bytes"]) == (8, 8, BYTES)
    assert read["ratio"] == pytest.approx(1, abs=0.01)
    # A step tells them.
    assert read["parameters"] == {"f32" if name == "train_step" else "unknown": BYTES}


@pytest.mark.deep
def test_virtual_devices_stand_before_accelerators(folder):
    words = ["inspect", "mine.train:which_devices", "--devices", "8"]
    said = [process(folder, *words, platforms=each).stderr for each in ("", "cpu,cuda")]
    assert ["raised: ValueError: on cpu (" in each for each in said] == [True, False]
    # What the user has set stays.
    assert "on cpu,cuda (" in said[1]


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_the_keys_of_the_json_are_those_that_are_documented(run):
    named = ["--parameters", str(BYTES)]
    read = json.loads(inspected(run, "function", "--json", *named).stdout)
    assert read["parameters"] == {"unknown": BYTES}
    keys = keys_of({**read, "parameters": {}})
    assert (read["bytes_sent"], read["lower_bound"]) == (SENT, SENT)
    rows = DOCS.read_text().partition("## JSON")[2]
    (table,) = re.findall(r"^\| key .*\Z", rows, re.DOTALL | re.MULTILINE)
    first, said = zip(*(row.split("|")[1:3] for row in table.splitlines()[2:]), strict=True)
    documented = {*re.findall("`([a-z_]+)`", "".join(first))}
    inner = set("dtype dimensions argument output temp alias peak".split())
    assert inner <= {*re.findall("`([a-z_]+)`", "".join(said))}
    assert keys == documented | inner


def test_help_says_how_it_is_used_and_how_it_ends(run):
    done = run("inspect", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("(step, args...)", "Exit codes: 0 success; 1 ", "all-reduce, reduce-scatter"):
        assert part in done.stdout
    options = re.findall("^  (?:-., )?(--[a-z-]+)", done.stdout, re.MULTILINE)
    assert options == [
        "--help", "--json", "--devices", "--parameters", "--axis-name", "--max-bytes-ratio",
        "--forbid", "--min-hidden",
    ]  # fmt: skip
    assert all(f"`{option}" in DOCS.read_text() for option in options[1:])
    assert "inspect" in run("--help").stdout
    assert run("--version").stdout == f"crossshard {crossshard.__version__}\n"


KEPT = {
    f"placed --max-bytes-ratio 1 --parameters {BYTES} --axis-name s",
    f"twice --max-bytes-ratio 2 --forbid all-gather --parameters {BYTES}",
    "train_step --max-bytes-ratio 1",
    "jitted --min-hidden all-gather=1",
}
BROKEN = {
    f"twice --max-bytes-ratio 1 --parameters {BYTES}": "sends 2.000 times the lower bound, but",
    "jitted --forbid all-gather --forbid all-reduce": "has forbidden collectives, all-reduce.",
    "jitted --min-hidden 0.5": "sends 0.0% of its bytes behind matrix products",
    "jitted --min-hidden all-gather=1 --min-hidden all-reduce=0.85": "at least 85.0% must be",
    "jitted --max-bytes-ratio 1": "its parameters are unknown",
}


@pytest.mark.parametrize("words", [*sorted(KEPT), *BROKEN])
def test_contracts(run, words):
    done = inspected(run, *words.split())
    faults = [line for line in done.stderr.splitlines() if line.startswith("crossshard: ")]
    assert done.returncode == len(faults) == (words in BROKEN), done.stderr
    assert "each of 8 devices sends" in done.stdout
    assert BROKEN.get(words, "") in "".join(faults)


BAD = {
    "": "COMMAND",
    "inspekt": "'inspekt'.*inspect",
    "inspect": "package.module:factory",
    "inspect mine.train": "package.module:factory.*got 'mine.train'",
    "inspect mine/train.py:jitted": "package.module:factory.*got 'mine/train.py:jitted'",
    "inspect train.py:jitted": "package.module:factory.*got 'train.py:jitted'",
    "inspect mine.train:jitted --jsn": "--jsn",
    "inspect mine.train:jitted --devices many": "--devices.*'many'",
    "inspect mine.train:jitted --devices 0": "0",
    "inspect mine.train:jitted --parameters 1.5": "--parameters.*'1.5'",
    "inspect mine.train:jitted --parameters 0": "0 bytes",
    "inspect mine.train:placed --devices 8 --axis-name t": "axes of the program's mesh, s; .*'t'",
    "inspect mine.train:jitted --max-bytes-ratio -1": "max_bytes_ratio.*-1",
    "inspect mine.train:jitted --max-bytes-ratio nan": "max_bytes_ratio.*nan",
    "inspect mine.train:jitted --forbid allreduce": "all-reduce, .*got 'allreduce'",
    "inspect mine.train:jitted --min-hidden most": "--min-hidden.*'most'",
    "inspect mine.train:jitted --min-hidden allreduce=1": "all-reduce, .*got 'allreduce'",
    "inspect nothing.here:make": r"cannot be imported in /.*here: .*No module named 'nothing'",
    "inspect mine.nothing:make": r"No module named 'mine\.nothing'",
    "inspect mine.broken:make": r"mine\.broken.*No module named 'not_installed' .*broken\.py:2\)",
    "inspect mine.misspelt:make": r"mine\.misspelt:make cannot be .*: SyntaxError.*line 1",
    "inspect mine.train:jited": r"'mine\.train' has no attribute 'jited'",
    "inspect mine.train:Steps.take": r"'Steps' has no attribute 'take'",
    "inspect mine.train:number": "must be a function without arguments; got int",
    "inspect mine.train:raises": r"ValueError: the data is gone \(/.*/mine/train\.py:\d+\)",
    "inspect mine.train:leaves": r"mine\.train:leaves raised: SystemExit: 3",
    "inspect mine.train:needs_more": r"raised: TypeError: needs_more\(\).*'size'",
    "inspect mine.train:returns_nothing": r"returned NoneType; it must return \(step, args…\)",
    "inspect mine.train:returns_no_step": "A step is a function.*got int",
    "inspect mine.train:fails_in_the_step": r"cannot be lowered: .*nothing \(/.*train\.py:\d+\)",
}


def check_refused(done: Any, why: str) -> None:
    said = done.stderr.replace("this is not part of the report\n", "")
    assert (done.returncode, done.stdout) == (2, ""), said
    assert said.startswith("crossshard: ")
    assert said.count("\n") == 1
    assert re.search(why, said), said


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_be_done_is_one_line_and_two(run, words):
    check_refused(run(*words.split()), BAD[words])


@pytest.mark.deep
def test_where_there_are_too_few_devices_the_users_line_is_named(folder):
    done = process(folder, "inspect", "mine.train:jitted")
    check_refused(done, r"raised: .*8.*\(/.*train\.py:\d+\)")


def test_ctrl_c_ends_it_quietly(run):
    done = inspected(run, "stops")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.deep
def test_output_that_nobody_reads_or_that_has_no_room(folder):
    words = ["inspect", "mine.train:jitted", "--devices", "8"]
    kept = {"capture_output": False, "stderr": subprocess.PIPE}
    full = Path("/dev/full")
    if full.exists():
        with full.open("w") as stdout:
            done = process(folder, *words, stdout=stdout, **kept)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].endswith("No space left on device.")
        assert "Traceback" not in done.stderr
    read, written = os.pipe()
    os.close(read)
    done = process(folder, *words, "--json", stdout=written, **kept)
    os.close(written)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr


def test_the_page_about_it_runs(folder, run):
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


@pytest.mark.deep
def test_it_is_a_module_too(folder):
    done = command.process(folder, "--version")
    assert done.stdout == f"crossshard {crossshard.__version__}\n"
