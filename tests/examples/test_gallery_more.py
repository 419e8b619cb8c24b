"""The gallery: each program runs, asserts what it claims, and prints what its page shows."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import optax
import pytest

import crossshard
from tests.test_docs import ROOT, blocks

NAMES = ("lora", "experts", "quarantine")
PAGES = ROOT / "docs" / "gallery"
FOLDER = ROOT / "examples" / "gallery"
# What tests/conftest.py says of devices.
OF_TESTS = ("XLA_FLAGS", "NPROC")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed_on_page(name: str) -> str:
    return blocks(PAGES / f"{name}.md", "text")[0].strip()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines() if line]


def is_rounding(word: str) -> bool:
    return re.fullmatch(r"\de-\d\d", word) is not None and float(word) < 1e-4


def assert_alike(found: str, shown: str) -> None:
    """Equal but for what rounding changes: small differences, and the last digits of a loss."""
    for one, other in zip(rows(found), rows(shown), strict=True):
        for word, expected in zip(one, other, strict=True):
            if is_rounding(expected):
                assert is_rounding(word)
            elif re.fullmatch(r"\d\.\d+|\de-\d\d", expected):
                assert float(word) == pytest.approx(float(expected), rel=0.1, abs=2e-4)
            else:
                assert word == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_parts_of_its_program(name: str):
    page, code = PAGES / f"{name}.md", (FOLDER / f"{name}.py").read_text()
    shown = [block.strip("\n") for block in blocks(page, "python")]
    assert shown
    assert all(block in code or textwrap.indent(block, "    ") in code for block in shown)
    assert sum(block.count("\n") + 1 for block in shown) <= 30
    assert f"(../../examples/gallery/{name}.py)" in page.read_text()
    assert code.count("\n") <= 110


def few(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each table one part, with plain SGD."""
    monkeypatch.setattr(module, "OPTIMIZERS", {"sgd": module.OPTIMIZERS["sgd"]})
    if module.__name__ == "gallery_lora":
        monkeypatch.setattr(module, "TRAINED", {"LoRA": module.TRAINED["LoRA"]})
    if module.__name__ == "gallery_experts":
        monkeypatch.setattr(module, "MESHES", [(2, 4)])


@pytest.mark.parametrize("name", NAMES)
def test_a_program_does_what_it_claims_in_a_few_steps(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    module = load(name)
    few(module, monkeypatch)
    module.main(steps=6)
    masked = lambda text: {re.sub(r"nan|\d\.\d+|\de-\d\d|\b\d+\b(?!,)", "#", row) for row in text}
    lines = lambda text: masked(" ".join(row) for row in rows(text))
    assert lines(capsys.readouterr().out) <= lines(printed_on_page(name))


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_a_program_prints_what_its_page_shows(name: str, tmp_path: Path):
    options = [] if name == "experts" else ["--picture", f"{name}.svg"]
    # Nothing is set that a reader would not have set.
    environment = {key: value for key, value in os.environ.items() if key not in OF_TESTS}
    environment["PYTHONPATH"] = str(Path(crossshard.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Warning" not in ran.stderr
    assert_alike(re.sub(r"wrote .*\n", "", ran.stdout), printed_on_page(name))
    for picture in {path.name for path in PAGES.glob(f"{name}.svg")}:
        assert (tmp_path / picture).read_text().startswith("<?xml")
        assert f"]({picture})" in (PAGES / f"{name}.md").read_text()


def test_the_balance_of_experts_is_refused_where_nothing_says_over_which_rows():
    module = load("experts")
    step = crossshard.make_train_step(module.loss_fn, optax.sgd(0.1), num_shards=8)
    with pytest.raises(crossshard.errors.LossError) as error:
        step(step.init(module.initial_params()), module.data(0))
    shown = " ".join(blocks(PAGES / "experts.md", "text")[1].split())
    before, after = shown.removeprefix("LossError: ").split("…")
    assert str(error.value).startswith(before)
    assert str(error.value).endswith(after)


def scaled(train: Callable[..., Any]) -> Callable[..., Any]:
    """The same training with a gradient that is 1 % too large."""

    def with_another_scale(*args: Any) -> Any:
        larger = [optax.chain(optax.scale(1.01), x) if is_optimizer(x) else x for x in args]
        return train(*larger)

    return with_another_scale


def is_optimizer(value: Any) -> bool:
    return isinstance(value, optax.GradientTransformation)


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_a_program_sees_a_gradient_of_another_scale(name: str, monkeypatch: pytest.MonkeyPatch):
    module = load(name)
    few(module, monkeypatch)
    monkeypatch.setattr(module, "train_on_one_device", scaled(module.train_on_one_device))
    with pytest.raises(AssertionError):
        module.main(steps=20)
