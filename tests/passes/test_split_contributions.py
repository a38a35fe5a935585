from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxskip.errors import PassError
from fxskip.ir import block_nodes, info, show, writes
from fxskip.passes.classify import classify
from fxskip.passes.find_stream import find_stream
from fxskip.passes.functionalise import functionalise
from fxskip.passes.split_contributions import addends, inseparable_reason, split_contributions
from tests.passes.graphs import (
    Body,
    after_attention,
    attention,
    capture,
    dense,
    experts,
    moe_layer,
    norm,
    run,
    shared,
    stream,
)

BIASES = torch.randn(4, 4, dtype=torch.float64)


def classified(body: Body) -> fx.Graph:
    return classify(find_stream(functionalise(capture(body))))


def roles(graph: fx.Graph, role: str) -> list[str]:
    """The names of the nodes with a role in the MoE block, which makes write 2."""
    return [n.name for n in block_nodes(graph, 2) if (about := info(n)) is not None and about.role == role]


def test_a_sum_and_its_addends() -> None:
    before = classified(moe_layer)
    text = show(before)
    after = split_contributions(before)

    assert (
        show(after)
        == """\
  0  l_streams_0_
  1  stream_in_default stream_in(l_streams_0_, 0)               input 0
  2  n            sin(stream_in_default)                   compute 1 attention
  3  a            scaled_dot_product_attention(n, n, n)    addend 1 attention attention
  4  r            add(stream_in_default, a)                residual 1 attention
  5  h            sin(r)                                   compute 2 moe
  6  topk         topk(h, 1)                               compute 2 moe
  7  getitem      getitem(topk, 0)                         compute 2 moe
  8  routed       mul(h, getitem)                          addend 2 moe routed
  9  rest         tanh(h)                                  addend 2 moe shared
 10  both         add(routed, rest)                        sum 2 moe
 11  out          add(r, both)                             residual 2 moe
 12  stream_out_default stream_out(out, 0)                       output 0
 13  return (stream_out_default)"""
    )
    assert show(before) == text


def test_values_stay() -> None:
    x = stream()
    r = x + attention(norm(x))
    (got,) = run(split_contributions(classified(moe_layer)), x)
    assert torch.equal(got, r + (experts(norm(r)) + shared(norm(r))))


# --- ways to add shared experts ------------------------------------------------------------------


