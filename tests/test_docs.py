"""What the documentation says is checked: its code runs, and its links, commands and lists hold."""

import ast
import copy
import doctest
import importlib
import pickle
import pkgutil
import re
import struct
import textwrap
import tomllib
import traceback
from pathlib import Path
from typing import Any

import pytest

import crossshard
from crossshard import errors
from tests.quick import deep_but
from tools import diagrams

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
GUIDE = sorted(
    page
    for folder in (".", "concepts", "guide", "reference", "ways-in")
    for page in (ROOT / "docs" / folder).glob("*.md")
)
PAGES = [
    README,
    CONTRIBUTING,
    ROOT / "CHANGELOG.md",
    *(ROOT / ".github").rglob("*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "tests").rglob("*.md")),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = [
    module.name
    for module in pkgutil.walk_packages(crossshard.__path__, "crossshard.")
    if not module.name.endswith("__main__")
]


# Their examples compile steps several times.
SLOW = [
    *("crossshard.tools.planning", "crossshard.tools.verification.verify"),
    *("crossshard.collectives.few_bits", "crossshard.nnx.runners", "crossshard.step.train_step"),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page, each block on the lines that it has there."""
    text = page.read_text()
    found = re.finditer(rf"^( *)```{language}\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    above = lambda match: "\n" * (text[: match.start()].count("\n") + 1)
    return [above(match) + textwrap.dedent(match[2]) for match in found]


def run(page: Path, code: str, names: dict[str, Any]) -> None:
    exec(compile(code, name_of(page), "exec"), names)


# Code.


@pytest.mark.parametrize("name", deep_but(lambda name: name not in SLOW, MODULES))
def test_examples_in_docstrings(name: str):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_the_readme_needs_only_what_pip_installs_with_crossshard():
    needed = {re.split(r"\W", line)[0] for line in PROJECT["project"]["dependencies"]}
    imported = {
        (each.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
        for code in blocks(README, "python")
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for each in node.names
    }
    assert {"crossshard", "jax"} <= imported
    assert imported <= {"crossshard", *needed}


PLAN = ROOT / "docs" / "guide" / "plan.md"
# What a newcomer reads first: these run in `make test`, and all in the deep run.
FIRST_READ = [
    README,
    CONTRIBUTING,
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            *("concepts/shards", "concepts/loss", "concepts/gradients", "concepts/state"),
            "guide/optax-idiom",
        )
    ),
]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in FIRST_READ else pytest.mark.deep, id=name_of(page))
        for page in [README, *GUIDE, CONTRIBUTING]
    ],
)
def test_a_page_runs_from_top_to_bottom_and_prints_what_it_shows(
    page: Path, capsys: pytest.CaptureFixture[str]
):
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks(page, "python"):
        run(page, code, names)
    printed = " ".join(capsys.readouterr().out.split())
    for shown in blocks(page, "text"):
        parts = (re.escape(" ".join(part.split())) for part in shown.split("…"))
        assert re.search(".*".join(parts), printed), shown


# What a reader follows.


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_links_lead_somewhere():
    nowhere = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]+)?\)", page.read_text()):
            there = page.parent / target if target else page
            leads = there.exists() and (not anchor or anchor[1:] in anchors(there))
            if "://" not in target and not leads:
                nowhere.append(f"{name_of(page)}: {target}{anchor}")
    assert not nowhere


def test_no_page_has_the_marks_of_a_merge():
    assert not [
        name_of(page) for page in PAGES if re.search(r"^[<>|]{7} ", page.read_text(), re.MULTILINE)
    ]


def test_the_site_has_every_page():
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    made = {"index.md", "changelog.md", "contributing.md", "security.md"}
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(there | made)


def test_the_readme_leads_to_every_part():
    text = README.read_text()
    for page in [CONTRIBUTING, ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*/index.md")]:
        assert f"]({name_of(page)})" in text


# The changelog names what is gone.
NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]


def unknown_commands(text: str) -> set[str]:
    """The targets of make, modules, scripts and extras of a text that there are not."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    unknown = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) - targets
    for module in re.findall(r"python -m ((?:benchmarks|examples|crossshard)[\w.]*)", text):
        path = ROOT / ("src" if module.startswith("crossshard") else "") / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            unknown.add(module)
    scripts = re.findall(r"python ((?:tools|examples|benchmarks)/\S+\.py)", text)
    unknown |= {script for script in scripts if not (ROOT / script).exists()}
    extras = {
        e for each in re.findall(r"(?:crossshard|\"\.)\[([\w,]+)\]", text) for e in each.split(",")
    }
    return unknown | extras - set(PROJECT["project"]["optional-dependencies"])


def test_commands_exist():
    unknown = {name_of(page): unknown_commands(page.read_text()) for page in NOW}
    assert not {page: names for page, names in unknown.items() if names}
    assert unknown_commands('`make tset`, python -m examples.none, crossshard[none], ".[nil]"') == {
        *("tset", "examples.none", "none", "nil")
    }


def test_names_exist():
    is_known = lambda name: hasattr(crossshard, name) or f"crossshard.{name}" in MODULES
    assert not [
        f"{name_of(page)}: {name}"
        for page in NOW
        for name in re.findall(r"\bcrossshard\.(\w+)", page.read_text())
        if not is_known(name)
    ]


def test_the_first_screen_shows_what_it_is_how_it_is_installed_and_what_it_looks_like():
    screen = "\n".join(README.read_text().splitlines()[:40])
    for part in ("pip install .", "make demo", "make test", "```python", "!["):
        assert part in screen
    first = blocks(README, "python")[0].split("\n\n")[-1]
    assert len(first.strip().splitlines()) <= 6


# Lists and copies.


def test_the_reference_has_every_public_name():
    pages = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    shown = [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)]
    have = {
        id(getattr(importlib.import_module(m), n)) for m, n in (x.rsplit(".", 1) for x in shown)
    }
    modules = [
        crossshard,
        *(getattr(crossshard, name) for name in ("distributed", *crossshard._MODULES)),
    ]
    assert not [
        f"{module.__name__}.{name}"
        for module in modules
        for name in getattr(module, "__all__", ())
        if id(getattr(module, name)) not in have and not hasattr(errors, name)
    ]
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize("diagram", diagrams.DIAGRAMS, ids=lambda diagram: diagram.__name__)
def test_a_diagram_is_up_to_date_and_a_page_says_what_it_shows(diagram: Any):
    picture = diagrams.FOLDER / f"{diagram.__name__}.svg"
    assert picture.read_text(encoding="utf-8") == diagram().svg()
    alt = re.compile(rf"!\[{re.escape(diagram().words)}\]\(([^)]*)\)")
    shown = [(page, name) for page in NOW for name in alt.findall(page.read_text())]
    assert [page for page, name in shown if (page.parent / name).resolve() == picture]


def test_every_error_has_its_section_and_names_it():
    page = ROOT / "docs" / "reference" / "errors.md"
    for name in errors.__all__:
        assert name.lower() in anchors(page), name
        kind = getattr(errors, name)
        if not issubclass(kind, Warning):
            (note,) = kind("why").__notes__
            assert note == f"See crossshard's {name_of(page)}#{name.lower()}"


def test_an_error_names_its_section_once_wherever_it_goes():
    class OfAUser(errors.LossError):
        """Derived elsewhere."""

    assert OfAUser().__notes__ == errors.LossError().__notes__
    caught = errors.LossError("this", 2)
    caught.add_note("the user's own")
    for one in caught, copy.copy(caught), pickle.loads(pickle.dumps(caught)):
        assert one.args == ("this", 2)
        assert one.__notes__ == [*errors.LossError().__notes__, "the user's own"]
    assert str(errors.LossError("this")) == "this"
    try:
        try:
            raise errors.ArgumentError("inner")
        except errors.ArgumentError as error:
            raise errors.LossError("outer") from error
    except errors.LossError as error:
        printed = "".join(traceback.format_exception(error))
    last = "LossError: outer\nSee crossshard's docs/reference/errors.md#losserror\n"
    assert printed.endswith(last)
    assert printed.count("#argumenterror") == printed.count("#losserror") == 1


def test_the_stage_that_contributing_shows_is_the_one_that_is_tested():
    source = (ROOT / "examples" / "gradient_noise.py").read_text()
    assert source in [code.lstrip("\n") for code in blocks(CONTRIBUTING, "python")]


def test_the_picture_shows_what_was_recorded():
    from benchmarks.picture import PICTURE, figures, rows

    text = figures().in_words()
    assert f"![{text}]({PICTURE.name})" in (PICTURE.parent / "index.md").read_text()
    assert description_of(PICTURE) == text
    assert "\n".join(rows()) in README.read_text()


def test_the_front_picture_shows_what_was_recorded():
    from tools import front_picture

    curves = front_picture.recorded()
    assert front_picture.PICTURE.read_text(encoding="utf-8") == front_picture.draw(curves)
    alt = f"![{front_picture.in_words(curves)}]({name_of(front_picture.PICTURE)})"
    assert alt in README.read_text()
    assert front_picture.furthest(curves) < 1e-4


def description_of(png: Path) -> str:
    """What a PNG file says of itself."""
    data, place = png.read_bytes(), 8
    while place < len(data):
        (length,), kind = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + length]
        if kind == b"tEXt" and body.startswith(b"Description\0"):
            return body.split(b"\0", 1)[1].decode("latin-1")
        place += 12 + length
    raise AssertionError(f"{png} has no description")
