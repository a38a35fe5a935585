"""Which sums over ranks become one, what the result computes, and what the check of partial values refuses."""

import operator
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fxskip.errors import PassError
from fxskip.ir import copy_graph, op_name, show
from fxskip.leaves import run_leaf
from fxskip.passes.merge_collectives import merge_collectives, merges
from fxskip.passes.partial_values import enter, marked, partial, reduce, require_reduced
from fxskip.passes.reroute import reroute
from fxskip.pipeline import analyse
from fxskip.wiring import FULL, RegionWiring
from tests.passes.graphs import (
    FARSKIP,
    Body,
    attention,
    block,
    capture,
    experts,
    moe_layer,
    node,
    norm,
    shared,
    stream,
)
from tests.passes.lockstep import in_lockstep

PLAIN = RegionWiring(blocks=(block("attention"), block("moe")), inputs=(FULL,), outputs=(FULL,))


def wired(body: Body, wiring: RegionWiring) -> fx.Graph:
    streams = {"inputs": len(wiring.inputs), "outputs": len(wiring.outputs)}
    return reroute(analyse(capture(body, **streams)), wiring)


def sharded(graph: fx.Graph, **axes: str) -> fx.Graph:
    """A copy in which the named operations are computed in parts, over the axis that is given for each."""
    new = copy_graph(graph)
    for name, axis in axes.items():
        made = node(new, name)
        for operand in made.all_input_nodes:
            made.replace_input_with(operand, marked(new, enter, operand, axis))
        readers = list(made.users)
        whole = marked(new, reduce, marked(new, partial, made, axis), axis)
        for reader in readers:
            reader.replace_input_with(made, whole)
    new.lint()
    return new


def forward_merges(graph: fx.Graph) -> set[tuple[str, ...]]:
    return {m.values for m in merges(graph) if m.when == "forward"}


def sums(graph: fx.Graph) -> int:
    return sum(n.target is reduce for n in graph.nodes)


def assert_computes(graph: fx.Graph, plain: fx.Graph) -> None:
    """On every rank what the graph without marks computes, up to rounding."""
    inputs = [stream(seed) for seed in range(sum(n.op == "placeholder" for n in plain.nodes))]
    want = in_lockstep(plain, inputs)[0]
    for got in in_lockstep(graph, inputs):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


ALL = {"a": "tensor", "routed": "tensor", "rest": "tensor"}


def test_farskip_sums_attention_and_shared_experts_together() -> None:
    """Both are in x' and y'; routed experts are in x' alone, and r is read by nobody."""
    plain = wired(moe_layer, FARSKIP)
    graph = sharded(plain, **ALL)
    merged = require_reduced(merge_collectives(graph))
    assert forward_merges(graph) == {("a", "rest"), ("routed",)}
    assert sums(merged) == 2
    assert_computes(merged, plain)
    added = [line.split(None, 2)[2] for line in show(merged).splitlines() if " add(" in line]
    assert [line.split(")")[0] for line in added] == [
        "add(partial, partial_2",
        "add(stream_in_default, reduce_3",
        "add(add_2, reduce_1",
    ]


def test_the_plain_wiring_reads_attention_alone() -> None:
    plain = wired(moe_layer, PLAIN)
    graph = sharded(plain, **ALL)
    assert forward_merges(graph) == {("a",), ("routed", "rest")}
    assert_computes(merge_collectives(graph), plain)
    alone = next(m for m in merges(graph) if m.values == ("a",))
    assert not alone.is_merged
    assert alone.reason == "no other sum over the axis 'tensor' is a term of just r, out"


def test_sums_over_other_ranks_stay_apart() -> None:
    plain = wired(moe_layer, FARSKIP)
    graph = sharded(plain, **ALL | {"rest": "expert"})
    assert forward_merges(graph) == {("a",), ("rest",), ("routed",)}
    assert_computes(merge_collectives(graph), plain)


def scaled_and_viewed(x: Tensor) -> Tensor:
    """A MoE on [T, D] whose sum is scaled and viewed as the size of the stream, as Llama 4 writes it."""
    r = x + attention(norm(x))
    h = norm(r).view(-1, 4)
    routed = experts(h)
    rest = shared(h)
    both = (routed + rest) * 0.5
    return r + both.view(r.size())


