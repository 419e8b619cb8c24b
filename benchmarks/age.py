"""The age of a page, which stands below its title: with which version it was measured, and when.

`python -m benchmarks.age` writes it anew into all pages, after the version has changed.
"""

import datetime
import re
from pathlib import Path

import crossshard

# What a page says besides its numbers stands in the page alone.
PAGES = Path(__file__).parents[1] / "docs" / "benchmarks"
_AGE = re.compile(r"^\*Measured with crossshard (\S+) on (\d{4}-\d\d-\d\d)\b.*\.\*$", re.MULTILINE)


def of(page: str) -> tuple[str, str] | None:
    """The version and the day that a page names; ``None`` if it names none."""
    found = _AGE.search(page)
    return None if found is None else (found[1], found[2])


def with_age(page: str, version: str, day: str) -> str:
    """A page that says with which version and when it was measured, in place of what it said."""
    again = ", and not again with the code as it is" * (version != crossshard.__version__)
    line = f"*Measured with crossshard {version} on {day}{again}.*"
    title, _, rest = page.partition("\n\n")
    return f"{title}\n\n{line}\n\n{_AGE.sub('', rest).lstrip()}"


def write(path: Path, page: str, *, rows_stay: bool = False) -> None:
    """Write a page that was measured now; the age stays where rows of the page before it do."""
    now = crossshard.__version__, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    before = of(path.read_text(encoding="utf-8")) if rows_stay and path.exists() else None
    path.write_text(with_age(page, *(before or now)), encoding="utf-8")


def pages(folder: Path = PAGES) -> list[Path]:
    """The pages that have an age: all but the one that lists them."""
    return sorted(path for path in folder.glob("*.md") if path.name != "index.md")


if __name__ == "__main__":
    for path in pages():
        text = path.read_text(encoding="utf-8")
        age = of(text)
        if age is None:
            raise SystemExit(f"{path} does not say with which version it was measured.")
        path.write_text(with_age(text, *age), encoding="utf-8")
