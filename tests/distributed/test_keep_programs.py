"""What one start has compiled, the next one takes: for train, evaluate, save, snapshot, restore."""

import importlib.util
import json
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.restarts import Run
from crossshard.distributed import keep_programs
from crossshard.distributed.programs import variables_for
from crossshard.errors import ArgumentError, ArgumentTypeError, DistributedError
from tests.checkpoints.common import line_of, program
from tests.distributed.jobs import PATIENCE, launch

# Each start goes on from the one before, and prints how many programs it asked for, how many it
# found, and what JAX has written to the folder.
RUN = """
import collections, json, os, sys
import crossshard
from pathlib import Path
folder, launched = Path(sys.argv[1]), len(sys.argv) > 2
if launched:
    job = crossshard.distributed.initialize()
else:
    crossshard.cpu_devices(4)
    crossshard.distributed.keep_programs(folder / "programs")
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_disable_most_optimizations", False)
found = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: found.update([name.split("/")[-1]]))
loss_fn = lambda w, x: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - 1) ** 2)
params = {"up": np.ones((16, 64), np.float32), "down": np.ones((64, 4), np.float32)}
step = crossshard.make_train_step(
    loss_fn, optax.adamw(1e-3), params="sharded", nonfinite="quarantine", check_divergence=2
)
options = {"memory": folder / "memory", "memory_every": 1}
with crossshard.Checkpoints(folder / "disk", step, **options) as checkpoints:
    before = checkpoints.restore_latest(step.abstract_init(params))
    state = before[0] if before else step.init(params)
    x = np.ones((8, 16), np.float32)
    for _ in range(3):
        state, _ = step(state, x)
        checkpoints.snapshot(state)
    values = lambda w, x: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - 1) ** 2, axis=1)
    step.evaluate(state, [x], values)
    checkpoints.wait()
    if not before:
        checkpoints.save(state)
step.unshard(state)
asked, hits, misses = (
    found[name] for name in ("compile_requests_use_cache", "cache_hits", "cache_misses")
)
told = json.dumps([int(state.step), asked, hits, misses])
if launched:
    (folder / f"{state.step}-{job.process_id}").write_text(told)
    sys.exit(int(state.step) < 9)
print(told)
"""


def started(folder: Path) -> list[int]:
    running = program(RUN, folder)
    told = line_of(running)
    assert running.wait(60) == 0, running.stderr.read()
    running.communicate()
    return json.loads(told)


def test_a_start_compiles_nothing_that_another_one_has_compiled(tmp_path: Path):
    steps, asked, hits, misses = started(tmp_path)
    assert (steps, hits) == (3, 0)
    assert asked == misses > 5
    # What restores is compiled at the first restore.
    started(tmp_path)
    steps, asked, hits, misses = started(tmp_path)
    assert steps == 9
    assert (hits, misses) == (asked, 0)
    assert stat.S_IMODE((tmp_path / "programs").stat().st_mode) == 0o700


