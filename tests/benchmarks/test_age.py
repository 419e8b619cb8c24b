"""Each page says with which version it was measured, and whether that is the code as it is."""

import re
from pathlib import Path

import pytest

import crossshard
from benchmarks import age, markdown

PAGES = age.pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_says_how_old_it_is(path: Path):
    page = path.read_text(encoding="utf-8")
    said = age.of(page)
    assert said, "Write it with `age.write`."
    version, day = said
    assert page == age.with_age(page, version, day), "Run `python -m benchmarks.age`."
    # What stands below, of the machine, is of the same run.
    assert set(re.findall(r"\bcrossshard (\d[\w.]*)", page)) == {version}
    days = re.findall(r"\b\d{4}-\d\d-\d\d\b", page)
    assert set(days) == {day}


def test_a_page_is_as_old_as_the_rows_that_stay(tmp_path: Path):
    path, this = tmp_path / "page.md", crossshard.__version__
    path.write_text(age.with_age("# A page\n\nRows.\n", "0.1.0", "2026-11-21"))
    old = "*Measured with crossshard 0.1.0 on 2026-11-21, and not again with the code as it is.*"
    assert path.read_text() == f"# A page\n\n{old}\n\nRows.\n"
    age.write(path, "# A page\n\nOne row is new.\n", rows_stay=True)
    assert path.read_text() == f"# A page\n\n{old}\n\nOne row is new.\n"
    age.write(path, "# A page\n\nAll are.\n")
    new = path.read_text()
    assert re.match(rf"# A page\n\n\*Measured with crossshard {re.escape(this)} on [\d-]+\.\*", new)
    assert age.of(new) != ("0.1.0", "2026-11-21")
    age.write(tmp_path / "other.md", "# Another\n\nRows.\n", rows_stay=True)
    assert age.of((tmp_path / "other.md").read_text())[0] == this


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_again_has_what_is_measured_now_and_says_the_rest_as_it_was(path: Path):
    page = path.read_text(encoding="utf-8")
    tables = re.findall(r"^\| (?:.+\n)+", page, re.MULTILINE)
    (repeat,) = re.findall(r"^.*To repeat: `.*", page, re.MULTILINE)
    now = [f"| table {number} |" for number in range(len(tables))]
    if path.stem == "pods":
        now = now[:2]  # the others were made by hand
    wanted = page.replace(repeat, "now")
    for old, new in zip(tables, now, strict=False):
        wanted = wanted.replace(old, f"{new}\n", 1)
    assert markdown.again(path.stem, now, "now") == wanted
    with pytest.raises(ValueError, match="longer"):
        markdown.again(path.stem, ["| a table |"] * (len(tables) + 1), "now")
