# %% [markdown]
"""A notebook for Kaggle's eight TPU chips, for Colab, and for any machine: a step on all devices.

In a clone, `make notebook` writes it to `build/notebook`, with the wheel that it installs. Import
the notebook, and upload the wheel: on Kaggle as a dataset, on Colab into the folder of files.
"""

# %% [markdown]
"""## Install

Say what the notebook runs on: `"tpu"`, `"cuda12"`, `"cuda13"`, or `""` for CPUs. It is the JAX
that is installed with crossshard. If JAX was imported before, restart the session after this cell.
"""

# %%
import importlib.util
import subprocess
import sys
from pathlib import Path

EXTRA = "tpu"

if importlib.util.find_spec("crossshard") is None:
    places = [Path(place) for place in ("/kaggle/input", "/content", ".") if Path(place).is_dir()]
    wheels = [wheel for place in places for wheel in place.rglob("crossshard-*.whl")]
    if not wheels:
        raise FileNotFoundError("There is no crossshard-….whl: upload that of build/notebook.")
    what = f"{wheels[0]}[{EXTRA}]" if EXTRA else str(wheels[0])
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", what], check=True)
    importlib.invalidate_caches()

# %% [markdown]
"""## Devices

A TPU v5e-8 has eight chips, and each is a shard. Where there is neither GPU nor TPU, this makes
eight virtual devices of the CPU, to try the same code.
"""

# %%
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)
print(crossshard.doctor(sizes=[1_000_000]))

# %% [markdown]
"""## The step

The loss is written for one device, and is a mean over rows. The batch is the global one: 512 rows,
64 for each of eight shards.
"""


# %%
def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


x = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
batch = {"x": x, "y": np.sin(x[:, 0]) + x[:, 1] * x[:, 2] / 4}
keys = jax.random.split(jax.random.key(0))
params = {
    "in": jax.random.normal(keys[0], (16, 256)) / 4,
    "out": jax.random.normal(keys[1], (256,)) / 16,
}

step = crossshard.make_train_step(loss_fn, optax.adam(3e-3), weight_update="sharded")
state = step.init(params)
for number in range(101):
    state, metrics = step(state, batch)
    if number % 25 == 0:
        print(f"step {number:3}   loss {metrics['loss']:.4f}")
print(step.describe())

# %% [markdown]
"""## Proof

`verify` takes the same step with plain SGD on all devices and on one, and compares each parameter.
It needs two devices or more.
"""

# %%
if jax.device_count() > 1:
    found = crossshard.verify(step, params, batch)
    print(found)
    assert found.ok

# %% [markdown]
"""## A checkpoint

Here it is in a temporary folder, which goes with the session. To keep it, name a folder that stays.
"""

# %%
folder = tempfile.mkdtemp()
with crossshard.Checkpoints(folder, step) as checkpoints:
    checkpoints.save(state, data={"step": number})

with crossshard.Checkpoints(folder, step) as checkpoints:
    again, data = checkpoints.restore_latest(step.abstract_init(params))

next_state, next_metrics = step(state, batch)
again, again_metrics = step(again, batch)
same = all(map(np.array_equal, jax.tree.leaves(next_state.params), jax.tree.leaves(again.params)))
print(f"after step {data['step']}, the same next step from the checkpoint: {same}")
