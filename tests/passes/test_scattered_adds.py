"""Additions into some positions: apart for the passes, and the original's operation in what runs."""

import pytest
import torch
from torch import Tensor

from fxskip.ir import op_name, show
from fxskip.passes.functionalise import functionalise
from fxskip.passes.scattered_adds import join_scattered_adds, separate_scattered_adds
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.pipeline import analyse, rewire
from fxskip.wiring import FULL, BlockWiring, RegionWiring
from tests.passes.graphs import Body, after_attention, capture, experts, lacks, run, shared, stream


def positions() -> Tensor:
    """Four of the six rows, one of them twice."""
    return torch.arange(4) * 5 % 3


def index_add(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    rows = h.reshape(-1, 4)
    both = shared(rows).index_add(0, positions(), experts(rows)[:4])
    return r + both.view(h.shape)


def in_place(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    rows = h.reshape(-1, 4)
    out = shared(rows)
    out.index_add_(0, positions(), experts(rows)[:4])
    out.index_add_(0, positions(), experts(rows)[2:], alpha=0.5)
    return r + out.view(h.shape)


def scatter_add(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    rows = h.reshape(-1, 4)
    both = shared(rows).scatter_add(dim=0, index=positions()[:, None].expand(-1, 4), src=experts(rows)[:4])
    return r + both.view(h.shape)


def index_put(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    rows = h.reshape(-1, 4)
    out = shared(rows)
    out.index_put_((positions(),), experts(rows)[:4], accumulate=True)
    return r + out.view(h.shape)


BODIES = [index_add, in_place, scatter_add, index_put]


@pytest.mark.parametrize("body", BODIES)
def test_apart_and_together_again(body: Body) -> None:
    graph = capture(body)
    text = show(graph)
    apart = separate_scattered_adds(functionalise(graph))
    assert {"add_scattered", "scattered"} <= {op_name(n) for n in apart.nodes}
    together = join_scattered_adds(apart)

    assert not {"add_scattered", "scattered"} & {op_name(n) for n in together.nodes}
    assert torch.equal(run(together, stream())[0], body(stream()))
    assert show(graph) == text


@pytest.mark.parametrize("body", BODIES)
def test_shared_and_routed_are_told_apart(body: Body) -> None:
    moe = sub_blocks(analyse(capture(body)), layer=0, layer_path="")[1]
    assert (set(moe.addends), moe.inseparable) == ({"routed", "shared"}, "")

    lacking = {name: lacks((2, name)) for name in ("routed", "shared")}
    wiring = RegionWiring(
        (BlockWiring("attention", ("attention",), FULL), BlockWiring("moe", moe.addends, FULL)),
        (FULL,),
        (FULL, *lacking.values()),
    )
    full, unrouted, unshared = run(rewire(capture(body, outputs=3), wiring), stream())
    r, h = after_attention(stream())
    rest = shared(h.reshape(-1, 4)).view(h.shape)
    assert torch.equal(full, body(stream()))
    assert torch.equal(unrouted, r + rest)
    torch.testing.assert_close(unshared, full - rest)


def test_a_loop_adds_in_place_after_its_first_expert() -> None:
    """As many copies of all tokens as there are experts would be made otherwise."""
    together = join_scattered_adds(separate_scattered_adds(functionalise(capture(in_place))))
    assert [op_name(n) for n in together.nodes if "index_add" in op_name(n)] == ["index_add", "index_add_"]


def test_blank_memory_is_left_alone() -> None:
    def blank(x: Tensor) -> Tensor:
        r, h = after_attention(x)
        out = torch.zeros_like(h.reshape(-1, 4))
        out.index_add_(0, positions(), experts(h.reshape(-1, 4))[:4])
        return r + out.view(h.shape)

    graph = functionalise(capture(blank))
    assert show(separate_scattered_adds(graph)) == show(graph)
