"""What a browser would make of our HTML: its tags, all closed, and the texts between them."""

from __future__ import annotations

from html.parser import HTMLParser


class Seen(HTMLParser):
    """The tags and the texts of HTML."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(made)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def seen(shown: object) -> Seen:
    """Return what a notebook shows for an object; it has tables and texts only."""
    found = Seen(shown._repr_html_())  # type: ignore[attr-defined]
    assert found.tags <= {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    return found
