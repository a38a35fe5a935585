"""Questions about captured graphs; the graphs are captured from the few lines that stand beside the question."""

import pytest
import torch
from torch import Tensor, fx, nn

from fxskip.errors import PassError
from fxskip.ir import (
    NodeInfo,
    annotate,
    block_nodes,
    copy_graph,
    dataflow,
    info,
    is_add,
    module_path,
    mutated_base,
    op_name,
    reachable,
    remove_markers,
    reverse,
    show,
    storage,
    stream_in,
    stream_inputs,
    stream_out,
    stream_outputs,
    update,
    with_streams,
    writes,
)
from fxskip.pipeline import analyse
from tests.passes.graphs import capture, moe_layer, node, norm, run, stream


def names(nodes: object) -> set[str]:
    return {n.name for n in nodes}  # type: ignore[attr-defined]


# --- printing and copying ------------------------------------------------------------------------


def test_show_prints_arguments_of_all_kinds() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(x, dim=-1)
        both = torch.add(x, weights, alpha=2)
        stacked = torch.stack([both, weights], 0)
        return both, stacked[0, :, None]

    lines = show(capture(body)).splitlines()
    assert lines[2:6] == [
        "  2  weights      softmax(stream_in_default, dim=-1)",
        "  3  both         add(stream_in_default, weights, alpha=2)",
        "  4  stacked      stack((both, weights), 0)",
        "  5  getitem      getitem(stacked, (0, slice(None, None, None), None))",
    ]


def test_two_captures_print_alike() -> None:
    assert show(capture(moe_layer)) == show(capture(moe_layer))


def test_annotating_a_copy_leaves_the_original_alone() -> None:
    graph = analyse(capture(moe_layer))
    text = show(graph)
    new = copy_graph(graph)
    assert show(new) == text

    update(node(new, "routed"), addend="shared")
    annotate(node(new, "h"), NodeInfo("compute", 1))
    node(new, "both").args = (node(new, "rest"), node(new, "rest"))
    assert show(new) != text
    assert show(graph) == text


def test_updating_a_node_that_was_never_annotated() -> None:
    graph = capture(moe_layer)
    assert info(node(graph, "h")) is None
    with pytest.raises(PassError, match="node 'h' has no NodeInfo[\\s\\S]*run find_stream"):
        update(node(graph, "h"), kind="moe")


# --- markers -------------------------------------------------------------------------------------


def test_markers_say_where_streams_enter_and_leave() -> None:
    graph = capture(moe_layer, inputs=2, outputs=3)
    assert [n.args for n in stream_inputs(graph).values()] == [
        (node(graph, "l_streams_0_"), 0),
        (node(graph, "l_streams_1_"), 1),
    ]
    assert sorted(stream_outputs(graph)) == [0, 1, 2]
    assert stream_outputs(graph)[0].args[0] is node(graph, "out")


def test_markers_refuse_to_run() -> None:
    for marker in (stream_in, stream_out):
        with pytest.raises(PassError, match="ran without being captured"):
            marker(stream(), 0)
    with pytest.raises(PassError, match="TORCHDYNAMO_DISABLE"):
        fx.GraphModule({}, capture(moe_layer))(stream())


def test_without_markers_the_graph_computes_the_layer() -> None:
    graph = capture(moe_layer)
    text = show(graph)
    plain = remove_markers(graph)
    assert stream_inputs(plain) == stream_outputs(plain) == {}
    assert torch.equal(fx.GraphModule({}, plain)(stream())[0], moe_layer(stream()))
    assert show(graph) == text


def test_more_streams_can_be_tried_out_on_a_graph_of_one() -> None:
    """It must be what a capture with so many streams is, but for the order of nodes."""
    graph = capture(moe_layer)
    text = show(graph)
    more, captured = with_streams(graph, 3, 2), capture(moe_layer, inputs=3, outputs=2)

    for markers in (stream_inputs, stream_outputs):
        assert sorted(markers(more)) == sorted(markers(captured))
    assert sorted(map(op_name, more.nodes)) == sorted(map(op_name, captured.nodes))
    x, y, z = (stream(seed) for seed in range(3))
    assert torch.equal(run(captured, x, y, z)[0], moe_layer(x))
    assert show(graph) == text


# --- operations ----------------------------------------------------------------------------------


def additions(x: Tensor) -> Tensor:
    functional = torch.add(x, x.sin())
    method = functional.add(x)
    sign = method + x
    scaled = torch.add(sign, x, alpha=2)
    number = scaled + 1.0
    number += x
    return number - x


def test_what_adds_two_tensors() -> None:
    graph = capture(additions)
    assert names(n for n in graph.nodes if is_add(n)) == {"functional", "method", "sign", "number_1"}


def test_what_writes_in_place() -> None:
    def body(x: Tensor) -> Tensor:
        a = x.sin()
        a.add_(x)
        b = a.cos()
        b += x
        b[0] = 1.0
        c = b.__add__(x)
        return c + c.relu_()

    graph = capture(body)
    found = {op_name(n): base.name for n in graph.nodes if (base := mutated_base(n)) is not None}
    assert found == {"add_": "a", "iadd": "b", "setitem": "b_1", "relu_": "c"}
    assert mutated_base(node(graph, "c")) is None


def test_views_share_their_memory_and_results_do_not() -> None:
    def body(x: Tensor) -> Tensor:
        a = x.sin()
        view = a.view(-1, 4).transpose(0, 1)
        copy = view.clone()
        return copy.sum() + x

    graph = capture(body)
    a, view, copy = (storage(node(graph, name)) for name in ("a", "view", "copy"))
    assert a == view
    assert a != copy
    assert storage(next(n for n in graph.nodes if n.op == "output")) is None


def test_a_write_feeds_later_readers_of_the_memory_only() -> None:
    def body(x: Tensor) -> Tensor:
        a = x.sin()
        view = a[..., :]
        early = view.cos()
        a.mul_(2.0)
        late = view.tan()
        return x + early + late

    edges = dataflow(capture(body))
    write = next(n for n in edges if op_name(n) == "mul_")
    after = names(reachable([write], edges))
    assert "late" in after
    assert "early" not in after
    assert write in reachable([next(n for n in edges if n.name == "late")], reverse(edges))


def test_module_paths_start_at_the_layer() -> None:
    class Expert(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Expert(), Expert()])

        def forward(self, x: Tensor) -> Tensor:
            n = norm(x)
            first = self.experts[0](n)
            second = self.experts[1](n)
            return x + (first + second)

    graph = capture(Layer())
    assert module_path(node(graph, "first")) == "experts.0"
    assert module_path(node(graph, "second")) == "experts.1"
    assert module_path(node(graph, "n")) == ""


# --- the annotated stream ------------------------------------------------------------------------


def test_writes_and_the_nodes_of_their_blocks() -> None:
    graph = analyse(capture(moe_layer))
    attention, moe = writes(graph)

    assert (attention.number, attention.anchor.name) == (1, "stream_in_default")
    assert (attention.contribution.name, attention.result.name) == ("a", "r")
    assert (moe.number, moe.anchor.name, moe.contribution.name, moe.result.name) == (2, "r", "both", "out")
    assert names(block_nodes(graph, 1)) == {"n", "a"}
    assert names(block_nodes(graph, 2)) == {"h", "topk", "getitem", "routed", "rest", "both"}
