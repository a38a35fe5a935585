"""Decoder layers of a few lines, captured as the product captures real ones, and ways to wire and run their graphs.

The parts have no parameters and use one operation each, so a captured graph fits on a page and its values can be
computed in the test from the formula, to the last bit. Streams are [B, S, D] = [2, 3, 4] in float64.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxskip.capture.region import compile_region
from fxskip.ir import remove_markers
from fxskip.wiring import FULL, BlockWiring, RegionWiring, Variant

Body = Callable[[Tensor], Any]
D = 4


def norm(x: Tensor) -> Tensor:
    return x.sin()


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def experts(x: Tensor) -> Tensor:
    """Routed by a top-k over the last dimension."""
    return x * x.topk(1).values


def shared(x: Tensor) -> Tensor:
    return x.tanh()


def dense(x: Tensor) -> Tensor:
    return x.relu()


def moe_layer(x: Tensor) -> Tensor:
    """The plainest MoE layer. The names of its variables are those of the nodes of its graph."""
    n = norm(x)
    a = attention(n)
    r = x + a
    h = norm(r)
    routed = experts(h)
    rest = shared(h)
    both = routed + rest
    return r + both


def after_attention(x: Tensor) -> tuple[Tensor, Tensor]:
    """The stream after attention, and what the MoE reads of it."""
    r = x + attention(norm(x))
    return r, norm(r)


class Layer(nn.Module):
    """A decoder layer whose forward is a function."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, hidden_states: Tensor, **arguments: Tensor) -> Any:
        return self.body(hidden_states, **arguments)


def stream(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def capture(layer: nn.Module | Body, *, inputs: int = 1, outputs: int = 1, **arguments: Tensor) -> fx.Graph:
    """The graph of a layer with markers for so many streams, as the first pass receives it."""
    module = layer if isinstance(layer, nn.Module) else Layer(layer)
    streams = tuple(stream(seed) for seed in range(inputs))
    for tensor in (*streams, *arguments.values()):
        torch._dynamo.mark_static(tensor)  # no placeholders for sizes
    graphs: list[fx.Graph] = []

    def grab(captured: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(captured.graph)
        return fx.GraphModule(captured, remove_markers(captured.graph)).forward

    compile_region(grab, outputs, "grab")(module, type(module), streams, (), arguments)
    (graph,) = graphs
    return graph


def run(graph: fx.Graph, *streams: Tensor) -> tuple[Tensor, ...]:
    """What a graph returns whose only placeholders are its streams."""
    values: tuple[Tensor, ...] = fx.GraphModule({}, remove_markers(graph))(*streams)
    return values


def node(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if n.name == name)


# --- wirings -------------------------------------------------------------------------------------


def lacks(*addends: tuple[int, str]) -> Variant:
    return frozenset(addends)


def block(kind: str, reads: Variant = FULL, addends: tuple[str, ...] = ()) -> BlockWiring:
    return BlockWiring(kind, addends or (("routed", "shared") if kind == "moe" else (kind,)), reads)


FARSKIP = RegionWiring(
    blocks=(block("attention", lacks((0, "routed"))), block("moe", lacks((1, "attention")))),
    inputs=(FULL, lacks((0, "routed"))),
    outputs=(FULL, lacks((2, "routed"))),
)
"""Streams x and y: a reads y; r = x + a; the MoE reads x; x' = r + routed + shared; y' = r + shared."""