@pytest.mark.multiprocess
def test_processes_that_are_started_again_compile_nothing(tmp_path: Path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    words = "-n", 2, "--cpu-devices", 2, "--restarts", 2, "--", sys.executable
    ran = launch(*words, script, tmp_path, "launched")
    _, said = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0, said
    # Nothing is lost: each run ends when its last step has a snapshot.
    costs = re.findall(r"ended with code 1; trains again after \d+\.\d seconds, from (.*)\n", said)
    assert costs == [
        f"Checkpoint 3 in {tmp_path / 'disk'}: 0 steps were lost, of 3.",
        f"Snapshot 6 in {tmp_path / 'memory'}: 0 steps were lost, of 6.",
    ]
    first, last = (
        [json.loads((tmp_path / f"{steps}-{process}").read_text()) for process in (0, 1)]
        for steps in (3, 9)
    )
    assert first[0][2] == 0
    for _, asked, hits, misses in last:
        assert (hits, misses) == (asked, 0)


# Meshes of some of the devices, in any order, have one program.
MESHES = """
import crossshard
job = crossshard.distributed.initialize()
import collections, jax, numpy as np
found = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: found.update([name.split("/")[-1]]))
for places in ([0, 1], [1, 0], [1, 2], [2, 0], [0, 1, 2], [2, 0, 1]):
    mesh = jax.sharding.Mesh(np.array(jax.devices())[places], "x")
    own = lambda x: jax.lax.psum(x * (1 + jax.lax.axis_index("x")), "x") + jax.lax.axis_index("x")
    weighted = sum(10 * place * number for number, place in enumerate(places, 1))
    if job.process_id in places:
        rows = jax.NamedSharding(mesh, jax.P("x"))
        values = 10 * np.array(places, np.float32)
        x = jax.make_array_from_callback(values.shape, rows, lambda index: values[index])
        y = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")))(x)
        assert y.addressable_data(0)[0] == weighted + places.index(job.process_id), (places, y)
print("missed", found["compile_requests_use_cache"] - found["cache_hits"])
"""


@pytest.mark.deep
@pytest.mark.multiprocess
def test_a_program_that_devices_share_runs_on_those_of_its_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in variables_for(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    words = "-n", 3, "--cpu-devices", 1, "--", sys.executable, "-c", MESHES
    missed = []
    for _ in range(2):
        ran = launch(*words)
        said, wrong = ran.communicate(timeout=PATIENCE)
        assert ran.returncode == 0, wrong
        missed.append(sum(map(int, re.findall(r"missed (\d+)", said))))
    assert missed[0] > missed[1] == 0


# Compiled for GPUs that are not here.
FOR_GPUS = """
import sys
import crossshard, jax, jax.numpy as jnp, numpy as np, optax
from crossshard.tools.planning import topology
crossshard.distributed.keep_programs(sys.argv[1])
mesh = jax.sharding.Mesh(np.array(topology("h100:1x8").devices), "shards")
loss_fn = lambda w, x: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - 1) ** 2)
params = {"up": np.ones((17, 6501), np.float32), "down": np.ones((6501, 5), np.float32)}
guards = {"nonfinite": "quarantine", "check_divergence": 2}
step = crossshard.make_train_step(
    loss_fn, optax.adamw(1e-3), mesh=mesh, params="sharded", **guards
)
types = step.abstract_init(params)
step.lower(types, jax.ShapeDtypeStruct((8, 17), jnp.float32)).compile()
"""


@pytest.mark.deep
def test_a_step_for_gpus_has_one_name_at_each_start(tmp_path: Path):
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("JAX for CUDA is not installed")
    found = []
    for start in (1, 2):
        # What depends on the order of a set would be another program.
        environment = {**os.environ, "PYTHONHASHSEED": f"{start}"}
        command = [sys.executable, "-c", FOR_GPUS, tmp_path]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append({path.name for path in tmp_path.glob("*-cache")})
    assert found[0] == found[1]
    assert any(name.startswith("jit__run-") for name in found[0])


@pytest.mark.soak
@pytest.mark.multiprocess
def test_restarts_in_a_row_leave_the_launcher_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], soak_steps: int
):
    restarts = max(4, soak_steps // 200)
    script = tmp_path / "run.py"
    script.write_text(RUN.replace("< 9)", f"< {3 * (restarts + 1)})"))
    before = {*Path(tempfile.gettempdir()).iterdir()}
    run = Run(["--", sys.executable, script, tmp_path, "launched"], None, restarts)
    memory, handles, known = list[int](), list[int](), 0
    try:
        for _ in range(restarts):
            assert run.wait_for("trains again after", known), run.printed()
            known = next(
                place + 1
                for place, (_, line) in enumerate(run.lines)
                if place >= known and "trains again after" in line
            )
            of_launcher = Path(f"/proc/{run.process.pid}")
            pages = int((of_launcher / "statm").read_text().split()[1])
            memory.append(pages * resource.getpagesize())
            handles.append(len([*(of_launcher / "fd").iterdir()]))
        assert run.process.wait(PATIENCE) == 0, run.printed()
    finally:
        run.end()
    with capsys.disabled():
        print(f"\n{restarts} restarts: MB {[each >> 20 for each in memory]}, handles {handles}")
    assert max(handles) <= handles[0] + 2
    # What Python keeps of the first ones does not count.
    assert memory[-1] < memory[len(memory) // 2] + (2 << 20)
    left = {*Path(tempfile.gettempdir()).iterdir()} - before
    assert not [path for path in left if "crossshard" in path.name]


def test_a_folder_of_others_is_refused(tmp_path: Path):
    tmp_path.chmod(0o755)
    with pytest.raises(ArgumentError, match="chmod 700"):
        keep_programs(tmp_path)
    with pytest.raises(ArgumentTypeError, match="folder must be the path of a folder; got 3"):
        keep_programs(3)
    (tmp_path / "file").touch()
    with pytest.raises(DistributedError, match="cannot be used"):
        keep_programs(tmp_path / "file" / "within")
