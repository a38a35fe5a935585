"""Reads a page that our code wrote, and refuses what browsers would repair silently."""

from html.parser import HTMLParser


class StrictHtml(HTMLParser):
    """Collects a page; raises where a tag is closed that was not the last one opened."""

    VOID = ("img", "meta")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.starts: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.starts.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))