def gated(x: Tensor) -> Tensor:
    """A shared expert behind a gate, as Qwen2-MoE has it."""
    r = x + attention(norm(x))
    h = norm(r).view(-1, 4)
    routed = experts(h)
    rest = shared(h)
    gate = h.sum(-1, keepdim=True).sigmoid()
    both = routed + gate * rest
    return r + both.view(x.shape)


@pytest.mark.parametrize("body", [scaled_and_viewed, gated])
@pytest.mark.parametrize("wiring", [FARSKIP, PLAIN], ids=["farskip", "plain"])
def test_sums_pass_views_scales_and_gates_that_pay(body: Body, wiring: RegionWiring) -> None:
    plain = wired(body, wiring)
    names = {"scaled_dot_product_attention": "tensor", "routed": "tensor", "rest": "tensor"}
    graph = sharded(
        plain, **{n.name: "tensor" for n in plain.nodes if n.name in names or op_name(n) in names}
    )
    merged = require_reduced(merge_collectives(graph))
    assert (sums(graph), sums(merged)) == (3, 2)
    assert_computes(merged, plain)


def test_a_gate_that_does_not_pay_is_not_passed() -> None:
    graph = sharded(wired(gated, PLAIN), rest="tensor")
    assert [show(graph).count("enter("), show(merge_collectives(graph)).count("enter(")] == [1, 1]


def test_a_term_that_is_added_twice_stays_alone() -> None:
    """The sum of both would be twice in what is read."""
    plain, marks = fx.Graph(), fx.Graph()
    for graph in (plain, marks):
        x = graph.placeholder("x")
        x.meta["example_value"] = stream()
        terms = [graph.call_function(function, (x,)) for function in (torch.sin, torch.tanh)]
        for term in terms:
            term.meta.update(x.meta)
        if graph is marks:
            terms = [
                marked(graph, reduce, marked(graph, partial, term, "tensor"), "tensor") for term in terms
            ]
        total = graph.call_function(operator.add, (terms[0], terms[1]))
        total.meta.update(x.meta)
        total = graph.call_function(operator.add, (total, terms[1]))
        total.meta.update(x.meta)
        graph.output((total,))
    assert forward_merges(marks) == {("sin",), ("tanh",)}
    assert_computes(merge_collectives(marks), plain)


def test_views_of_one_value_enter_once() -> None:
    def two_views(x: Tensor) -> Tensor:
        r = x + attention(norm(x))
        h = norm(r)
        flat = h.view(-1, 4)
        routed = experts(flat)
        rest = shared(h)
        return r + (routed.view(x.shape) + rest)

    plain = wired(two_views, PLAIN)
    graph = sharded(plain, routed="tensor", rest="tensor")
    merged = require_reduced(merge_collectives(graph))
    assert [show(g).count(" enter(") for g in (graph, merged)] == [3, 2]  # the choice of experts is the other
    assert ("h", "flat") in {m.values for m in merges(graph) if m.when == "backward"}
    assert_computes(merged, plain)


# --- random graphs -------------------------------------------------------------------------------


