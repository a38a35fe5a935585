"""Specs that went wrong on the way: seeded changes of a spec's text, each of which knows what the text now means.

A mutator takes the text of a valid spec and returns a Mutant. `line` says what must happen to it:

    SAME    it still means what it meant: another way to write it
    UNSURE  it is whatever PyYAML's own safe reader takes it for, or it is refused
    0       it is refused as a whole: no line is at fault
    n > 0   it is refused, and line n is named
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import yaml

SAME, UNSURE = -1, -2


@dataclass(frozen=True)
class Mutant:
    """A changed spec: the bytes of its file, what was done to it, and what must happen when it is loaded."""

    content: bytes
    what: str
    line: int


Mutator = Callable[[str, random.Random], Mutant]
Path = tuple[str | int, ...]

# Every section and every form of a selection; the presets have none of the settings.
FULL_SPEC = """\
# every key there is
fxskip: 1
name: "all of it"
connect:
  - blocks: [attention, moe]
    layers: {last: 75%}
    without: [routed@1, "shared@2"]
  - blocks: model.layers.*.mlp.dense
    layers: 4-26
    without:
      - all@1
  - blocks: dense
    layers: [0, 3]
    without: [all@1, all@3]
sum: split
parallel:
  expert: {size: 8, exchange: all_reduce}
  tensor: {size: 2}
schedule:
  overlap: none
  backward: mirrored
  gradients: in_backward
  bucket_mib: 64
  solver: cp_sat
  costs: ./table.json
  max_in_flight_mib: 512
runtime: {recompute: layer, transport: nccl, mode: reference}
"""


def mutant(text: str, what: str, line: int) -> Mutant:
    return Mutant(text.encode("utf-8", "surrogatepass"), what, line)


# --- places in a text ----------------------------------------------------------------------------


def values(text: str) -> list[tuple[Path, yaml.Node]]:
    """All values of the text and where they stand, the whole left out."""
    found: list[tuple[Path, yaml.Node]] = []

    def walk(node: yaml.Node, path: Path) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found.append(((*path, key.value), value))
                walk(value, (*path, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                found.append(((*path, i), item))
                walk(item, (*path, i))

    walk(yaml.compose(text), ())
    return found


def keys(text: str) -> list[yaml.Node]:
    """All keys of the text."""

    def walk(node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.MappingNode):
            return [k for key, value in node.value for k in (key, *walk(value))]
        return [k for item in node.value for k in walk(item)] if isinstance(node, yaml.SequenceNode) else []

    return walk(yaml.compose(text))


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def replaced(text: str, node: yaml.Node, new: str) -> str:
    """The text with `new` in place of a key or a value that stands on one line."""
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]


def scalar(text: str, draw: random.Random) -> tuple[Path, yaml.Node]:
    return draw.choice([(p, n) for p, n in values(text) if isinstance(n, yaml.ScalarNode)])


def at_line_start(text: str, draw: random.Random) -> int:
    """The index of some line's first character."""
    return draw.choice([0, *(i + 1 for i, c in enumerate(text) if c == "\n" and i + 1 < len(text))])


# --- another way to write the same ---------------------------------------------------------------


def dumped(text: str, draw: random.Random) -> Mutant:
    style, width = draw.choice([True, False, None]), draw.choice([8, 80, 1000])
    new = yaml.safe_dump(
        yaml.safe_load(text), sort_keys=draw.random() < 0.5, default_flow_style=style, width=width
    )
    return mutant(new, f"dumped with flow style {style} and width {width}", SAME)


def quoted(text: str, draw: random.Random) -> Mutant:
    strings = [n for _, n in values(text) if n.tag.endswith(":str")] + keys(text)
    node = draw.choice(strings)
    how = draw.choice(["'{}'", '"{}"', "!!str {}", "escaped"])
    escaped = "".join(f"\\x{ord(c):02x}" for c in node.value)
    new = f'"{escaped}"' if how == "escaped" else how.format(node.value)
    return mutant(replaced(text, node, new), f"{node.value!r} written {how}", SAME)


