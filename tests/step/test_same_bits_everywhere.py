"""The same bits at any number of shards, as XLA compiles for users: in processes of their own."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processes import join, run_processes

pytestmark = pytest.mark.deep

ROWS, STEPS = 48, 12
OPTIMIZERS = {
    "sgd": 0.05,
    "adamw": 1e-2,
    "lamb": 1e-2,
    "adafactor": 1e-2,
    "muon of layers, clipped": 1e-2,
}
WAYS = [{"weight_update": "replicated"}, {"weight_update": "sharded"}, {"params": "sharded"}]
# The options of steps that are to have the same bits, by a name.
OPTIONS: dict[str, dict[str, Any]] = {
    "scaled": {"loss_scale": "dynamic", "nonfinite": "skip"},
    "averaged": {"ema": 0.9, "weight": "w", "accumulate_steps": 2},
    "masters": {"master_dtype": "float32"},
    "keys_of_rows": {"rng_per": "row"},
}


# In the processes.


def optimizer_of(name: str) -> Any:
    import jax
    import optax

    rate = OPTIMIZERS[name]
    if name == "muon of layers, clipped":
        of = lambda x: optax.contrib.MuonDimensionNumbers((x.ndim - 2,), (x.ndim - 1,))
        matrices = lambda params: jax.tree.map(lambda x: of(x) if x.ndim > 1 else None, params)
        muon = optax.contrib.muon(rate, muon_weight_dimension_numbers=matrices)
        clips = [optax.clip_by_global_norm(norm) for norm in (0.5, 0.01)]
        return optax.chain(clips[0], muon, clips[1])
    return getattr(optax, name)(rate)


def params_of(dtype: Any = "float32") -> Any:
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"a": (32, 48), "b": (48,), "c": (48, 64), "d": (64,)}
    # Layers that no number of shards but 2 divides, and an odd size.
    shapes |= {"e": (40, 32), "f": (6, 48, 48), "g": (1027,)}
    return {
        name: jnp.asarray(rng.normal(size=shape) * 0.2, dtype) for name, shape in shapes.items()
    }


def loss(params: Any, batch: Any, rng: Any) -> Any:
    """An embedding, products, what is not linear, and noise of one key or of a key for each row."""
    import jax
    import jax.numpy as jnp

    x = params["e"][batch["t"]].mean(1) + batch["x"]
    noise = (lambda key: jax.random.bernoulli(key, 0.9, x.shape[-1:])) if rng.shape else None
    kept = jax.vmap(noise)(rng) if noise else jax.random.bernoulli(rng, 0.9, x.shape)
    h = jnp.tanh(jnp.where(kept, x, 0) @ params["a"] + params["b"])
    h = h * jax.nn.sigmoid(h @ params["c"] @ params["c"].T)
    h, _ = jax.lax.scan(lambda h, w: (h + 0.1 * jnp.tanh(h @ w), None), h, params["f"])
    h = h * (1 + jnp.sin(params["g"]).mean())
    costs = (jax.nn.gelu(h @ params["c"]) @ params["d"] - batch["y"]) ** 2
    return (costs * batch["w"]).sum() / batch["w"].sum() if "w" in batch else costs.mean()


def batches(*, weighted: bool, steps: int = STEPS) -> Iterator[Any]:
    import numpy as np

    rng = np.random.default_rng(2)
    for _ in range(steps):
        batch = {
            "x": rng.normal(size=(ROWS, 32)).astype(np.float32),
            "t": rng.integers(0, 40, (ROWS, 5)),
            "y": rng.normal(size=ROWS).astype(np.float32),
        }
        yield batch | {"w": (rng.random(ROWS) < 0.7).astype(np.float32)} if weighted else batch


def sha(*trees: Any) -> str:
    """The SHA-256 of the bytes of all arrays, which every device here has whole."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        found.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return found.hexdigest()


