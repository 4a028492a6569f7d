"""Check every link of the built site: the file is there, and so is the place in it.

mkdocs --strict checks links that pages write in Markdown; here is what comes out, with links of generated pages, of the
navigation and of pictures. Links to other sites are not followed.

python docs/tools/check_links.py build/site
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the places that links can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to, and its own name."""
        for name, value in attrs:
            if value and name in ("href", "src") and tag != "base":
                self.targets.add(value)
            elif value and name in ("id", "name"):
                self.places.add(value)


@cache
def page_of(path: Path) -> Page:
    """Read a page once."""
    return Page(path)


def broken_links(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere."""
    broken = []
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":  # served from any place, so its links are absolute
            continue
        for target in sorted(page_of(path).targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            found = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if found.is_dir():
                found /= "index.html"
            if not found.is_file():
                broken.append(f"{path.relative_to(site)}: {target}: no such file")
            elif parts.fragment and found.suffix == ".html":
                place = unquote(parts.fragment)
                if place not in page_of(found).places and not place.startswith("__"):
                    broken.append(f"{path.relative_to(site)}: {target}: no such place in that page")
    return broken


def main() -> int:
    """Print what is broken; return 1 if something is."""
    site = Path(sys.argv[1]).resolve()
    pages = list(site.rglob("*.html"))
    if not pages:
        print(f"{site}: there are no pages here")
        return 1
    broken = broken_links(site)
    print(*broken, f"{len(pages)} pages, {len(broken)} broken links", sep="\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
