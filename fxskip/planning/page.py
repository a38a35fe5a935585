"""The whole page about a plan."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from fxskip.planning.legend import SIGNS, TERMS, legend
from fxskip.planning.markup import document, element
from fxskip.planning.picture import pictures
from fxskip.planning.plan import Plan, PlannedBlock
from fxskip.planning.words import (
    averaged,
    deployed,
    kind,
    mflop,
    milliseconds,
    short,
    short_path,
    span,
    unseen,
    verdict,
    whole,
)
from fxskip.schedule.sizes import total

_COLUMNS = (
    "Layer",
    "Sub-block",
    "Reads",
    "Can run beside its communication",
    "Parameters",
    "MFLOP a token",
    "Weights",
    "Activations",
    "Estimated us",
)
_NUMBERS = 5
"""Columns of numbers, which are the last ones."""


def page(plan: Plan) -> str:
    """A self-contained HTML page: what `spec` does to the model, in numbers, words, pictures and a table."""
    title = f"{plan.spec} on {plan.model}"
    return document(
        title,
        element("h1", title),
        element(
            "p",
            "What the spec changes in the wiring of the residual stream, and what can run while data travels between "
            "processes. Read off the model's graph; times are estimated, nothing was timed or trained.",
            class_="lead",
        ),
        _headline(plan),
        _in_words(plan),
        wiring_section(plan),
        *_window(plan),
        *_refused(plan),
        _table(plan),
        element("section", element("h2", "Terms"), legend(TERMS)),
        element("footer", f"Wiring {plan.wiring_hash}. Models with the same hash are wired the same way."),
    )


def wiring_section(plan: Plan) -> ET.Element:
    """Both pictures with captions and a key; needs the style sheet that `document` brings."""
    before, after = pictures(plan)
    return element(
        "section",
        element("h2", "Wiring"),
        element(
            "div",
            element("figure", element("figcaption", "Before"), before),
            element("figure", element("figcaption", f"After: {plan.spec}"), after),
            class_="pair",
        ),
        legend(SIGNS),
    )


def _headline(plan: Plan) -> ET.Element:
    experts = [block for block in plan.blocks if block.kind == "moe"]
    dispatches = sum(bool(block.window.dispatch_under) for block in experts)
    combines = sum(bool(block.window.combine_under) for block in experts)
    copies = [
        None if (k := b.costs.experts_per_token) is None else k * b.costs.hidden_size * plan.deployment.bytes
        for b in experts
    ]
    streams = "stream" if plan.streams == 1 else "streams"
    beside = "experts that other sub-blocks can run beside"
    return element(
        "dl",
        _figure(f"{plan.rewired} of {len(plan.blocks)}", "sub-blocks rewired"),
        _figure(f"{dispatches} of {len(experts)}", f"dispatches to {beside}"),
        _figure(f"{combines} of {len(experts)}", f"combines from {beside}"),
        _figure(str(plan.streams), f"{streams} between layers (the original has 1)"),
        _figure(short(total(copies), "B"), "a token sends to experts in one forward pass, and gets back"),
        _figure(short(plan.parameters, "", 4), "parameters; none is added or removed"),
        _figure(short(plan.active_parameters, "", 4), "of them meet a token (embedding table not counted)"),
        class_="headline",
    )


def _figure(number: str, meaning: str) -> ET.Element:
    return element("div", element("dt", meaning), element("dd", number))


def _in_words(plan: Plan) -> ET.Element:
    """One line for each kind of change: which sub-blocks, and what they no longer see."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, block in enumerate(plan.blocks):
        if block.without:
            change = kind(block), ", ".join(unseen(plan, number))
            groups.setdefault(change, []).append(block.layer)
    lines = [
        element("li", element("strong", name), f" in {span(layers)} no longer sees the {what}.")
        for (name, what), layers in groups.items()
    ]
    heading = element("h2", "What changes")
    if not lines:
        return element("section", heading, element("p", "Nothing: every sub-block reads the full stream."))
    return element("section", heading, element("ul", *lines))


