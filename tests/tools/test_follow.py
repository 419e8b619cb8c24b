"""The tutorial is followed word by word, and what follows it finds a page that is wrong."""

import re
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tools import follow, front_picture

ROOT = Path(__file__).parents[2]
TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("[0-9]*.md"))
VERSIONS = "constraints/py{}{}-newest.txt".format(*sys.version_info)
PLANNING = "6-plan-for-a-pod.md"


# What follows a page.

PAGE = """# A page

```bash
mkdir here
cd here
export GREETING=hello
```

```python title="greet.py"
import os
print(os.environ["GREETING"], 0.123, "and more")
print("noise")
print("bye")
```

```bash
python greet.py
```

```text
hello   0.12…
…
bye
```
"""


def followed(folder: Path, text: str) -> int:
    page = folder / "page.md"
    page.write_text(text)
    work = folder / "work"
    work.mkdir()
    return follow.main([str(page), "--folder", str(work)])


def test_a_page_is_followed_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert followed(tmp_path, PAGE) == 0
    assert (tmp_path / "work" / "here" / "greet.py").exists()
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:4] == ["page.md", "1", "2", "1"]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("0.12…", "0.13…", "page.md:20 shows\nhello   0.13…"),
        ("\n…\nbye", "\nbye", "page.md:20 shows"),
        ("\nbye\n", "\nbye\nagain\n", "page.md:20 shows"),
        ("python greet.py", "python great.py", "page.md:16 ends with 2"),
        ("python greet.py", "false\npython greet.py", "page.md:16 ends with 1"),
        ('["GREETING"]', '["NAME"]', "KeyError: 'NAME'"),
        ("```bash\npython", "```console\npython", "page.md:16 is no block that is known: console"),
        ('```python title="greet.py"', "```python", "page.md:9 is no block that is known: python"),
        ("```text", "", "page.md has a fence that stands elsewhere, or has no end"),
        ("```bash\npython greet.py\n```\n", "", "page.md:17 shows"),
    ],
)
def test_a_page_that_is_wrong_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], right: str, wrong: str, said: str
):
    assert PAGE.count(right) == 1
    assert followed(tmp_path, PAGE.replace(right, wrong)) == 1
    assert said in capsys.readouterr().err


def test_a_terminal_has_none_of_our_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    variables = follow.new_terminal(tmp_path)
    assert not {"PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS"} & {*variables}


# The tutorial.


def files(page: Path) -> list[tuple[str, str]]:
    return [(kind, lines) for _, kind, lines in follow.blocks(page) if kind not in ("bash", "text")]


@pytest.mark.parametrize("page", TUTORIAL, ids=lambda page: page.stem)
def test_the_files_of_the_tutorial_are_short_programs(page: Path):
    assert files(page)
    for name, lines in files(page):
        compile(lines, name, "exec")
        assert len(lines.splitlines()) <= 60
        assert max(map(len, lines.splitlines())) <= 100


def test_the_overview_has_the_pages_in_order_and_their_minutes():
    text = (ROOT / "docs" / "tutorial" / "index.md").read_text()
    rows = re.findall(r"^\| \[(.*)\]\((.*)\) \|.*\| (\d+) \|$", text, re.MULTILINE)
    heads = [page.read_text().split("\n", 3)[::2] for page in TUTORIAL]
    minutes = [re.match(r"\*(\d+) minutes\.\*", below) for _, below in heads]
    assert [row[0] for row in rows] == [title.removeprefix("# ") for title, _ in heads]
    assert [row[1] for row in rows] == [page.name for page in TUTORIAL]
    assert [row[2] for row in rows] == [match and match[1] for match in minutes]
    assert sum(int(row[2]) for row in rows) == 30


def follow_all(pages: list[Path], work: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("PIP_CONSTRAINT", str(ROOT / VERSIONS))
    work.mkdir()
    return follow.main([*map(str, pages), "--clone", str(ROOT), "--folder", str(work)])


def check_front_picture(work: Path, name: str) -> None:
    """The front page's picture shows the curves of the first two pages."""
    recorded = front_picture.recorded()[name]
    curves = {who: front_picture.read(work / "sorting" / f"{who}.csv") for who in recorded}
    assert front_picture.furthest({name: curves}) < 1e-4
    for who, points in recorded.items():
        # Another CPU rounds otherwise, and the difference grows with the steps.
        np.testing.assert_allclose(curves[who], points, rtol=0.1)


# About four minutes on two cores, half of which are the installation and the plan.
@pytest.mark.multiprocess
@pytest.mark.deep
def test_the_tutorial_is_true_word_by_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert follow_all(TUTORIAL, tmp_path / "work", monkeypatch) == 0
    drawn = matplotlib.image.imread(tmp_path / "work" / "sorting" / "loss.png")
    shown = matplotlib.image.imread(ROOT / "docs" / "tutorial" / "loss.png")
    assert drawn.shape == shown.shape
    assert np.mean(np.abs(drawn - shown)) < 0.002
    check_front_picture(tmp_path / "work", "Adam")


# Adam hides a wrong scale. plot.py compares the curves; about three minutes.
@pytest.mark.soak
def test_the_curves_of_the_tutorial_are_the_same_with_plain_sgd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pages, sgd = [], front_picture.OPTIMIZERS["SGD"]
    # What a step with Adam sends and needs is no matter here.
    for page in TUTORIAL:
        if page.stem[0] in "1245":
            text = re.sub(r"held-out loss 0\.\d+$", "held-out loss …", page.read_text(), flags=re.M)
            pages.append(tmp_path / page.name)
            pages[-1].write_text(text.replace(front_picture.ADAM, sgd))
    assert sgd in pages[0].read_text()
    assert follow_all(pages, tmp_path / "work", monkeypatch) == 0
    steps, losses = np.loadtxt(tmp_path / "work" / "sorting" / "2 processes.csv").T
    assert (len(steps), steps[-1]) == (30, 300)
    assert losses[-1] < losses[0] / 3
    check_front_picture(tmp_path / "work", "SGD")
