"""Opens every page of the built site in headless Chromium, and says what is wrong with it.

`make docs-browse` runs it. Each page is opened as wide as a laptop and as narrow as a phone, light
and dark. A page is at fault where it scrolls sideways, where a name that fits on a line is torn,
where a picture does not load, or where its scripts fail; links are checked where the site is built.
Pictures of pages are kept in `--shots`, for people to look at.
"""

import argparse
import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

SITE = Path(__file__).resolve().parent.parent / "site"
_WAYS = (("laptop", 1280, "light"), ("phone", 375, "dark"))
# What the browser is asked of a page.
_BROKEN = "Array.from(document.images).filter(i => !i.naturalWidth).map(i => i.src)"
_TORN = """Array.from(document.querySelectorAll('.md-content code')).filter(e => {
  const around = e.closest('p, li, td, th, dt, dd, h1, h2, h3, h4'), parts = [...e.getClientRects()]
  return around && !e.closest('pre') && /^[\\w.=]+$/.test(e.textContent) && parts.length > 1
    && parts.reduce((sum, part) => sum + part.width, 0) < around.clientWidth - 40
}).map(e => e.textContent)"""
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder that is served on loopback meanwhile."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def browse(browser: Browser, address: str, pages: list[str], shots: Path | None) -> list[str]:
    """What is wrong with the pages, a line each."""
    faults: list[str] = []
    for way, width, scheme in _WAYS:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        tab = context.new_page()
        said: list[str] = []
        tab.on("pageerror", lambda error, said=said: said.append(str(error)))
        for page in pages:
            said.clear()
            tab.goto(address + page, wait_until="load")
            if over := tab.evaluate(_OVERFLOW):
                faults.append(f"{page}: {over} pixels too wide on a {way}")
            tab.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
            faults += [f"{page}: no picture at {each}" for each in tab.evaluate(_BROKEN)]
            faults += [f"{page}: {each} is torn on a {way}" for each in tab.evaluate(_TORN)]
            faults += [f"{page}: {each}" for each in said]
            if shots:
                tab.screenshot(path=shots / f"{way}-{page.replace('/', '-')}.png")
        context.close()
    print(f"{len(pages)} pages opened in {len(_WAYS)} ways")
    return faults


def main() -> None:
    """Open all pages, and exit with 1 if one is at fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--shots", type=Path, help="a folder for pictures of all pages")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser")
    options = parser.parse_args()
    if options.shots:
        options.shots.mkdir(parents=True, exist_ok=True)
    pages = sorted(str(each.relative_to(SITE)) for each in SITE.rglob("*.html"))
    pages.remove("404.html")
    with sync_playwright() as player, served(SITE) as address:
        # Debian's Chromium; playwright's own is not fetched.
        browser = player.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        faults = browse(browser, address, pages, options.shots)
        browser.close()
    print("\n".join(faults) or "nothing is wrong")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
