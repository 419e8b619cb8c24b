"""What the documentation shows is run: the docstrings' examples, and the README's."""

import doctest
import importlib
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

import crossshard

README = (Path(__file__).parent.parent / "README.md").read_text()
MODULES = [
    module.name
    for module in pkgutil.walk_packages(crossshard.__path__, "crossshard.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", README, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("\n", 1)[0][2:])
def test_examples_in_the_readme(code: str):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_the_readme_shows_both_idioms_and_both_commands():
    assert len(blocks("python")) >= 2
    first_screen = "\n".join(README.splitlines()[:40])
    assert "make demo" in first_screen
    assert "make test" in first_screen