def spaced(text: str, draw: random.Random) -> Mutant:
    at, what = (
        at_line_start(text, draw),
        draw.choice(["\n", "   \n", "# x: [&a, *b, !c, \ttab]\n", "#\n", "# ö ☃ 🚀 שלום\n"]),
    )
    return mutant(text[:at] + what + text[at:], f"{what!r} before a line", SAME)


def framed(text: str, draw: random.Random) -> Mutant:
    before = draw.choice(["", "\ufeff", "---\n", "\ufeff---\n", "\n" * draw.randint(1, 50)])
    after = draw.choice(["", "...\n", "\n" * draw.randint(1, 50), "# end"])
    return mutant(before + text + after, f"{before!r} before and {after!r} after", SAME)


def windows(text: str, draw: random.Random) -> Mutant:
    lines = text.split("\n")
    ends = ["\r\n" if draw.random() < 0.7 else "\n" for _ in lines[:-1]]
    return mutant("".join(a + b for a, b in zip(lines, [*ends, ""], strict=True)), "CRLF line ends", SAME)


# --- values of the wrong type --------------------------------------------------------------------

# Wrong in every place of a spec. None can be a name either, which takes any line of text.
MISFITS = [
    "{a: 1}", "[[[]]]", "{}", "1.5", "-0.0", "true", "no", "~", "null", ".nan", ".inf", "-.inf", "1e400", "-1e-400",
    "-1", "99999999999", "1" * 400, "1" * 5000, "-" + "9" * 4299, "0x10", "0b1", "1_000", "010", "1:30:00",
    "2026-01-01", "2026-01-01 10:00:00", "=", "<<", "@x", "`x`", "%x", "|", ">", '"\\ud800"', '"\\0"', '"\\U00110000"',
    '"\\UFFFFFFFF"', '"\\e[31m"', '"a\\nb"', '"\\q"', '"unfinished', "'unfinished", "[unfinished", "{unfinished", "]",
    '"' + "x" * 20000 + '"', "x" * 20000, "!!str", "!!binary aGk=", "!!set {a}", "!!omap [a: 1]", "!!pairs [a: 1]",
    "!!float abc", "!!int abc", "!!bool abc", "!!null abc", "!!map x", "!!seq x", "!!seq {}", "!own x", "!%ff x",
    "!<tag:x,1:y> x", "!" + "x" * 5000 + " y", "&a x", "*a", "&a [*a]", "&a", "*",
]  # fmt: skip


def _live_tags(target: str) -> list[str]:
    """Tags for which an unsafe reader creates the file `target`."""
    return [
        f'!!python/object/apply:os.system ["echo x > {target}"]',
        f'!!python/object/apply:subprocess.check_output [["touch", "{target}"]]',
        f'!!python/object/apply:builtins.open ["{target}", "w"]',
        f'!!python/object/new:os.system ["echo x > {target}"]',
        f"!!python/object/apply:builtins.eval [\"open('{target}', 'w')\"]",
        f'!<tag:yaml.org,2002:python/object/apply:os.system> ["echo x > {target}"]',
    ]


SENTINEL = "SENTINEL"
"""Stands in the text of a mutant for the path of the file that must not appear."""
LIVE_TAGS = _live_tags(SENTINEL)
DEAD_TAGS = [
    "!!python/name:os.system", "!!python/module:os", "!!python/tuple [a]", "!!python/none", "!!python/int 1",
    "!!python/object:fxskip.spec.Spec {fxskip: 1}", "!!python/str x", "!!python/bytes aGk=", "!!python/complex 1j",
]  # fmt: skip