def trained(shards: int, virtual: int | None, optimizer: str, **options: Any) -> str:
    """The bits of parameters, their averages and losses after some steps on so many shards."""
    import optax

    import crossshard

    if virtual is not None:
        options["virtual_shards"] = virtual
    step = crossshard.make_train_step(loss, optimizer_of(optimizer), num_shards=shards, **options)
    params = params_of("bfloat16" if "master_dtype" in options else "float32")
    state, losses = step.init(params), []
    for batch in batches(weighted="weight" in options):
        own = {name: x[step.own_rows(ROWS)] for name, x in batch.items()}
        state, metrics = step(state, own)
        losses.append(metrics["loss"])
    whole = step.unshard(state)
    kept = [optax.tree.get(whole.opt_state, name) for name in ("ema", "masters")]
    return sha(whole.params, losses, [each for each in kept if each is not None])


def main(process: int, port: int, out: str, devices: str, calls: str, flags: str = "") -> None:
    """Write down what each call of a function here returns."""
    import jax

    # As for users, and not as tests compile.
    os.environ["XLA_FLAGS"] = flags
    jax.config.update("jax_disable_most_optimizations", False)
    given = json.loads(calls)
    join(process, port, given["processes"], int(devices))
    found = [globals()[name](*args, **options) for name, args, options in given["calls"]]
    Path(out).write_text(json.dumps(found))


# In the tests.

Call = tuple[str, Sequence[Any], dict[str, Any]]


def bits(folder: Path, calls: Sequence[Call], processes: int = 1, devices: int = 8) -> list[str]:
    folder.mkdir(exist_ok=True)
    given = json.dumps({"processes": processes, "calls": calls})
    found = run_processes(
        "step.test_same_bits_everywhere",
        folder,
        devices,
        given,
        processes=processes,
        patience=3000,
    )
    assert all(each == found[0] for each in found)
    return found[0]


# Numbers of shards for each number of virtual ones: that divide it, and that do not.
NUMBERS = {8: [1, 2, 3, 8], 12: [1, 3, 4, 5, 8]}


def one_for_each(folder: Path, virtual: int, ways: Sequence[dict[str, Any]], name: str) -> None:
    """Most shards in all ways, and each other number in one of them, have the bits of one shard."""
    one, *several, most = NUMBERS[virtual]
    # In which way a number is tried turns with the optimizer.
    turned = [ways[(len(name) + place) % len(ways)] for place in range(len(several))]
    runs = [(one, ways[0]), *zip(several, turned, strict=True), *((most, way) for way in ways)]
    calls = [("trained", [number, virtual, name], way) for number, way in runs]
    found = bits(folder, calls)
    assert len(set(found)) == 1, [
        (call[1:], each[:8]) for call, each in zip(calls, found, strict=True)
    ]


@pytest.mark.parametrize(("name", "virtual"), [*((name, 8) for name in OPTIMIZERS), ("sgd", 12)])
def test_an_optimizer_has_the_same_bits(name: str, virtual: int, tmp_path: Path):
    one_for_each(tmp_path, virtual, WAYS, name)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_has_the_same_bits(option: str, tmp_path: Path):
    ways = [OPTIONS[option] | {"weight_update": each} for each in ("replicated", "sharded")]
    one_for_each(tmp_path, 8, ways, "adamw")


def test_processes_have_the_same_bits(tmp_path: Path):
    every = []
    for processes, devices, way in ((1, 1, 0), (2, 2, 1), (3, 1, 0), (4, 1, 1)):
        options = WAYS[way] | {"accumulate_steps": 2}
        call = "trained", [processes * devices, 8, "lamb"], options
        every += bits(tmp_path / f"{processes}", [call], processes, devices)
    assert len(set(every)) == 1


def test_without_virtual_shards_the_bits_differ(tmp_path: Path):
    found = bits(
        tmp_path, [("trained", [n, None, "sgd"], {"rng_per": "row"}) for n in (1, 2, 4, 8)]
    )
    assert len(set(found)) > 2
