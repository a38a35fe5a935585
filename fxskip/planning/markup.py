"""Elements of HTML and SVG. All text goes through ElementTree, so whatever a model or spec is called is escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

Child = ET.Element | str


def element(tag: str, *children: Child, **attributes: str | float) -> ET.Element:
    """`element("td", "text", class_="number", data_block="3.mlp")` is <td class="number" data-block="3.mlp">."""
    names = {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()}
    new = ET.Element(tag, names)
    for child in children:
        if isinstance(child, ET.Element):
            new.append(child)
        elif len(new):
            new[-1].tail = (new[-1].tail or "") + child
        else:
            new.text = (new.text or "") + child
    return new


def document(title: str, *sections: Child) -> str:
    """A page with the style sheet of this package that needs no other file and no network."""
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style),
    )
    root = element("html", head, element("body", element("main", *sections)), lang="en")
    return "<!doctype html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def _text(value: str | float) -> str:
    """Coordinates without the digits that nobody can see."""
    return value if isinstance(value, str) else f"{value:.6g}"