def misfit(text: str, draw: random.Random) -> Mutant:
    path, node = scalar(text, draw)
    new = draw.choice(MISFITS)
    new = "0" if new == "-1" and path == ("fxskip",) else new
    # An unfinished bracket or quote is noticed where the text ends, or where the next token does not fit.
    rest = range(line_of(node), text.count("\n") + 2)
    changed = replaced(text, node, f"{new} " if new.startswith(("!", "&")) else new)
    spans = new.startswith(('"unf', "'unf", "[unf", "{unf", "|", ">", "&a", "*")) or new in (
        "]",
        "!!str",
        "~",
        "null",
    )
    return mutant(
        changed, f"{path} is {new[:40]!r}", first_bad_line(changed, rest) if spans else line_of(node)
    )


def python_tag(text: str, draw: random.Random) -> Mutant:
    path, node = scalar(text, draw)
    new = draw.choice(LIVE_TAGS + DEAD_TAGS)
    return mutant(replaced(text, node, f"{new} "), f"{path} is {new}", line_of(node))


def first_bad_line(text: str, otherwise: range) -> int:
    """The line that PyYAML itself names for a text that is no YAML; else the first of `otherwise`."""
    try:
        yaml.compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return int(mark.line) + 1
    return otherwise[0]


# --- values out of range -------------------------------------------------------------------------

WRONG_WORDS = [
    "atention",
    "Attention",
    "аttention",
    "moe ",
    " ",
    "",
    "all of it?",
    "moe, dense",
    "a b.*",
    "*\\t.mlp",
    "mlp",
]
WRONG_LAYERS = [
    '"5-3"', '"3"', "3", '"1 to 3"', '"0-10000"', '"-1-3"', '"１-３"', '"0-3,5"', "[]", "[-1]", "[10000]", "[1.0]",
    "[true]", "[1, 1]", "[[1]]", '["1"]', "{last: 0}", "{last: -1}", "{last: 10000}", "{last: 0%}", "{last: 101%}",
    "{last: 1e2}", '{last: "75 %"}', "{last: .5}", "{skip_first: 100%}", "{skip_first: 1000%}", "{frist: 1}", "{}",
    "{first: 1, last: 1}", "{first: .nan}", '{first: "0.0000001%"}', '"all "', "ALL", "{last: 7５%}",
]  # fmt: skip
WRONG_ADDENDS = [
    "routed@0", "routed@-1", "routed@10000", "routed@1.5", "routed@", '"@1"', '"routed @1"', "routed", "routed@1@2",
    "routed@１", "Routed@1", "expert@1", "attention@1", '"routed@1\\n"', "routed@01", "routed@0x1", "1", "[routed@1]",
    "{routed: 1}", "routed@" + "9" * 4000,
]  # fmt: skip
WRONG: dict[str, list[str]] = {
    "fxskip": ["0", "2", "-1", "1.0", '"1"', "true", "yes", "01", "1e0"],
    "name": ['""', '" \\t"', '"' + "x" * 201 + '"', "3", '"\\u202e"'],
    "sum": ["splitt", "As_written", "as written", '""'],
    "size": ["0", "-1", "65537", "1.0", '"8"', "1e1"],
    "exchange": ["all_to_al", "alltoall"],
    "overlap": ["ful", "partial"],
    "backward": ["explicitly", "mirror"],
    "gradients": ["in_backwards", "by call"],
    "bucket_mib": ["0", "1048577", "-5", "1e3", '"25"'],
    "solver": ["lists", "cpsat"],
    "costs": ["rooflin", '""', '"./a\\0"'],
    "max_in_flight_mib": ["0", "1048577", "-5", "1e3", '"512"'],
    "recompute": ["layers", "full"],
    "transport": ["mpi", "Auto"],
    "mode": ["schedule", "fast"],
    "preset": ["farskp", "../farskip", "/etc/passwd", "farskip.yaml", '""', "1", "[farskip]"],
    "blocks": [*(f'"{word}"' for word in WRONG_WORDS), "[]", "[moe, moe]", "[all, moe]", "[mixer, attention]",
               "[[moe]]", "[{moe: 1}]", '"*.' + "x" * 300 + '"'],
    "layers": WRONG_LAYERS,
    "without": ["[]", "routed@1", "{routed: 1}", "[all@1, routed@1]", "[all@2, all@2]", "[[all@1]]",
                *(f"[{addend}]" for addend in WRONG_ADDENDS)],
}  # fmt: skip


