"""The page of a plan: it stands alone, escapes everything, and its picture says what the plan says."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fxskip.planning import Plan, make_plan, page, pictures
from fxskip.planning.deployment import Wishes
from fxskip.planning.fold import fold
from fxskip.schedule.costs import Costs, ModelCosts, Part
from fxskip.schedule.hardware import load_hardware
from fxskip.spec import load_spec
from fxskip.wiring import SubBlock, connect
from tests.strict_html import StrictHtml

DENSE, EXPERTS, NO_SHARED = ("dense",), ("routed", "shared"), ("routed",)
DEEPSEEK = (DENSE, *[EXPERTS] * 5)
MIXTRAL = (NO_SHARED,) * 5

SPECS = {
    "two-back": {"fxskip": 1, "name": "two-back", "connect": [{"blocks": "all", "without": ["all@2"]}]},
    "far-back": {
        "fxskip": 1,
        "name": "far-back",
        "connect": [
            {"blocks": "attention", "without": ["routed@1", "routed@3"]},
            {"blocks": ["moe", "dense"], "without": ["shared@2", "all@1", "routed@4"]},
        ],
    },
}


def plan(spec: str, outputs: Sequence[tuple[str, ...]] = DEEPSEEK) -> Plan:
    """The plan of a model without weights or code: `outputs` are what the second sub-block of each layer adds."""
    blocks = []
    for layer, adds in enumerate(outputs):
        kind = "dense" if adds == DENSE else "moe"
        blocks += [
            SubBlock(layer, "attention", f"model.layers.{layer}.self_attn", ("attention",)),
            SubBlock(layer, kind, f"model.layers.{layer}.mlp", adds),
        ]
    costs = tuple(costs_of(block) for block in blocks)
    whole = ModelCosts(costs, "bfloat16", sum(c.parameters for c in costs) + 5000, outside=5000, head=2000)
    loaded = load_spec(SPECS.get(spec, spec))
    wishes = Wishes(load_hardware("h200"), expert_size=8)
    return make_plan("TinyForCausalLM", loaded, connect(loaded, blocks), blocks, whole, wishes)


def costs_of(block: SubBlock) -> Costs:
    if block.kind != "moe":
        return Costs((Part(block.kind, 1000, 2e6, 512.0, 3),), 64)
    names = ("gate", *sorted(block.addends))
    return Costs(tuple(Part(name, 800, 1e6, 512.0, 3) for name in names), 64, experts=8, experts_per_token=2)


@pytest.mark.parametrize("spec", ["farskip", "identity", "far-back"])
def test_the_page_is_well_formed_needs_nothing_else_and_has_every_sub_block(spec):
    html = page(plan(spec))
    parsed = StrictHtml(html)
    assert dict(parsed.starts)["html"] == {"lang": "en"}
    assert [text for tag, text in parsed.texts if tag == "h1"] == [f"{spec} on TinyForCausalLM"]
    fetching = {"src", "href", "xlink:href", "srcset", "data", "action", "background"}
    assert not any(fetching & attributes.keys() for _, attributes in parsed.starts)
    assert "url(" not in html and "@import" not in html and "://" not in html
    rows = [a["data-block"] for tag, a in parsed.starts if tag == "tr" and "data-block" in a]
    assert rows == [block.path for block in plan(spec).blocks]


def test_page_and_text_say_of_each_layer_whether_its_exchange_fits():
    made = plan("farskip")
    row = made.layers[0]
    words = f"{'fits' if row.margin_us >= 0 else 'short'} by {abs(row.exchange_us - row.room_us):.0f} us"
    cells = [text for tag, text in StrictHtml(page(made)).texts if tag == "td"]
    at = cells.index(words, cells.index(str(row.layer)))
    expected = (row.exchange_us, row.room_us, words, row.exposed_before_us, row.exposed_after_us)
    assert cells[at - 2 : at + 3] == [e if isinstance(e, str) else f"{e:,.0f}" for e in expected]
    (line,) = [line for line in str(made).splitlines() if line.startswith(f"{row.layer} ") and words in line]
    assert line.split()[-2:] == [f"{row.exposed_before_us:.0f}", f"{row.exposed_after_us:.0f}"]
    # Nobody exchanges tokens in one process.
    alone = replace(made, layers=())
    assert "Window" not in page(alone) and "window" not in str(alone)


def test_pictures_are_named_and_described_for_those_who_cannot_see_them():
    parsed = StrictHtml(page(plan("farskip")))
    texts = {a["id"]: parsed.starts.index((tag, a)) for tag, a in parsed.starts if "id" in a}
    for tag, attributes in parsed.starts:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert set((attributes["aria-labelledby"] or "").split()) <= texts.keys()
    assert len(texts) == 4  # a title and a description each, no id twice


def test_names_of_models_specs_and_modules_are_escaped():
    evil = "<script>alert('1')</script>&amp;\"x"
    harmless = plan("farskip")
    blocks = tuple(replace(b, path=f"{b.path}<b>&", refused=evil) for b in harmless.blocks)
    html = page(replace(harmless, model=evil, spec=evil, blocks=blocks))
    parsed = StrictHtml(html)
    assert "<script" not in html and "<b>" not in html
    assert not {"script", "b"} & {tag for tag, _ in parsed.starts}
    assert (f"{evil} on {evil}") in [text for tag, text in parsed.texts if tag == "h1"]
    rows = [a["data-block"] for tag, a in parsed.starts if tag == "tr" and "data-block" in a]
    assert rows == [block.path for block in blocks]


def number(text: str | None) -> float:
    assert text is not None
    return float(text)


def sums_on(svg: ET.Element, x: float) -> dict[float, str]:
    """Height of each plus on the vertical line at x, with what it adds where that is noted."""
    circles = [c for c in svg.iter("circle") if c.get("class") == "sum"]
    return {number(c.get("cy")): c.get("data-adds", "") for c in circles if number(c.get("cx")) == x}


def drawn_without(svg: ET.Element) -> dict[str, set[str]]:
    """Read the picture as a person does: which outputs each sub-block does not see, from lines and pluses alone."""
    (stream,) = [p for p in svg.iter("path") if p.get("class") == "stream"]
    stream_x = float(stream.get("d", "").removeprefix("M").split()[0])
    main = sums_on(svg, stream_x)
    found: dict[str, set[str]] = {}
    for line in svg.iter("path"):
        reader = line.get("data-reader")
        if reader is None:
            continue
        x, start = map(float, line.get("d", "").removeprefix("M").split("H")[0].split())
        assert x == stream_x  # every read starts on the stream
        if line.get("class") == "read":
            found[reader] = set()
            continue
        side_x, end = side_line(line)
        joined = {y for y in sums_on(svg, side_x) if start < y < end}
        passed = {y for y in main if start < y < end}
        assert joined <= passed
        found[reader] = {main[y] for y in passed - joined}
    return found


def side_line(line: ET.Element) -> tuple[float, float]:
    """x of the vertical part of a side line, and the height at which it turns into its box."""
    before, _, after = line.get("d", "").partition("V")
    corner = float(before.rpartition("q")[2].split()[0])
    across = float(before.partition("H")[2].partition("q")[0])
    return across + corner, float(after.partition("q")[0]) + corner


def planned_without(made: Plan) -> dict[str, set[str]]:
    expected = {}
    for position, block in enumerate(made.blocks):
        sources = [(name, position - int(back)) for name, back in (w.split("@") for w in block.without)]
        expected[block.path] = {f"{made.blocks[i].path} {name}" for name, i in sources}
    return expected


@pytest.mark.parametrize(
    "spec", ["farskip", "farskip-attention", "ladder", "two-back", "far-back", "identity"]
)
@pytest.mark.parametrize("outputs", [DEEPSEEK, MIXTRAL])
def test_lines_and_pluses_say_what_the_plan_says(spec, outputs):
    made = plan(spec, outputs)
    before, after = pictures(made)
    drawn = drawn_without(after)
    layers = {layer for part in fold(made) for layer in part.drawn_layers}
    assert drawn.keys() == {b.path for b in made.blocks if b.layer in layers}
    # The layers drawn just before a folded one are wired like those that really precede it.
    expected = planned_without(made)
    unfolded = [b.path for b in made.blocks if set(range(b.layer - 2, b.layer + 1)) <= layers]
    assert {path: drawn[path] for path in unfolded} == {path: expected[path] for path in unfolded}
    assert {path: len(what) for path, what in drawn.items()} == {path: len(expected[path]) for path in drawn}
    assert all(not what for what in drawn_without(before).values())


def rewired_lines(svg: ET.Element) -> int:
    return sum("rewired" in (part.get("class") or "").split() for part in svg.iter())


def test_identity_has_no_rewired_line_and_two_equal_pictures():
    before, after = pictures(plan("identity"))
    assert rewired_lines(before) == rewired_lines(after) == 0
    drawing = ("path", "rect", "circle")
    parts = [[(p.tag, p.attrib) for p in svg.iter() if p.tag in drawing] for svg in (before, after)]
    assert parts[0] == parts[1]


def test_bars_are_hidden_where_the_plan_has_a_window():
    made = plan("farskip", DEEPSEEK[:3])  # one dense layer, two with experts; none alike, so all are drawn
    before, after = pictures(made)

    def bars(svg: ET.Element) -> dict[str, bool]:
        groups = [g for g in svg.iter("g") if "trip" in g.get("class", "").split()]
        return {g.findtext("title", "").split(":")[0]: "hidden" in g.get("class", "") for g in groups}

    expected = {}
    for block in made.blocks:
        results = "combine" if block.kind == "moe" else "all-reduce"
        expected[f"{results} of {block.path}"] = bool(block.window.combine_under)
        if block.kind == "moe":
            expected[f"dispatch of {block.path}"] = bool(block.window.dispatch_under)
    assert bars(after) == expected
    assert bars(before) == dict.fromkeys(expected, False)


def folded(made: Plan) -> list[tuple[range, range]]:
    return [(part.layers, part.drawn_layers) for part in fold(made)]


def test_equal_layers_are_drawn_once():
    # As in DeepSeek-V3: layer 3 follows a dense layer, and layer 60 has nobody after it to hide its combine.
    made = plan("farskip", (*[DENSE] * 3, *[EXPERTS] * 58))
    assert folded(made) == [
        (range(3), range(1)),
        (range(3, 4), range(3, 4)),
        (range(4, 60), range(4, 5)),
        (range(60, 61), range(60, 61)),
    ]
    titles = [t.text for t in pictures(made)[1].iter("text") if t.get("class") == "layers"]
    assert titles == [
        "layers 0–2: one layer, 3 times",
        "layer 3",
        "layers 4–59: one layer, 56 times",
        "layer 60",
    ]


def test_patterns_of_several_layers_are_drawn_once():
    # As in Llama 4: dense and MoE layers take turns. Layer 0 differs, because nobody is before it.
    made = plan("farskip", (DENSE, EXPERTS) * 4 + (DENSE,))
    assert folded(made) == [(range(1), range(1)), (range(1, 9), range(1, 3))]


def test_lines_that_reach_back_over_layers_keep_the_layers_that_they_come_from():
    for whole, drawn in folded(plan("far-back", (EXPERTS,) * 9)):
        assert len(drawn) >= min(2, len(whole))  # shared@2 and routed@4 go back over two layers


def test_to_html_writes_the_page(tmp_path):
    target = plan("farskip").to_html(tmp_path / "plan.html")
    assert target.read_text(encoding="utf-8") == page(plan("farskip"))
