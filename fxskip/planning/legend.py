"""What the signs in the pictures and the terms on the page mean."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping

from fxskip.planning.markup import element

SIGNS = {
    "Thick line": "the residual stream; a plus is where an output is added to it",
    "Thin arrow into a box": "the sub-block reads the full stream",
    "Dashed side line": "the sub-block reads the stream as it left the thick line, without what is added below that "
    "point, except where the side line has a plus of its own. Where it jumps over a line, nothing is added",
    "Filled bar": "data travels between processes, and the sub-blocks beside the bar can run meanwhile",
    "Dashed, empty bar": "data travels, and no other sub-block can run: at most the shared experts of the same MoE",
}

TERMS = {
    "Residual stream": "the running sum that every sub-block reads, through its norm, and adds its output to",
    "Sub-block": "one attention, MoE, dense MLP or other mixer of a layer; it reads the stream once and adds to it",
    "Routed, shared": "the two outputs of a MoE: of the experts that a token is sent to, and of those that every "
    "token passes. Only routed experts are spread over processes",
    "routed@1, all@2": "in a spec: the routed output of the write just before the sub-block, and the whole output "
    "of the write before that one",
    "Dispatch, combine": "under expert parallelism tokens travel to their experts, and the results travel back",
    "All-reduce": "under tensor parallelism the parts of a sub-block's output are summed over processes",
}


def legend(entries: Mapping[str, str]) -> ET.Element:
    """`SIGNS` or `TERMS` as a list of definitions."""
    pairs = [(element("dt", name), element("dd", text)) for name, text in entries.items()]
    return element("dl", *(part for pair in pairs for part in pair), class_="key")