def out_of_range(text: str, draw: random.Random) -> Mutant:
    """A value that its key does not take, in place of one that may have several lines."""
    known = [(path, node) for path, node in values(text) if path[-1] in WRONG]
    path, node = draw.choice(known)
    new = draw.choice(WRONG[str(path[-1])])
    is_block = isinstance(node, yaml.CollectionNode) and not node.flow_style
    end = text.rindex("\n", 0, node.end_mark.index) if is_block else node.end_mark.index
    changed = text[: node.start_mark.index] + new + text[end:]
    return mutant(changed, f"{path} is {new[:40]!r}", line_of(node))


# --- keys ----------------------------------------------------------------------------------------


def misspelt_key(text: str, draw: random.Random) -> Mutant:
    node = draw.choice(keys(text))
    i = draw.randrange(len(node.value))
    new = draw.choice(
        [node.value[:i] + node.value[i + 1 :], node.value[:i] + "x" + node.value[i:], node.value.upper()]
    )
    new = new or "x"
    return mutant(replaced(text, node, new), f"key {node.value!r} is {new!r}", line_of(node))


ODD_KEYS = [
    "x", "__class__", "model_config", "model_fields", "__init__", "1", "1.5", "true", "null", "~", "2026-01-01",
    "<<", "=", '""', '"a b"', '"\\0"', '"\\ud800"', '"a\\nb"', '"\\e[2J"', "? [a]", "? {a: b}", "!own x",
    "!!python/name:os.system x", "k" * 900, "naïve", "ключ", "connеct",
]  # fmt: skip


def unknown_key(text: str, draw: random.Random) -> Mutant:
    """A key that does not exist, in front of one that does."""
    node = draw.choice(keys(text))
    key = draw.choice(ODD_KEYS)
    if key.startswith("?"):  # only on a line of its own
        node = draw.choice([k for k in keys(text) if k.start_mark.column == 0])
        return mutant(f"{key}\n: 1\n{text}", f"key {key}", 1)
    at, column = node.start_mark.index, node.start_mark.column
    is_flow = text[:at].rpartition("\n")[2].count("{") > 0
    new = f"{key}: 1, " if is_flow else f"{key}: 1\n{' ' * column}"
    return mutant(text[:at] + new + text[at:], f"key {key[:40]!r}", line_of(node))


def key_twice(text: str, draw: random.Random) -> Mutant:
    """A key that is there already, with the same value or another one, on the line before."""
    node = draw.choice(keys(text))
    at, column = node.start_mark.index, node.start_mark.column
    is_flow = text[:at].rpartition("\n")[2].count("{") > 0
    new = f"{node.value}: x, " if is_flow else f"{node.value}: x\n{' ' * column}"
    changed = text[:at] + new + text[at:]
    return mutant(changed, f"{node.value!r} twice", line_of(node) + (0 if is_flow else 1))


def merged(text: str, draw: random.Random) -> Mutant:
    """A merge key, with a mapping or an alias, in front of a key in the first column."""
    node = draw.choice([k for k in keys(text) if k.start_mark.column == 0])
    new = draw.choice(
        ["<<: {name: x}", "<<: [{name: x}]", "<<: *x", "? <<\n: {name: x}", '"<<": {name: x}', "<<:"]
    )
    at = node.start_mark.index
    return mutant(text[:at] + new + "\n" + text[at:], f"{new!r} inserted", line_of(node))