class _Twins:
    """Two graphs that grow alike: one computes whole values, the other parts that are marked and summed."""

    def __init__(self) -> None:
        self.graphs = (fx.Graph(), fx.Graph())
        self.x = tuple(graph.placeholder("x") for graph in self.graphs)
        for made in self.x:
            made.meta["example_value"] = stream()

    def call(self, function: Callable[..., Tensor], *operands: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        made = tuple(
            g.call_function(function, tuple(o[i] for o in operands)) for i, g in enumerate(self.graphs)
        )
        for one in made:
            one.meta["example_value"] = function(*(o[0].meta["example_value"] for o in operands))
        return made

    def part(self, operand: tuple[fx.Node, ...], axis: str) -> tuple[fx.Node, ...]:
        whole, part = self.call(torch.sin, operand)
        marks = self.graphs[1]
        return whole, marked(marks, reduce, marked(marks, partial, part, axis), axis)


def random_graph(seed: int) -> tuple[fx.Graph, fx.Graph]:
    """Sums of parts in random orders and groupings, readers of the sums, and parts that are made of what was read."""
    choose = random.Random(seed)
    twins = _Twins()
    read, parts = [twins.x], []
    for _ in range(choose.randint(1, 3)):
        axes = ["tensor"] * 4 + ["expert"]
        parts += [twins.part(choose.choice(read), choose.choice(axes)) for _ in range(choose.randint(2, 4))]
        for _ in range(choose.randint(1, 2)):
            terms = [*choose.sample(parts, choose.randint(2, len(parts))), choose.choice(read)]
            while len(terms) > 1:
                at = choose.randrange(len(terms) - 1)
                terms[at : at + 2] = [twins.call(operator.add, terms[at], terms[at + 1])]
            read.append(twins.call(torch.tanh, terms[0]))
    plain, marks = twins.graphs
    for index, graph in enumerate(twins.graphs):
        graph.output(tuple(pair[index] for pair in read))
    return plain, marks


def test_random_graphs_compute_the_same_with_no_more_sums() -> None:
    fewer = 0
    for seed in range(200):
        plain, marks = random_graph(seed)
        merged = merge_collectives(marks)
        assert_computes(merged, plain)
        assert sums(merged) <= sums(marks)
        fewer += sums(merged) < sums(marks)
    assert 50 < fewer < 200


# --- the check -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right() -> fx.Graph:
    return sharded(wired(moe_layer, FARSKIP), **ALL)


def drop(graph: fx.Graph, dropped: fx.Node) -> None:
    dropped.replace_all_uses_with(dropped.args[0])  # type: ignore[arg-type]
    graph.erase_node(dropped)


def _without_a_sum(graph: fx.Graph) -> None:
    drop(graph, next(n for n in graph.nodes if n.target is reduce))


def _without_an_entrance(graph: fx.Graph) -> None:
    drop(graph, next(n for n in graph.nodes if n.target is enter))


def _summed_over_other_ranks(graph: fx.Graph) -> None:
    summed = next(n for n in graph.nodes if n.target is reduce)
    summed.args = (summed.args[0], "expert")


def _summed_twice(graph: fx.Graph) -> None:
    summed = next(n for n in graph.nodes if n.target is reduce)
    again = marked(graph, reduce, summed, "tensor")
    summed.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def _never_marked_as_partial(graph: fx.Graph) -> None:
    for mark in [n for n in graph.nodes if n.target in (partial, reduce)][::-1]:
        drop(graph, mark)


def _read_through_a_norm(graph: fx.Graph) -> None:
    part = next(n for n in graph.nodes if n.target is partial)
    with graph.inserting_after(part):
        read = graph.call_function(torch.sin, (part,))
    read.meta.update(part.meta)
    part.replace_all_uses_with(read, delete_user_cb=lambda user: user is not read)


def _in_a_leaf(graph: fx.Graph) -> None:
    made = node(graph, "rest")
    made.target, made.args = run_leaf, ("mlp", "experts", made.args, {})


MUTANTS = {
    _without_a_sum: r"add \('r'\) needs the whole sum; 'partial' is partial on the axis 'tensor'",
    _without_an_entrance: r"enter|takes a value",
    _summed_over_other_ranks: r"reduce \('reduce'\) takes a value that is partial on the axis 'expert'",
    _summed_twice: r"reduce \('reduce_3'\) takes a value that is partial .* its operand has no tag",
    _never_marked_as_partial: r"reads \[.*\], which did not enter",
    _read_through_a_norm: r"sin \('sin'\) needs the whole sum",
    _in_a_leaf: r"runs as it is, with parameters that all ranks have alike",
}


def test_the_right_graph_is_accepted(right: fx.Graph) -> None:
    assert show(require_reduced(right)) == show(right)


@pytest.mark.parametrize("change", MUTANTS, ids=lambda change: change.__name__.strip("_"))
def test_a_wrong_graph_is_refused(right: fx.Graph, change: Callable[[fx.Graph], None]) -> None:
    graph = copy_graph(right)
    change(graph)
    with pytest.raises(PassError, match=MUTANTS[change]):
        require_reduced(graph)