def in_place(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    s = shared(h)
    e = experts(h)
    s.add_(e)
    return r + s


def reshape_around_the_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    tokens = h.reshape(-1, 4)
    e = experts(tokens)
    s = shared(tokens)
    return r + (e + s).reshape(h.shape)


def reshape_inside_the_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e = experts(h.reshape(-1, 4)).reshape(h.shape)
    s = shared(h)
    return r + (e + s)


def gated_shared(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e = experts(h)
    s = h.sigmoid() * shared(h)
    return r + (e + s)


def cast_around_the_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e = experts(h.float())
    s = shared(h.float())
    return r + (e + s).to(dtype=x.dtype)


def scaled_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e = experts(h)
    s = shared(h)
    return r + 0.5 * (e + s)


@pytest.mark.parametrize(
    "body",
    [in_place, reshape_around_the_sum, reshape_inside_the_sum, gated_shared, cast_around_the_sum, scaled_sum],
)
def test_routed_and_shared_are_told_apart(body: Body) -> None:
    graph = split_contributions(classified(body))

    assert sorted(addends(graph, 2)) == ["routed", "shared"]
    assert sorted(roles(graph, "addend")) == ["e", "s"]
    assert addends(graph, 1) == ("attention",)


def two_shared(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e, s, d = experts(h), shared(h), dense(h)
    return r + (s + (e + d))


def test_two_shared_addends_have_one_name() -> None:
    graph = split_contributions(classified(two_shared))

    assert sorted(addends(graph, 2)) == ["routed", "shared"]
    assert sorted(roles(graph, "addend")) == ["d", "e", "s"]


def test_two_routed_addends_are_one_routed_addend() -> None:
    """Nothing can be left out between them, so their sum stays in one piece."""

    def two_routed(x: Tensor) -> Tensor:
        r, h = after_attention(x)
        routed = experts(h) + experts(h.cos())
        s = shared(h)
        return r + (routed + s)

    assert sorted(roles(split_contributions(classified(two_routed)), "addend")) == ["routed", "s"]


def no_shared(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e = experts(h)
    return r + e


def norm_around_the_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e = norm(experts(h) + shared(h))
    return r + e


def dropout_around_the_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e = torch.nn.functional.dropout(experts(h) + shared(h), 0.5)
    return r + e


def rounded_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e = torch.div(experts(h) + shared(h), 2, rounding_mode="floor")
    return r + e


def integer_cast(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    e = (experts(h) + shared(h)).to(torch.int8)
    return r + e


def scattered_into_shared(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    tokens = h.reshape(-1, 4)
    s = shared(tokens)
    s.index_add_(0, torch.arange(6), experts(tokens))
    e = s.view(h.shape)
    return r + e


@pytest.mark.parametrize(
    "body",
    [
        no_shared,
        norm_around_the_sum,
        dropout_around_the_sum,
        rounded_sum,
        integer_cast,
        scattered_into_shared,
    ],
)
def test_what_cannot_be_taken_apart_is_one_routed_addend(body: Body) -> None:
    """f(a + b) is not f(a) + f(b) for a norm, dropout or rounding, and in memory the sum is the only value."""
    graph = split_contributions(classified(body))

    assert addends(graph, 2) == ("routed",)
    assert roles(graph, "addend") == ["e"]


# --- refusals ------------------------------------------------------------------------------------


def test_an_addend_that_is_added_twice() -> None:
    def body(x: Tensor) -> Tensor:
        r, h = after_attention(x)
        s = shared(h)
        return r + (s + experts(h) + s)

    with pytest.raises(PassError, match="'s' is added to the stream more than once in one write"):
        split_contributions(classified(body))


def test_an_addend_that_is_overwritten_after_it_was_added() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        r, h = after_attention(x)
        e, s = experts(h), shared(h)
        r = r + (e + s)
        s[:, 0] = 0.0
        return r, s

    with pytest.raises(PassError, match="'s' is overwritten by setitem after it was added to the stream"):
        split_contributions(classified(body))


# --- experts as a grouped product -----------------------------------------------------------------


def grouped(x: Tensor, extra: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Experts as a grouped product, with something added behind it: of all tokens and the experts chosen for them."""
    r, h = after_attention(x)
    tokens = h.reshape(-1, 4)
    weights, chosen = (tokens @ tokens.new_ones(4, 4)).topk(1)
    ends = torch.full((4,), 6, dtype=torch.int32)
    rows = tokens.repeat(1, 2).bfloat16()  # the product takes rows of a multiple of 16 bytes
    made = F.grouped_mm(rows, rows.new_ones(4, 8, 8), offs=ends).to(x.dtype)[:, :4]
    return r + ((made + extra(tokens, chosen[:, 0])) * weights).view(h.shape)


def bias_of_the_chosen(x: Tensor) -> Tensor:
    return grouped(x, lambda tokens, chosen: BIASES[chosen])


def embedding_of_the_chosen(x: Tensor) -> Tensor:
    return grouped(x, lambda tokens, chosen: F.embedding(chosen, BIASES))


def projection_of_all_tokens(x: Tensor) -> Tensor:
    return grouped(x, lambda tokens, chosen: tokens @ tokens.new_ones(4, 4))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (bias_of_the_chosen, {"routed"}),
        (embedding_of_the_chosen, {"routed"}),
        (projection_of_all_tokens, {"routed", "shared"}),
    ],
)
def test_a_bias_of_experts_is_theirs_and_a_projection_is_not(body: Body, expected: set[str]) -> None:
    graph = split_contributions(classified(body))

    assert set(addends(graph, 2)) == expected
    assert inseparable_reason(graph, writes(graph)[1]) == ""