def _refused(plan: Plan) -> Iterator[ET.Element]:
    """Where a rule selects a sub-block and changes nothing."""
    groups: dict[str, list[PlannedBlock]] = {}
    for block in plan.blocks:
        if block.refused:
            groups.setdefault(block.refused, []).append(block)
    if groups:
        lines = [
            element("li", element("strong", ", ".join(short_path(b.path) for b in blocks)), f": {reason}")
            for reason, blocks in groups.items()
        ]
        heading = element("h2", "Where a rule changes nothing")
        yield element("section", heading, element("ul", *lines))


def _table(plan: Plan) -> ET.Element:
    rows = [_row(plan, number) for number in range(len(plan.blocks))]
    heads = [element("th", name, scope="col") for name in _COLUMNS]
    for head in heads[-_NUMBERS:]:
        head.set("class", "number")
    context = f"attention at {plan.deployment.context:,} tokens of causal context"
    caption = element("caption", _counted(plan, context))
    table = element("table", caption, element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("section", element("h2", "Sub-blocks"), table)


def _row(plan: Plan, number: int) -> ET.Element:
    block = plan.blocks[number]
    reads = element("span", block.reads, class_="rewired" if block.without else "plain")
    why = [element("small", block.refused)] if block.refused else []
    cells = (
        element("td", str(block.layer)),
        element("td", kind(block), element("small", block.path)),
        element("td", reads, *why),
        element("td", *_beside(block)),
        element("td", f"{block.costs.parameters:,}", class_="number"),
        element("td", mflop(block.costs), class_="number"),
        element("td", short(block.weight_bytes, "B"), class_="number"),
        element("td", short(block.activation_bytes, "B"), class_="number"),
        element("td", whole(block.est_us, ","), class_="number"),
    )
    for name, cell in zip(_COLUMNS, cells, strict=True):
        cell.set("data-name", name)  # shown before the cell on a narrow screen
    return element("tr", *cells, data_block=block.path)


def _counted(plan: Plan, context: str) -> str:
    return (
        f"FLOPs are counted from shapes, forward only, {context}. Weights and activations are the bytes that one rank "
        f"reads and writes; times are estimated from them for {deployed(plan.deployment)}."
    )


def _window(plan: Plan) -> Iterator[ET.Element]:
    """Equation (9) of each layer, where tokens are exchanged."""
    if not plan.layers:
        return
    names = ("Layer", "Exchange", "Room", "Verdict", "Exposed before", "Exposed after")
    rows = []
    for row in plan.layers:
        numbers = (row.exchange_us, row.room_us, row.exposed_before_us, row.exposed_after_us)
        left, right, before, after = (whole(us, ",") for us in numbers)
        texts = (str(row.layer), left, right, verdict(row), before, after)
        cells = [element("td", t, data_name=n) for n, t in zip(names, texts, strict=True)]
        for index in (1, 2, 4, 5):
            cells[index].set("class", "number")
        rows.append(element("tr", *cells))
    forward = plan.forward
    caption = (
        f"Estimated microseconds for {deployed(plan.deployment)}. Exchange is dispatch and combine; room is the "
        "layer's compute without its routed experts and router: equation (9) of the FarSkip paper. Exposed is what "
        "no compute can hide, in the original wiring and in this one. Contention is not modelled. In one forward "
        f"pass: {milliseconds(forward.compute_us)} of compute, {milliseconds(forward.communication_us)} of "
        f"communication, exposed {milliseconds(forward.exposed_before_us)} before and "
        f"{milliseconds(forward.exposed_after_us)} after."
    )
    if plan.gradients is not None:
        caption += f" In {averaged(plan.gradients)}."
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    table = element("table", element("caption", caption), head, element("tbody", *rows))
    yield element("section", element("h2", "Window, estimated"), table)


def _beside(block: PlannedBlock) -> list[ET.Element]:
    volumes: dict[str, str] = {t.name: f" {short(t.bytes, 'B')}" for t in block.transfers}
    trips = [("combine" if block.kind == "moe" else "all-reduce", block.window.combine_under)]
    if block.kind == "moe":
        trips.insert(0, ("dispatch", block.window.dispatch_under))
    return [
        element("div", f"{name}{volumes.get(name, '')}: {', '.join(map(short_path, under)) or 'nothing'}")
        for name, under in trips
    ]
