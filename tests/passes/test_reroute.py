from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, fx

from fxskip.errors import PassError
from fxskip.ir import show
from fxskip.passes.reroute import reroute
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.pipeline import analyse
from fxskip.wiring import FULL, RegionWiring
from tests.passes.graphs import (
    FARSKIP,
    Body,
    after_attention,
    attention,
    block,
    capture,
    dense,
    experts,
    lacks,
    moe_layer,
    node,
    norm,
    run,
    shared,
    stream,
)


def analysed(body: Body, wiring: RegionWiring) -> fx.Graph:
    return analyse(capture(body, inputs=len(wiring.inputs), outputs=len(wiring.outputs)))


def test_farskip() -> None:
    before = analysed(moe_layer, FARSKIP)
    text = show(before)
    after = reroute(before, FARSKIP)

    assert (
        show(after)
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
 13  out          add(r, both)                             residual 2 moe
 14  add          add(r, rest)                             variant 2
 15  stream_out_default stream_out(add, 1)                       output 0
 16  stream_out_default_1 stream_out(out, 0)                       output 0
 17  return (stream_out_default_1, stream_out_default)"""
    )
    assert show(before) == text


def test_without_rules_the_graph_stays_as_it_is() -> None:
    wiring = RegionWiring((block("attention"), block("moe")), (FULL,), (FULL,))
    before = analysed(moe_layer, wiring)
    assert show(reroute(before, wiring)) == show(before)


# --- the numbers under farskip, for each way to write a layer --------------------------------------


class Case(NamedTuple):
    """A layer, and from what the MoE reads: all that it writes, and the part that is not routed (None for nothing)."""

    body: Body
    whole: Callable[[Tensor], Tensor]
    rest: Callable[[Tensor], Tensor | None]


def plain(h: Tensor) -> Tensor:
    return experts(h) + shared(h)


def reshaped_outside(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    tokens = h.reshape(-1, 4)
    return r + (experts(tokens) + shared(tokens)).view(h.shape)


def reshaped_inside(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return r + (experts(h.reshape(-1, 4)).view(h.shape) + shared(h))


def in_place_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    out = shared(h)
    out.add_(experts(h))
    return r + out


def in_place_sum_in_a_view(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    out = shared(h.reshape(-1, 4)).view(h.shape)
    out += experts(h)
    return r + out


def in_place_stream(x: Tensor) -> Tensor:
    x += attention(norm(x))
    h = norm(x)
    x += experts(h) + shared(h)
    return x


def in_place_scale(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    out = experts(h) + shared(h)
    out *= 0.5
    return r + out


def scaled(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return r + (experts(h) + shared(h)) * 0.5


def cast(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return r + (experts(h.float()) + shared(h.float())).to(x.dtype)


def two_shared(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return r + (experts(h) + shared(h) + dense(h))


def shared_outside_and_inside(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return r + (shared(h) + (dense(h) + experts(h)))


def two_routed(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return r + (experts(h) + experts(h.cos()) + shared(h))


def gated_shared(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return r + (experts(h) + h.sigmoid() * shared(h))


def no_shared(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return r + experts(h)


def contribution_first(x: Tensor) -> Tensor:
    r = attention(norm(x)) + x
    h = norm(r)
    return (experts(h) + shared(h)) + r


CASES = [
    Case(moe_layer, plain, shared),
    Case(reshaped_outside, plain, shared),
    Case(reshaped_inside, plain, shared),
    Case(in_place_sum, lambda h: shared(h) + experts(h), shared),
    Case(in_place_sum_in_a_view, lambda h: shared(h) + experts(h), shared),
    Case(in_place_stream, plain, shared),
    Case(in_place_scale, lambda h: plain(h) * 0.5, lambda h: shared(h) * 0.5),
    Case(scaled, lambda h: plain(h) * 0.5, lambda h: shared(h) * 0.5),
    Case(cast, lambda h: plain(h.float()).double(), lambda h: shared(h.float()).double()),
    Case(two_shared, lambda h: experts(h) + shared(h) + dense(h), lambda h: shared(h) + dense(h)),
    Case(
        shared_outside_and_inside,
        lambda h: shared(h) + (dense(h) + experts(h)),
        lambda h: shared(h) + dense(h),
    ),
    Case(two_routed, lambda h: experts(h) + experts(h.cos()) + shared(h), shared),
    Case(gated_shared, lambda h: experts(h) + h.sigmoid() * shared(h), lambda h: h.sigmoid() * shared(h)),
    Case(no_shared, experts, lambda h: None),
    Case(contribution_first, plain, shared),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.body.__name__)
def test_farskip_computes_the_formula(case: Case) -> None:
    ours, theirs = ([stream(seed).requires_grad_() for seed in (1, 2)] for _ in range(2))
    before = analysed(case.body, FARSKIP)
    moe = sub_blocks(before, layer=0, layer_path="")[1]
    assert sorted(moe.addends) == (["routed"] if case.body is no_shared else ["routed", "shared"])
    graph = reroute(before, FARSKIP)

    x, y = theirs
    r = x + attention(norm(y))
    h = norm(x)
    rest = case.rest(h)
    expected = (r + case.whole(h), r if rest is None else r + rest)

    # A leaf may not be overwritten while autograd watches, so a layer that does is given a copy, as in a model.
    got = run(graph, *(tensor.clone() for tensor in ours))
    for stream_got, stream_expected in zip(got, expected, strict=True):
        assert torch.equal(stream_got, stream_expected)
    for outcome in (got, expected):
        (outcome[0].square().sum() + outcome[1].cos().sum()).backward()
    # Gradients of a value with several readers are added in another order, in float32 where the layer casts to it.
    tolerance = 1e-5 if case.body is cast else 1e-12
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=tolerance)


# --- other wirings -------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [moe_layer, scaled, in_place_scale, reshaped_outside])
def test_several_variants_of_one_write(body: Body) -> None:
    """Streams without routed, without shared, and without routed and the attention before it."""
    variants = (lacks((2, "shared")), lacks((1, "attention"), (2, "routed")), lacks((2, "routed")))
    wiring = RegionWiring((block("attention"), block("moe")), (FULL,), (FULL, *variants))
    factor = 0.5 if body in (scaled, in_place_scale) else 1.0

    x = stream()
    r = x + attention(norm(x))
    h = norm(r)
    routed, rest = experts(h) * factor, shared(h) * factor
    expected = (r + (experts(h) + shared(h)) * factor, r + routed, x + rest, r + rest)
    got = run(reroute(analysed(body, wiring), wiring), x)
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(ours, theirs), f"stream {number}"


def test_ladder() -> None:
    no_attention, no_moe = lacks((1, "attention")), lacks((0, "routed"), (0, "shared"))
    wiring = RegionWiring(
        blocks=(block("attention", no_moe), block("moe", no_attention)),
        inputs=(FULL, no_moe),
        outputs=(FULL, lacks((2, "routed"), (2, "shared"))),
    )
    x, y = stream(1), stream(2)
    r = x + attention(norm(y))

    full, without_moe = run(reroute(analysed(moe_layer, wiring), wiring), x, y)
    assert torch.equal(full, r + plain(norm(x)))
    assert torch.equal(without_moe, r)


def test_a_write_in_the_middle_is_missing() -> None:
    """Each block sees the write just before it, but not the one before that."""
    last_attention, last_moe = lacks((-1, "attention")), lacks((0, "routed"), (0, "shared"))
    wiring = RegionWiring(
        blocks=(block("attention", last_attention), block("moe", last_moe)),
        inputs=(FULL, last_attention, last_moe),
        outputs=(FULL, lacks((1, "attention")), lacks((2, "routed"), (2, "shared"))),
    )
    x, y, z = stream(1), stream(2), stream(3)
    a = attention(norm(y))
    moe = plain(norm(z + a))

    got = run(reroute(analysed(moe_layer, wiring), wiring), x, y, z)
    for ours, theirs in zip(got, (x + a + moe, x + moe, x + a), strict=True):
        assert torch.equal(ours, theirs)


def test_a_stream_only_passes_through() -> None:
    """Attention two layers on lacks the write before this layer: everything written here is added to it."""
    earlier = lacks((-1, "attention"))
    wiring = RegionWiring((block("attention"), block("moe")), (FULL, earlier), (FULL, earlier))
    x, y = stream(1), stream(2)
    a = attention(norm(x))
    moe = plain(norm(x + a))

    full, passed = run(reroute(analysed(moe_layer, wiring), wiring), x, y)
    assert torch.equal(full, x + a + moe)
    assert torch.equal(passed, y + a + moe)


def test_a_split_sum() -> None:
    wiring = replace(FARSKIP, split_sum=True)
    x, y = stream(1), stream(2)
    r, h = x + attention(norm(y)), norm(x)

    full, without_routed = run(reroute(analysed(scaled, wiring), wiring), x, y)
    assert torch.equal(full, (r + shared(h) * 0.5) + experts(h) * 0.5)
    assert torch.equal(without_routed, r + shared(h) * 0.5)


def test_layers_of_one_and_of_three_sub_blocks() -> None:
    def three(x: Tensor) -> Tensor:
        r, h = after_attention(x)
        r = r + dense(h)
        return r + experts(norm(r))

    routed = ("routed",)
    wiring = RegionWiring(
        blocks=(
            block("attention"),
            block("dense", lacks((1, "attention"))),
            block("moe", lacks((1, "attention"), (2, "dense")), routed),
        ),
        inputs=(FULL,),
        outputs=(FULL,),
    )
    x = stream()
    (got,) = run(reroute(analysed(three, wiring), wiring), x)
    assert torch.equal(got, x + attention(norm(x)) + dense(norm(x)) + experts(norm(x)))

    no_routed = lacks((0, "routed"))
    wiring = RegionWiring((block("moe", no_routed, routed),), (FULL, no_routed), (FULL, lacks((1, "routed"))))
    x, y = stream(1), stream(2)
    full, without = run(reroute(analysed(lambda x: x + experts(norm(x)), wiring), wiring), x, y)
    assert torch.equal(full, x + experts(norm(y)))
    assert torch.equal(without, x)


# --- refusal -------------------------------------------------------------------------------------


def test_a_block_that_does_not_read_the_stream() -> None:
    graph = analysed(moe_layer, FARSKIP)
    node(graph, "h").args = (node(graph, "n"),)

    with pytest.raises(PassError, match="sub-block 2 reads 0 values of the stream, not one"):
        reroute(graph, FARSKIP)
