from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxskip.errors import PassError
from fxskip.ir import info, show, writes
from fxskip.passes.classify import classify
from fxskip.passes.find_stream import find_stream
from fxskip.passes.functionalise import functionalise
from tests.passes.graphs import (
    Body,
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


def kinds(graph: fx.Graph) -> list[str]:
    return [about.kind for write in writes(graph) if (about := info(write.result)) is not None]


def test_every_node_of_a_sub_block_carries_its_kind() -> None:
    before = find_stream(capture(moe_layer))
    text = show(before)
    after = classify(before)

    assert (
        show(after)
        == """\
  0  l_streams_0_
  1  stream_in_default stream_in(l_streams_0_, 0)               input 0
  2  n            sin(stream_in_default)                   compute 1 attention
  3  a            scaled_dot_product_attention(n, n, n)    compute 1 attention
  4  r            add(stream_in_default, a)                residual 1 attention
  5  h            sin(r)                                   compute 2 moe
  6  topk         topk(h, 1)                               compute 2 moe
  7  getitem      getitem(topk, 0)                         compute 2 moe
  8  routed       mul(h, getitem)                          compute 2 moe
  9  rest         tanh(h)                                  compute 2 moe
 10  both         add(routed, rest)                        compute 2 moe
 11  out          add(r, both)                             residual 2 moe
 12  stream_out_default stream_out(out, 0)                       output 0
 13  return (stream_out_default)"""
    )
    assert show(before) == text


def test_values_stay() -> None:
    x = stream()
    r = x + attention(norm(x))
    (got,) = run(classify(find_stream(capture(moe_layer))), x)
    assert torch.equal(got, r + (experts(norm(r)) + shared(norm(r))))


# --- what each kind looks like -------------------------------------------------------------------


def fused_attention(x: Tensor) -> Tensor:
    return attention(x)


def eager_attention(x: Tensor) -> Tensor:
    heads = x.unsqueeze(1)
    weights = (heads @ heads.transpose(-1, -2)).softmax(dim=-1)
    return (weights @ heads).squeeze(1)


def selected_keys(x: Tensor) -> Tensor:
    """A mask that leaves two keys to each query: sparse attention with an indexer."""
    scores = x @ x.transpose(-1, -2)
    chosen = scores.topk(2, dim=-1).indices
    return torch.full_like(scores, -1e9).scatter(-1, chosen, 0.0)


def sparse_fused_attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=selected_keys(x))


def sparse_eager_attention(x: Tensor) -> Tensor:
    return (x @ x.transpose(-1, -2) + selected_keys(x)).softmax(dim=-1) @ x


def softmax_router(x: Tensor) -> Tensor:
    """Mixtral: softmax over the experts, the best two, a batched product, weighted sum."""
    tokens = x.reshape(-1, 4)
    weights, chosen = tokens.softmax(dim=-1).topk(2, dim=-1)
    matrices = tokens.new_ones(4, 4, 4)[chosen]
    return ((tokens[:, None, None, :] @ matrices).squeeze(2) * weights[..., None]).sum(1).view(x.shape)


def grouped_sigmoid_router(x: Tensor) -> Tensor:
    """DeepSeek: the best groups of experts first, then the best experts in them."""
    scores = x.sigmoid()
    best_group = scores.view(2, 3, 2, 2).topk(1, dim=-1).values.sum(-1).topk(1, dim=-1).indices
    mask = torch.zeros_like(scores[..., :2]).scatter(-1, best_group, 1.0).repeat_interleave(2, dim=-1)
    return x * (scores * mask).topk(1, dim=-1).values


def gated_mlp(x: Tensor) -> Tensor:
    weight = torch.ones(4, 4, dtype=x.dtype)
    return F.linear(F.silu(F.linear(x, weight)) * x, weight)


def short_convolution(x: Tensor) -> Tensor:
    kernel = torch.ones(4, 1, 3, dtype=x.dtype)
    return F.conv1d(x.transpose(1, 2), kernel, padding=1, groups=4).transpose(1, 2)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (fused_attention, "attention"),
        (eager_attention, "attention"),
        (sparse_fused_attention, "attention"),
        (sparse_eager_attention, "attention"),
        (experts, "moe"),
        (softmax_router, "moe"),
        (grouped_sigmoid_router, "moe"),
        (gated_mlp, "dense"),
        (dense, "dense"),
        (short_convolution, "mixer"),
    ],
)
def test_kinds(part: Body, kind: str) -> None:
    def layer(x: Tensor) -> Tensor:
        x = x + part(norm(x))
        return x + dense(norm(x))

    assert kinds(classify(find_stream(capture(layer)))) == [kind, "dense"]


# --- refusal -------------------------------------------------------------------------------------


def test_attention_and_experts_in_one_sub_block() -> None:
    def parallel(x: Tensor) -> Tensor:
        h = norm(x)
        a = attention(h)
        return x + (a + experts(h))

    with pytest.raises(
        PassError, match="attention and routed experts are added to the stream as one sub-block"
    ) as e:
        classify(find_stream(capture(parallel)))
    assert "'a' in the decoder layer, 'topk' in the decoder layer" in str(e.value)


def test_a_block_that_reads_an_argument_of_the_call_is_not_called_dense() -> None:
    """No operation names what it is, but it reads a mask: an MLP would not."""

    def layer(x: Tensor, *, mask: Tensor) -> Tensor:
        return x + norm(x).relu() * mask

    with pytest.raises(PassError, match="cannot tell what this sub-block is"):
        classify(find_stream(capture(layer, mask=torch.ones(2, 3, 4))))


# --- what mixes tokens is no dense block -----------------------------------------------------------


def cumulative(x: Tensor) -> Tensor:
    return x.cumsum(1)


def token_by_token(x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for index in range(3):
        state = 0.5 * state + x[:, index]
        out.append(state)
    return torch.stack(out, 1)


def shifted(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def linear_attention(x: Tensor) -> Tensor:
    return x @ (x.transpose(1, 2) @ x)


@pytest.mark.parametrize("mixer", [cumulative, token_by_token, shifted, linear_attention])
def test_a_block_that_joins_tokens_is_a_mixer(mixer: Callable[[Tensor], Tensor]) -> None:
    graph = classify(find_stream(functionalise(capture(lambda x: x + mixer(norm(x))))))
    assert [info(write.result).kind for write in writes(graph)] == ["mixer"]


def gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * b.sigmoid(), x[..., :2]], -1)


def test_a_block_that_splits_each_token_is_dense() -> None:
    graph = classify(find_stream(capture(lambda x: x + gated(norm(x)))))
    assert [info(write.result).kind for write in writes(graph)] == ["dense"]


def by_sorting(x: Tensor) -> Tensor:
    values, order = x.sort(-1, descending=True)
    return x * values[..., :1]


def by_maximum(x: Tensor) -> Tensor:
    values, chosen = x.max(-1, keepdim=True)
    return x * values * chosen


@pytest.mark.parametrize("experts", [by_sorting, by_maximum])
def test_experts_may_be_chosen_without_a_top_k(experts: Callable[[Tensor], Tensor]) -> None:
    graph = classify(find_stream(capture(lambda x: x + experts(norm(x)))))
    assert [info(write.result).kind for write in writes(graph)] == ["moe"]
