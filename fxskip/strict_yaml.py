"""Read a small YAML file that a person wrote into plain values, each with the line it stands on.

Stricter than YAML on purpose: one mapping, string keys, each key once, no anchors or aliases, no tags that
build objects, no directives, no dates or octal numbers, no key without a value, no invisible line breaks. Such a
file means what it looks like, and reading it takes less than a second whatever is in it. Text that is no YAML at
all raises SpecError; smaller faults stay in the Document: strict_model.validate reports them together with the
values that do not fit.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fxskip.errors import Problem, SpecError

MAX_BYTES = 24 << 10  # two rules for each of 128 layers are 18 KiB; a larger file could take seconds to check
MAX_DEPTH = 16  # our deepest file has 4 levels; a file of brackets must not exhaust Python's stack
_TAG = "tag:yaml.org,2002:"

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """Plain values, where each was written, and the faults found so far. Values from Python have no lines."""

    source: str
    data: dict[Any, Any]
    lines: dict[Place, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def line_of(self, place: Place) -> int | None:
        """Line of `place`, or of the nearest thing around it: a missing key has the line of its mapping."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place)


def read(path: Path, *, if_missing: str = "") -> Document:
    """Parse the file at `path`. `if_missing` is what the error adds when there is no such file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            _refuse(str(path), None, f"larger than {MAX_BYTES >> 10} KiB; this is not a file of this kind")
        content = path.read_bytes()
    except FileNotFoundError:
        _refuse(str(path), None, "no such file" + (f"; {if_missing}" if if_missing else ""))
    except (OSError, ValueError) as error:  # a folder, no permission; ValueError: a null byte in the path
        _refuse(str(path), None, f"cannot be read: {error}")
    return _parse(content, str(path))


def dotted(place: Place) -> str:
    """('connect', 0, 'without') as people write it: connect.0.without."""
    return ".".join(_step(str(step)) for step in place)


def _step(key: str) -> str:
    """A key of the user's may be anything; a message is lines of printable text."""
    return key if key.isprintable() and len(key) <= 40 else shown(key)


def shown(value: object) -> str:
    """`value` as an error message quotes it: what it is, in at most some 40 characters."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an int of more than 4300 digits
        return "a number with thousands of digits"
    return text if len(text) <= 40 else f"{text[:37]}..."


class _Loader(yaml.SafeLoader):
    """Refuses what would make a node appear twice or nest without end, before anything is built from it."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            _fail_at(
                event.start_mark,
                "anchors and aliases (& and *) are not allowed: write the value out; "
                "a glob that starts with * needs quotes, as in '*.mlp'",
            )
        if self.depth >= MAX_DEPTH:
            _fail_at(event.start_mark, f"nested deeper than {MAX_DEPTH} levels")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


# YAML 1.1 reads 1e-4 as text because it has no dot; a learning rate written so must be a number.
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)

# YAML takes these for line breaks, or editors show the text after them in another order: what looks like a comment
# or one value could be a rule. A comment in Hebrew or Arabic needs none of them.
_INVISIBLE = re.compile("\r(?!\n)|[\x85\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_DIRECTIVE = re.compile("^%", re.MULTILINE)

# PyYAML's words for the slips people make, and ours, which say what to write.
_REMEDIES = {
    "found character '\\t' that cannot start any token": "a tab; indent with spaces",
    "found character '@' that cannot start any token": "a value cannot start with @ here; quote it",
    "found character '%' that cannot start any token": "a value cannot start with % here; quote it",
    "expected alphabetic or numeric character": "* starts an alias in YAML: quote the glob, as in '*.mlp'",
    "but found another document": "a second document (---); write one mapping",
    "mapping values are not allowed here": "a ':' that does not belong here; indent it, or quote the text",
}


def _parse(content: bytes, source: str) -> Document:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse(source, content[: error.start].count(b"\n") + 1, "not UTF-8 text; is this a binary file?")
    _refuse_invisible(text, source)
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        _refuse(source, line, f"a control character (code {error.character}); is this a binary file?")
    except (ValueError, OverflowError):  # PyYAML hands the number of an escape to chr() as it is
        _refuse(
            source,
            loader.line + 1 if loader else None,
            "an escape that is no character: \\U goes up to 0010FFFF",
        )
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        found = error.problem or "this is not YAML"
        message = next((ours for theirs, ours in _REMEDIES.items() if found.startswith(theirs)), found[:200])
        _refuse(source, mark.line + 1 if mark else None, message)
    if root is None or (root.tag == f"{_TAG}null" and not root.value):  # nothing, or nothing after ---
        _refuse(source, 1, "the file is empty; write a mapping of keys and values")
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        _refuse(source, root.start_mark.line + 1, f"expected a mapping of keys and values, found {kind}")
    builder = _Builder()
    data = builder.mapping(root, ())
    return Document(source, data, builder.lines, tuple(builder.problems))


def _refuse_invisible(text: str, source: str) -> None:
    if found := _INVISIBLE.search(text):
        name = f"U+{ord(found[0]):04X}"
        _refuse(
            source, _line_at(text, found), f"an invisible line break or direction mark ({name}); delete it"
        )
    if found := _DIRECTIVE.search(text):
        _refuse(source, _line_at(text, found), "directives (%YAML, %TAG) are not allowed; delete the line")


def _line_at(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


class _Builder:
    """Turns YAML nodes into plain values; notes the line of each and every fault on the way."""

    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self.problems: list[Problem] = []
        self.scalars = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, place: Place) -> Any:
        self.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self.mapping(node, place)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, (*place, i)) for i, item in enumerate(node.value)]
        return self.scalar(node, place)

    def mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        self.lines.setdefault(place, node.start_mark.line + 1)
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            inner = (*place, key)
            if key_node.tag != f"{_TAG}str":
                self.report(line, place, f"the key {shown(key)} is not a word; quote it if it is meant")
            elif not key.isprintable():
                self.report(line, place, f"the key {shown(key)} has characters that cannot be printed")
            elif key in made:
                self.report(
                    line, inner, f"this key is here twice, first on line {self.lines[inner]}; keep one"
                )
            else:
                self.lines[inner] = line
                made[key] = self.value(value_node, inner)
        return made

    def scalar(self, node: yaml.Node, place: Place) -> Any:
        line, tag, found = node.start_mark.line + 1, node.tag.removeprefix(_TAG), shown(node.value)
        if tag == "null":
            self.report(line, place, "has no value; write one, or delete the key")
        elif tag not in ("str", "int", "float", "bool"):
            self.report(line, place, f"{found} is of the YAML type {shown(tag)}; quote it if it is text")
        elif tag == "int" and not re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", node.value):
            # YAML 1.1 reads 010 as 8 and 1:30 as 90.
            self.report(line, place, f"{found}: write a plain decimal number, or quote it if it is text")
        else:
            try:
                return self.scalars.construct_object(node)
            except (ValueError, KeyError, yaml.YAMLError):
                # Thousands of digits; !!float or !!bool with a word.
                self.report(line, place, f"{found} is no {tag} that can be held")
        return None

    def report(self, line: int, place: Place, message: str) -> None:
        self.problems.append(Problem(line, dotted(place), message))


def _refuse(source: str, line: int | None, message: str) -> NoReturn:
    raise SpecError(source, [(line, "", message)]) from None


def _fail_at(mark: yaml.Mark, message: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=message, problem_mark=mark)
