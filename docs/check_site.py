"""Look at every page of the built site: ``python docs/check_site.py SITE``.

Prints pages that no page links to, links and anchors that lead nowhere, and pages that scroll sideways in a
window 390 or 1440 pixels wide. Needs Chromium; ends with 1 if there is any.
"""

import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag

if TYPE_CHECKING:
    from playwright.sync_api import Page as SitePage

WIDTHS = (390, 1440)


class Page(HTMLParser):
    """The links, images and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what a page points to, and what can be pointed to."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found[name] for name in ("href", "src") if name in found]


def dead_links(site: Path) -> list[str]:
    """Links to no file or anchor of the site; then pages that no link leads to."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    trouble, linked = [], {site / "index.html", site / "404.html"}
    for path, page in pages.items():
        for link in page.links:
            address, anchor = urldefrag(unquote(link))
            if ":" in address or address.startswith("//"):
                continue
            start = site if address.startswith("/") else path.parent
            goal = (start / address.lstrip("/")).resolve() if address else path
            goal = goal / "index.html" if goal.is_dir() else goal
            linked |= {goal} - {path}
            if not goal.exists():
                trouble.append(f"{path.relative_to(site)}: {link} is not there")
            elif (
                anchor and goal in pages and anchor not in pages[goal].anchors and not anchor.startswith("__")
            ):
                trouble.append(f"{path.relative_to(site)}: {link} has no such anchor")
    orphans = [f"{path.relative_to(site)}: no page links to it" for path in pages if path not in linked]
    return trouble + orphans


def sideways(site: Path) -> list[str]:
    """Pages wider than the window."""
    from playwright.sync_api import sync_playwright

    trouble = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page()
        for path in sorted(site.rglob("*.html")):
            tab.goto(path.as_uri(), wait_until="load", timeout=120_000)
            beyond = {width: pixels_beyond(tab, width) for width in WIDTHS}
            trouble += [
                f"{path.relative_to(site)}: {n} pixels too wide at {w}" for w, n in beyond.items() if n
            ]
        browser.close()
    return trouble


def pixels_beyond(tab: "SitePage", width: int) -> int:
    """How far a page that is open reaches beyond a window of this width."""
    tab.set_viewport_size({"width": width, "height": 900})
    return tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    found = dead_links(folder) + sideways(folder)
    print("\n".join(found) or f"{len(list(folder.rglob('*.html')))} pages: nothing found")
    sys.exit(bool(found))
