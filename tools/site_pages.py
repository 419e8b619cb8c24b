"""Hooks of mkdocs.yml: the README and what else pages lead to, outside of docs/, are pages too.

A page leads to a file as it does in the repository, by a path. In the site each such file is a
page of its own, which shows it; so no link leaves the site for a place that it cannot know.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_VERSIONED = ROOT / "src" / "crossshard" / "__init__.py"
_KINDS = {".py": "python", ".toml": "toml", ".patch": "diff"}
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]+)?\))")
# Links in bold between dots, which the front page shows as buttons.
_BUTTON = re.compile(r"\*\*(\[[^]]+\]\([^)]+\))\*\*(?: · )?")
_FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.DOTALL | re.MULTILINE)

# What the site shows of the rest of the repository: the file of each page.
_shown: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that a page leads to."""
    waiting = [*_PAGES, *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    _shown.clear()
    _shown.update({uri: path for path, uri in _PAGES.items()})
    while waiting:
        here = waiting.pop()
        for _, target, _ in _LINK.findall(
            _FENCE.sub("", (ROOT / here).read_text(encoding="utf-8"))
        ):
            there = _place(here, target)
            if there and not there.startswith("docs/") and _uri(there) not in _shown:
                _shown[_uri(there)] = there
                waiting += [there] if there.endswith(".md") else []
    for uri, path in _shown.items():
        files.append(File.generated(config, uri, content=_content(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make a page's links those of the site."""
    uri = page.file.src_uri
    if uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
        markdown = _BUTTON.sub(r"\1{ .md-button .md-button--primary } ", markdown)
    # Whoever searches looks for pages; sources and what each version changed come up otherwise.
    if uri.startswith("files/") and not _shown[uri].endswith(".md"):
        page.meta["search"] = {"exclude": True}
    if uri == "changelog.md":
        page.meta["search"] = {"boost": 0.2}
    here = _shown.get(uri, f"docs/{uri}")
    return with_links_of_site(markdown, here, uri) if here.endswith(".md") else markdown


def with_links_of_site(text: str, here: str, uri: str) -> str:
    """A text whose links lead to pages of the site.

    Args:
      text: the page.
      here: its file in the repository.
      uri: its place in the site.
    """

    def led(match: re.Match[str]) -> str:
        there = _place(here, match[2])
        if not there:
            return match[0]
        return match[1] + os.path.relpath(_uri(there), os.path.dirname(uri) or ".") + match[3]

    parts, last = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(led, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, _LINK.sub(led, text[last:])])


def _place(here: str, target: str) -> str | None:
    """Where a link leads, from the repository's root; None if it is no path."""
    if "://" in target or target.startswith("mailto:"):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(here), target))


def _uri(path: str) -> str:
    """The place in the site of a file or a folder of the repository."""
    if path in _PAGES:
        return _PAGES[path]
    if (ROOT / path).is_dir():
        path += "/index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def _content(file: Path) -> str:
    name = file.relative_to(ROOT)
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.name[0] not in "._")
        return f"# {name}\n\n" + "".join(f"- `{each}`\n" for each in names)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    return f"# {file.name}\n\n`{name}`\n\n```` {_KINDS.get(file.suffix, 'text')}\n{text}\n````\n"


def on_config(config: MkDocsConfig) -> Any:
    """Say below each page of which version it is; watch what else is shown, while it is served."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', _VERSIONED.read_text(), re.MULTILINE)
    config.copyright = f"crossshard {version}"
    config.watch += [str(ROOT / path) for path in [*_PAGES, "src", "examples"]]
    return config