def key_missing(text: str, draw: random.Random) -> Mutant:
    """A required key is commented out, or its value is; the mapping around it is at fault."""
    options = [
        line
        for line in text.split("\n")
        if re.match(r"fxskip:|  - blocks:|    blocks:|    without: \[", line)
    ]
    line = draw.choice(options)
    number = text.split("\n").index(line) + 1
    key, _, value = line.partition(":")
    what = draw.choice(["value", "key"])
    if what == "value":
        return mutant(text.replace(line, f"{key}: # {value}", 1), f"no value for {key.strip()}", number)
    if line.startswith("  - "):  # the rule goes on with its next key
        new = text.replace(f"{line}\n    ", "  - ", 1)
        return mutant(new, f"no {key.strip()}", number)
    changed = text.replace(line, f"#{line}", 1)
    rules = [line_of(n) for p, n in values(text) if len(p) == 2 and line_of(n) <= number]
    mapping = rules[-1] if line.startswith(" ") else line_of(yaml.compose(changed))
    return mutant(changed, f"no {key.strip()}", mapping)


# --- references ----------------------------------------------------------------------------------


def anchored(text: str, draw: random.Random) -> Mutant:
    path, node = draw.choice(values(text))
    is_block = isinstance(node, yaml.CollectionNode) and not node.flow_style
    new = "&a\n" + " " * node.start_mark.column if is_block else "&a "
    at = node.start_mark.index
    if is_block:  # the anchor ends the line of the key
        line = line_of(node) - 1
        at = text.rindex("\n", 0, at) if path and isinstance(path[-1], str) else -1
        if at < 0:
            return anchored(text, draw)
        return mutant(text[:at] + " &a" + text[at:], f"an anchor at {path}", line)
    return mutant(text[:at] + new + text[at:], f"an anchor at {path}", line_of(node))


def bomb(text: str, draw: random.Random) -> Mutant:
    """The billion laughs: each line holds the one before many times over. Or a list that holds itself."""
    levels, width = draw.randint(2, 30), draw.randint(2, 30)
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    cycle = draw.choice(["a: &a [*a]", "a: &a {b: *a}", "a: &a [&a [*a], *a]", "&a a: *a"])
    new = draw.choice(["\n".join(lines), cycle])
    return mutant(f"{text}{new}\n", f"{new[:60]!r} at the end", text.count("\n") + 1)


# --- damage to the text --------------------------------------------------------------------------


def tabbed(text: str, draw: random.Random) -> Mutant:
    """Indentation by tabs, on one line."""
    lines = text.split("\n")
    number = draw.choice([i for i, line in enumerate(lines) if line.startswith("  ")] or [-1])
    if number < 0:  # nothing is indented
        return mutant(f"{text}x:\n\t- y\n", "a tab in front of an item", len(lines) + 1)
    lines[number] = "\t" + lines[number].lstrip()
    changed = "\n".join(lines)
    return mutant(changed, "a tab for indentation", number + 1)


def binary(text: str, draw: random.Random) -> Mutant:
    at = draw.randrange(len(text))
    byte = draw.choice([b"\x00", b"\x01", b"\x08", b"\x0b", b"\x0c", b"\x1b", b"\x7f", b"\x80",
                        b"\xc0\xaf", b"\xed\xa0\x80", b"\xff", b"\xf5\x80\x80\x80", b"\xef\xbf\xbe"])  # fmt: skip
    content = text[:at].encode() + byte + text[at:].encode()
    return Mutant(content, f"the bytes {byte!r} at {at}", text[:at].count("\n") + 1)


def hidden_break(text: str, draw: random.Random) -> Mutant:
    """A line end that editors do not show: what follows a comment would be a key."""
    at = at_line_start(text, draw)
    sign = draw.choice(["\r", "\x85", "\u2028", "\u2029", "\u202e", "\u2066"])
    new = f"# harmless{sign}sum: split\n"
    return mutant(text[:at] + new + text[at:], f"{sign!r} in a comment", text[:at].count("\n") + 1)


def encoded(text: str, draw: random.Random) -> Mutant:
    name = draw.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
    return Mutant(text.encode(name), f"encoded as {name}", 1)


