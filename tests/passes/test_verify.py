"""verify must catch every graph that reroute could wrongly have made: mutants of right ones."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fxskip.errors import PassError
from fxskip.ir import NodeInfo, annotate, copy_graph, info, show
from fxskip.passes.reroute import reroute
from fxskip.passes.verify import verify
from fxskip.pipeline import analyse
from fxskip.wiring import FULL, RegionWiring
from tests.passes.graphs import FARSKIP, attention, block, capture, experts, lacks, node, norm, shared
from tests.passes.test_reroute import CASES, Case


def layer(x: Tensor) -> Tensor:
    """Routed and shared experts, with a scale and a cast around their sum."""
    n = norm(x)
    a = attention(n)
    r = x + a
    h = norm(r)
    routed = experts(h)
    rest = shared(h)
    both = routed + rest
    scaled = both * 0.5
    cast = scaled.to(dtype=torch.float64)
    return r + cast


@pytest.fixture(scope="module")
def right() -> fx.Graph:
    return reroute(analyse(capture(layer, inputs=2, outputs=2)), FARSKIP)


def test_the_right_graph(right: fx.Graph) -> None:
    """The mutants below name its nodes."""
    text = show(right)
    assert verify(right, FARSKIP) is right
    assert (
        text
        == """\
  0  l_streams_0_
  1  l_streams_1_
  2  stream_in_default stream_in(l_streams_0_, 0)               input 0
  3  stream_in_default_1 stream_in(l_streams_1_, 1)               input 0
  4  n            sin(stream_in_default_1)                 compute 1 attention
  5  a            scaled_dot_product_attention(n, n, n)    addend 1 attention attention
  6  r            add(stream_in_default, a)                residual 1 attention
  7  h            sin(stream_in_default)                   compute 2 moe
  8  topk         topk(h, 1)                               compute 2 moe
  9  getitem      getitem(topk, 0)                         compute 2 moe
 10  routed       mul(h, getitem)                          addend 2 moe routed
 11  rest         tanh(h)                                  addend 2 moe shared
 12  both         add(routed, rest)                        sum 2 moe
 13  scaled       mul(both, 0.5)                           sum 2 moe
 14  cast         to(scaled, dtype=torch.float64)          sum 2 moe
 15  scaled_1     mul(rest, 0.5)                           sum 2 moe
 16  cast_1       to(scaled_1, dtype=torch.float64)        sum 2 moe
 17  out          add(r, cast)                             residual 2 moe
 18  add          add(r, cast_1)                           variant 2
 19  stream_out_default stream_out(add, 1)                       output 0
 20  stream_out_default_1 stream_out(out, 0)                       output 0
 21  return (stream_out_default_1, stream_out_default)"""
    )
    assert show(right) == text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.body.__name__)
def test_all_cases_of_reroute_pass(case: Case) -> None:
    graph = reroute(analyse(capture(case.body, inputs=2, outputs=2)), FARSKIP)
    assert verify(graph, FARSKIP) is graph


# --- mutants -------------------------------------------------------------------------------------

Mutation = Callable[[fx.Graph], object]


def replaced(name: str, old: str, new: str) -> Mutation:
    return lambda graph: node(graph, name).replace_input_with(node(graph, old), node(graph, new))


def arguments(name: str, *args: object) -> Mutation:
    def mutate(graph: fx.Graph) -> None:
        node(graph, name).args = tuple(node(graph, a) if isinstance(a, str) else a for a in args)  # type: ignore[misc]

    return mutate


def added_twice(graph: fx.Graph) -> None:
    variant = node(graph, "add")
    with graph.inserting_after(variant):
        again = graph.call_function(torch.add, (variant, node(graph, "cast_1")))
    annotate(again, NodeInfo("variant", 2))
    again.meta["example_value"] = variant.meta["example_value"]
    node(graph, "stream_out_default").replace_input_with(variant, again)


def subtracted(graph: fx.Graph) -> None:
    node(graph, "out").target = operator.sub


def scaled_addition(graph: fx.Graph) -> None:
    node(graph, "add").kwargs = {"alpha": 2}


def other_cast(graph: fx.Graph) -> None:
    node(graph, "cast_1").kwargs = {"dtype": torch.float32}


def output_marker_lost(graph: fx.Graph) -> None:
    marker = node(graph, "stream_out_default")
    marker.replace_all_uses_with(node(graph, "out"))
    graph.erase_node(marker)


def returned(*names: str) -> Mutation:
    def mutate(graph: fx.Graph) -> None:
        next(n for n in graph.nodes if n.op == "output").args = (tuple(node(graph, name) for name in names),)

    return mutate


def input_marker_lost(graph: fx.Graph) -> None:
    marker = node(graph, "stream_in_default_1")
    marker.replace_all_uses_with(node(graph, "stream_in_default"))
    graph.erase_node(marker)


def reads_a_constant(graph: fx.Graph) -> None:
    reader = node(graph, "h")
    with graph.inserting_before(reader):
        reader.args = (graph.call_function(torch.zeros, (2, 3, 4)),)


MUTANTS: dict[str, Mutation] = {
    "attention reads the other stream": replaced("n", "stream_in_default_1", "stream_in_default"),
    "the MoE reads what it must not see": replaced("h", "stream_in_default", "r"),
    "one operation of the MoE reads another stream": replaced("topk", "h", "r"),
    "the MoE reads an addend": replaced("h", "stream_in_default", "a"),
    "the MoE reads inside the attention": replaced("topk", "h", "n"),
    "the MoE reads past the marker": replaced("h", "stream_in_default", "l_streams_0_"),
    "the MoE reads no stream": reads_a_constant,
    "an addend is dropped from the full stream": replaced("out", "cast", "cast_1"),
    "an addend is dropped inside the sum": replaced("scaled", "both", "rest"),
    "an addend replaces the other": arguments("both", "rest", "rest"),
    "an addend is added twice": added_twice,
    "the attention is lost": replaced("out", "r", "stream_in_default"),
    "the attention is lost from a variant": replaced("add", "r", "stream_in_default"),
    "a variant starts from another stream": replaced("add", "r", "stream_in_default_1"),
    "a variant has an addend too many": replaced("add", "cast_1", "cast"),
    "a variant lost the scale": replaced("cast_1", "scaled_1", "rest"),
    "a variant has another scale": arguments("scaled_1", "rest", 0.25),
    "a variant lost the cast": replaced("add", "cast_1", "scaled_1"),
    "a variant has another cast": other_cast,
    "an addition became a subtraction": subtracted,
    "an addition is scaled": scaled_addition,
    "the full stream leaves as the variant": replaced("stream_out_default", "add", "out"),
    "the variant leaves as the full stream": replaced("stream_out_default_1", "out", "add"),
    "the streams leave in another order": returned("stream_out_default", "stream_out_default_1"),
    "one stream leaves twice": returned("stream_out_default_1", "stream_out_default_1"),
    "a stream leaves unmarked": output_marker_lost,
    "a stream does not enter": input_marker_lost,
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_mutant_is_caught(right: fx.Graph, name: str) -> None:
    mutant = copy_graph(right)
    MUTANTS[name](mutant)
    mutant.lint()
    assert show(mutant) != show(right), "the mutation changed nothing"

    with pytest.raises(PassError) as caught:
        verify(mutant, FARSKIP)
    assert "\n  hint   " in str(caught.value)


def test_the_message_names_reader_found_and_expected(right: fx.Graph) -> None:
    mutant = copy_graph(right)
    MUTANTS["the MoE reads what it must not see"](mutant)

    with pytest.raises(
        PassError, match="sub-block 2.*'r' = .*a.*stream_in_default, but the spec gives it stream_in"
    ):
        verify(mutant, FARSKIP)


@pytest.mark.parametrize(
    "other",
    [
        RegionWiring((block("attention"), FARSKIP.blocks[1]), FARSKIP.inputs, FARSKIP.outputs),
        RegionWiring((FARSKIP.blocks[0], block("moe")), FARSKIP.inputs, FARSKIP.outputs),
        RegionWiring(FARSKIP.blocks, FARSKIP.inputs, (FULL, lacks((2, "shared")))),
        RegionWiring(FARSKIP.blocks, FARSKIP.inputs, (FULL,)),
        RegionWiring(FARSKIP.blocks, FARSKIP.inputs, (*FARSKIP.outputs, lacks((1, "attention")))),
        RegionWiring(FARSKIP.blocks, (*FARSKIP.inputs, lacks((-1, "attention"))), FARSKIP.outputs),
    ],
    ids=["attention", "moe", "other output", "fewer outputs", "more outputs", "more inputs"],
)
def test_the_right_graph_of_another_wiring_is_caught(right: fx.Graph, other: RegionWiring) -> None:
    with pytest.raises(PassError):
        verify(right, other)


def test_a_lost_annotation_is_caught(right: fx.Graph) -> None:
    mutant = copy_graph(right)
    del node(mutant, "add").meta["fxskip"]
    assert info(node(mutant, "add")) is None

    with pytest.raises(PassError, match="is part of a stream but is no sum of addends"):
        verify(mutant, FARSKIP)
