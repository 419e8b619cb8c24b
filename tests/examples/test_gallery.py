"""The gallery: each example trains as one device does, and its page shows its code and table."""

import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from crossshard.errors import ArgumentError
from tests.examples.test_examples import dense, params_of, run
from tests.examples.test_examples import train as train_one_device
from tests.quick import deep_but
from tests.test_docs import ROOT, blocks

FOLDER, PAGES = ROOT / "examples" / "gallery", ROOT / "docs" / "gallery"
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
SGD = optax.sgd(0.05)
STEPS = 4


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What each computes, with JAX and Optax alone: the parameters found, and those of one device.


def nnx_on_one_device(loss_fn: Any, model: Any, optimizer: Any, batches: Any) -> Any:
    """The parameters of an NNX module that one device trains."""
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, others: Any, batch: Any) -> Any:
        merged = nnx.merge(graph, params, jax.tree.map(lambda x: x, others))
        value = loss_fn(merged, batch)
        return value, nnx.split(merged, nnx.Param, ...)[2]

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    state = optimizer.init(params)
    for batch in batches:
        gradients, others = gradient(params, others, batch)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def batch_norm(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    batches = [module.data(module.ROWS, seed) for seed in range(1, STEPS + 1)]
    model = module.Network(nnx.Rngs(0))
    found, _, _ = module.train(8, "batch", optimizer, STEPS)
    return found, nnx_on_one_device(module.loss_fn, model, optimizer, batches)


def diloco(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    module.EVERY = 2
    found, _, _ = module.train(STEPS, optimizer, sync_every=2, outer_optimizer=module.OUTER)
    return found, module.by_hand(STEPS, optimizer)  # this is JAX and Optax alone


def experts(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    loss = lambda params, batch: module.loss_fn(params, batch, 0.1)[0]
    batches = [module.data(seed) for seed in range(STEPS)]
    wanted = train_one_device(jax.grad(loss), module.initial_params(), optimizer, batches)
    ((found, _), held) = module.train(0.1, (2, 4), optimizer, STEPS)
    on_four = sum(wanted[name].nbytes for name in ("up", "down")) // 4
    assert held == wanted["gate"].nbytes + on_four
    return found, wanted


def lora(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    batch = module.data(np.sin)
    base = params_of(module.Network(nnx.Rngs(0)))

    def loss(adapters: Any, batch: Any) -> Any:
        x = batch["x"]
        for place, layer in base["layers"].items():
            low = adapters[place]["lora_a"] @ adapters[place]["lora_b"]
            x = dense({**layer, "kernel": layer["kernel"] + low}, x)
            x = x if place == 2 else jnp.tanh(x)
        return ((x - batch["y"]) ** 2).mean()

    start = {place: layer["lora"] for place, layer in base["layers"].items()}
    trained = train_one_device(jax.grad(loss), start, optimizer, [batch] * STEPS)
    model = module.Network(nnx.Rngs(0))
    found, _, _ = module.train(model, batch, nnx.LoRAParam, optimizer, STEPS)
    layers = {place: {**layer, "lora": trained[place]} for place, layer in base["layers"].items()}
    return params_of(found), {"layers": layers}


def quarantine(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    module.BAD_STEPS = (1, 2)
    wanted = module.one_device(optimizer, STEPS)  # this is JAX and Optax alone
    return module.train("quarantine", optimizer, STEPS)[0], wanted


def same_bits(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    wanted = module.one_device(optimizer, STEPS)  # this is JAX and Optax alone
    return module.train([8, 2], 8, optimizer, STEPS)[-1], wanted


def small(module: ModuleType, damaged: int = 1) -> tuple[Any, Any]:
    """Make the whole run small, and return its rows: to train on, and held out."""
    module.LAYERS, module.WIDTH, module.HEADS, module.CONTEXT, module.ROWS = 1, 8, 2, 8, 8
    module.EVERY, module.DAMAGED = 2, damaged
    text = np.random.default_rng(0).integers(97, 101, 2000, np.uint8)
    return module.rows(text[:-100]), module.rows(text[-100:])


def whole_run(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    training, held_out = small(module)
    module.DROPOUT, module.optimizer = 0, lambda steps: optimizer
    batches = list(itertools.islice(module.batches(training), STEPS + 1))
    del batches[module.DAMAGED]

    def loss(model: Any, batch: Any) -> Any:
        nats = module.costs(model, batch, training=True)["nats"]
        return nats.mean()  # all bytes of a row count

    wanted = nnx_on_one_device(loss, module.Transformer(nnx.Rngs(0)), optimizer, batches)
    with tempfile.TemporaryDirectory() as folder:
        step, state = module.train(Path(folder), STEPS, training, held_out)
    assert int(state.step) == STEPS
    model = step.model(state)
    model.eval()
    logits = np.asarray(model(held_out["read"]), np.float64).reshape(-1, 256)[:100]  # all bytes
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    bits = -np.log2(chances[range(100), held_out["wanted"].ravel()[:100]]).mean()
    np.testing.assert_allclose(module.bits_per_byte(step, state, held_out), bits, rtol=1e-5)
    return nnx.state(model, nnx.Param), wanted


EVERY = (batch_norm, diloco, experts, lora, quarantine, same_bits, whole_run)
CASES = {each.__name__: each for each in EVERY}
QUICK = ["lora"]


@pytest.mark.parametrize("name", deep_but(QUICK, CASES))
def test_eight_shards_train_as_one_device_does(name: str):
    found, wanted = CASES[name](load(name), SGD)
    pairs = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def test_a_poisoned_shard_is_named(capsys: pytest.CaptureFixture[str]):
    module = load("quarantine")
    module.BAD_STEPS = (1,)
    _, losses = module.train("quarantine", SGD, 2)
    assert np.isfinite(losses).all()
    assert (
        "step 1: the gradient of `first/bias` is not finite on shard 5" in capsys.readouterr().out
    )


def lines_of(folder: Path) -> list[dict[str, float]]:
    """What a run has logged of each step, in the last line of it, without how fast it was."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    of_steps = {line["step"]: line for line in lines}
    per_second = lambda name: name.endswith("_per_second")
    return [{k: v for k, v in x.items() if not per_second(k)} for x in of_steps.values()]


def assert_goes_on(module: ModuleType, text: Any, folder: Path, steps: int) -> None:
    """The run in this folder goes on, and ends as one that never ended before."""
    other = folder / "other"
    other.mkdir()
    ends = [module.train(each, steps, *text)[1] for each in (folder, other)]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    bits = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes()
    one, two = ([bits(x) for x in jax.tree.leaves(end)] for end in ends)
    assert one == two
    assert lines_of(folder) == lines_of(other)
    assert [line["step"] for line in lines_of(other)] == list(range(2, steps + 1, module.EVERY))


class Bigrams(nnx.Module):
    """A model that is compiled sooner than a transformer."""

    def __init__(self, rngs: nnx.Rngs):
        self.bytes = nnx.Embed(256, 256, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, read: Any) -> Any:
        return self.drop(self.bytes(read.astype(jnp.int32)))


@pytest.mark.deep
def test_a_run_that_ends_in_its_midst_goes_on_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    module = load("whole_run")
    text, calls, update = small(module, damaged=20), itertools.count(1), module.Meter.update

    def ends(meter: Any, batch: Any, metrics: Any) -> None:
        if next(calls) == 4:
            raise KeyboardInterrupt
        update(meter, batch, metrics)

    # One model and one step for all runs, to compile them once; of two shards, to take less time.
    make, model = module.crossshard.make_train_step, Bigrams(nnx.Rngs(0))
    made = make(
        module.loss_fn, module.optimizer(4), num_shards=2, nonfinite="skip", metrics=("grad_norm",)
    )
    monkeypatch.setattr(module.crossshard, "make_train_step", lambda *args, **options: made)
    monkeypatch.setattr(module, "Transformer", lambda rngs: model)
    with monkeypatch.context() as patch:
        patch.setattr(module.Meter, "update", ends)
        with pytest.raises(KeyboardInterrupt):
            module.train(tmp_path, 4, *text)
    assert_goes_on(module, text, tmp_path, 4)
    assert "goes on from step 2\n" in capsys.readouterr().out


KILLED = """
import sys
from pathlib import Path
from tests.examples.test_gallery import load, small

module = load("whole_run")
module.train(Path(sys.argv[1]), 40, *small(module))
"""


@pytest.mark.deep
def test_a_run_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path):
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    running = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    while not running.stdout.readline().startswith("step 10 "):
        assert running.poll() is None
    running.kill()
    assert running.wait() == -signal.SIGKILL
    module = load("whole_run")
    assert_goes_on(module, small(module), tmp_path, 40)


@pytest.mark.deep
def test_a_run_that_no_longer_improves_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    module = load("whole_run")
    text = small(module)
    module.RATE, module.EVERY, module.PATIENCE = 0, 1, 3  # nothing is learnt
    for _ in range(2):  # again it takes no step
        step, state = module.train(tmp_path, 20, *text)
        assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]
    printed = " ".join(capsys.readouterr().out.split())
    assert "from row 5 of the batch it came in with batch['counts'][5, 7], which is nan" in printed
    for found, wanted in zip(
        jax.tree.leaves(nnx.state(step.model(state), nnx.Param)),
        jax.tree.leaves(nnx.state(module.Transformer(nnx.Rngs(0)), nnx.Param)),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)


def test_its_rows_have_each_byte_once():
    module = load("whole_run")
    module.CONTEXT = 4
    found = module.rows(np.frombuffer(b"abcdef", np.uint8))
    assert found["wanted"].tobytes() == b"abcdef\n\n"
    assert found["read"].tobytes() == b"\nabcdef\n"
    assert found["counts"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


@pytest.mark.deep
def test_a_plan_for_the_devices_that_are_here(capsys: pytest.CaptureFixture[str]):
    sizes = {"layers": 2, "width": 128, "words": 256}
    (plan,) = load("plan_a_pod").main(["cpu:2"], context=16, **sizes)
    assert plan.parameters == 2 * 12 * 128**2 + 256 * 128
    assert plan.candidates[-1].memory.parameters == 4 * plan.parameters // 2
    printed = capsys.readouterr().out
    assert printed.count("\ncpu:2") == 3  # the three ways
    assert "params sharded" in printed


@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is installed")
def test_without_the_compiler_for_tpus_it_is_said_how_to_install_it():
    with pytest.raises(ArgumentError, match=r'pip install "crossshard\[tpu\]"'):
        load("plan_a_pod").main()


# The pages.


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_a_part_of_the_file(name: str):
    page, file = PAGES / f"{name}.md", FOLDER / f"{name}.py"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert code in file.read_text()
    assert 10 <= len(code.splitlines()) <= 25
    assert len(file.read_text().splitlines()) <= (200 if name == "whole_run" else 110)
    assert f"({name}.py)" not in page.read_text()
    assert f"](../../examples/gallery/{name}.py)" in page.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_a_card_and_a_small_picture(name: str):
    page, index = (PAGES / f"{name}.md").read_text(), (PAGES / "index.md").read_text()
    title = page.splitlines()[0].removeprefix("# ")
    card = index.split(f"\n## [{title}]({name}.md)\n")[1].split("\n## ")[0]
    picture = PAGES / f"{name}.svg"
    if name == "plan_a_pod":
        (shown,), (table,) = (
            blocks(PAGES / f"{name}.md", "text"),
            re.findall(r"```text\n(.*?)```", card, re.DOTALL),
        )
        assert shown.lstrip("\n").startswith(table)
    else:
        (alternative,) = re.findall(rf"^!\[(.+)\]\({picture.name}\)$", page, re.MULTILINE)
        assert f"[![{alternative}]({picture.name})]({name}.md)" in card
        assert picture.stat().st_size <= 60_000


NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def like(printed: str, shown: str) -> bool:
    """Whether two texts are the same but for blanks and the last digits of numbers."""
    words = lambda text: NUMBER.sub("#", " ".join(text.split()))
    numbers = lambda text: [float(each.replace(",", "")) for each in NUMBER.findall(text)]
    return words(printed) == words(shown) and np.allclose(
        numbers(printed), numbers(shown), rtol=0.05, atol=0.002
    )


def steady(text: str) -> str:
    """A text without how fast it went, and without what a model has written at its end."""
    text, _, _ = text.partition("the model writes:\n")
    return re.sub(r"(_per_second) \S+", r"\1", text)


def test_texts_that_differ_are_told_apart():
    assert like("loss  0.5469\n", "loss 0.5461")
    assert not like("loss 0.60", "loss 0.5461")
    assert not like("loss 0.5461", "lost 0.5461")


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_what_the_file_prints(name: str, tmp_path: Path):
    if name == "plan_a_pod" and not HAS_LIBTPU:
        pytest.skip("libtpu is not installed")
    (shown,) = blocks(PAGES / f"{name}.md", "text")
    draws = name != "plan_a_pod"
    words = ["_picture.py", name, "picture.svg"] if draws else [f"{name}.py"]
    printed = run([str(FOLDER / words[0]), *words[1:]], tmp_path, timeout=900)
    printed = steady(printed.removesuffix("wrote picture.svg\n"))
    assert like(printed, steady(shown)), printed
    assert not draws or (tmp_path / "picture.svg").stat().st_size <= 60_000