def not_one_mapping(text: str, draw: random.Random) -> Mutant:
    lines = text.count("\n")
    whole, line = draw.choice([
        ("", 1), (" \n", 1), ("# only this\n", 1), ("---\n", 1), ("...\n", 1), ("null\n", 1), ("~\n", 1), ("x\n", 1),
        ("- x\n", 1), ("[]\n", 1), ("{}\n", 1), ("\n\n- x\n", 3), (f"{text}---\n{text}", lines + 1),
        (f"%YAML 1.1\n---\n{text}", 1),
        (f"%TAG ! tag:x,1:\n---\n{text}", 1), (f"{text}- x\n", 0), (f"{text}x\n", 0), (f"- x\n{text}", 0),
    ])  # fmt: skip
    return mutant(whole, f"{whole[:30]!r} ...", line or first_bad_line(whole, range(lines)))


def too_deep(text: str, draw: random.Random) -> Mutant:
    path, node = scalar(text, draw)
    levels = draw.choice([17, 50, 1000, 9000])
    opening, closing = draw.choice(["[]", "{}", ("{a: ", "}"), ("- ", "")])
    if opening == "- ":
        levels = min(levels, 1000)
        return mutant(f"{text}x:\n  {opening * levels}y\n", f"{levels} block sequences", text.count("\n") + 2)
    levels = min(levels, 6000 // len(opening))
    new = opening * levels + closing * draw.choice([0, levels])
    return mutant(replaced(text, node, new), f"{path} is {levels} times {opening}", line_of(node))


def too_large(text: str, draw: random.Random) -> Mutant:
    filler = draw.choice(["# padding\n", "\n", "k: v\n", "- [\n", "\x00", "é"])
    return mutant(text + filler * (30_000 // len(filler.encode())), f"ends in 30 kB of {filler!r}", 0)


def claimed_twice(text: str, draw: random.Random) -> Mutant:
    """A second rule for blocks that have one. The rule that comes later is at fault."""
    wide = "\nconnect:\n  - {blocks: all, without: [all@1]}\n  - {blocks: [moe, a.*], layers: 0-9, without: [all@2]}\n"
    rules = re.sub(r"(?ms)^connect:.*?(?=^\w|\Z)", "", text).rstrip() + wide
    return mutant(rules, "two rules for moe", rules.count("\n"))


TOKENS = ["- ", ": ", ",", "[", "]", "{", "}", "#", "&", "*", "!", "|", ">", "'", '"', "%", "@", "`", "\n", "  ", "\t",
          "~", "0", "9", "-", ".", "e", "<<: ", "all", "routed@1", "\\", "é", "\u00a0",
          "---\n", "...\n", "? "]  # fmt: skip


def garbled(text: str, draw: random.Random) -> Mutant:
    """A few characters are lost, doubled, swapped or replaced by signs that mean something in YAML."""
    steps = []
    for _ in range(draw.randint(1, 4)):
        at, length, token = draw.randrange(len(text)), draw.randint(1, 6), draw.choice(TOKENS)
        step = draw.choice(["cut", "twice", "insert", "replace", "end"])
        text = {
            "cut": text[:at] + text[at + length :],
            "twice": text[: at + length] + text[at:],
            "insert": text[:at] + token + text[at:],
            "replace": text[:at] + token + text[at + 1 :],
            "end": text[: max(at, 1)] if step == "end" and draw.random() < 0.3 else text,
        }[step] or "x"
        steps.append(f"{step} {token!r} at {at}")
    return mutant(text, ", ".join(steps), UNSURE)


MUTATORS: tuple[Mutator, ...] = (
    dumped, quoted, spaced, framed, windows,
    misfit, python_tag, out_of_range,
    misspelt_key, unknown_key, key_twice, merged, key_missing,
    anchored, bomb,
    tabbed, binary, hidden_break, encoded, not_one_mapping, too_deep, too_large, claimed_twice, garbled,
)  # fmt: skip
