import pytest
import torch
from torch import Tensor

from fxskip.errors import PassError
from fxskip.ir import show, writes
from fxskip.passes.find_stream import find_stream
from fxskip.passes.functionalise import functionalise
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


def test_every_write_and_the_block_before_it() -> None:
    before = capture(moe_layer)
    text = show(before)
    after = find_stream(before)

    assert (
        show(after)
        == """\
  0  l_streams_0_
  1  stream_in_default stream_in(l_streams_0_, 0)               input 0
  2  n            sin(stream_in_default)                   compute 1
  3  a            scaled_dot_product_attention(n, n, n)    compute 1
  4  r            add(stream_in_default, a)                residual 1
  5  h            sin(r)                                   compute 2
  6  topk         topk(h, 1)                               compute 2
  7  getitem      getitem(topk, 0)                         compute 2
  8  routed       mul(h, getitem)                          compute 2
  9  rest         tanh(h)                                  compute 2
 10  both         add(routed, rest)                        compute 2
 11  out          add(r, both)                             residual 2
 12  stream_out_default stream_out(out, 0)                       output 0
 13  return (stream_out_default)"""
    )
    assert show(before) == text


def test_values_stay() -> None:
    x = stream()
    r = x + attention(norm(x))
    (got,) = run(find_stream(capture(moe_layer)), x)
    assert torch.equal(got, r + (experts(norm(r)) + shared(norm(r))))


def contribution_first(x: Tensor) -> Tensor:
    a = attention(norm(x))
    x = a + x
    moe = experts(norm(x))
    return moe + x


def in_place(x: Tensor) -> Tensor:
    a = attention(norm(x))
    x += a
    moe = experts(norm(x))
    x.add_(moe)
    return x


def returns_a_tuple(x: Tensor) -> tuple[Tensor, Tensor]:
    a = attention(norm(x))
    x = x + a
    moe = experts(norm(x))
    return x + moe, norm(x)


@pytest.mark.parametrize("body", [contribution_first, in_place, returns_a_tuple])
def test_other_ways_to_write_the_same_stream(body: Body) -> None:
    graph = find_stream(functionalise(capture(body)))
    first, second = writes(graph)

    assert (first.anchor.name, first.contribution.name) == ("stream_in_default", "a")
    assert (second.anchor, second.contribution.name) == (first.result, "moe")


def one_block(x: Tensor) -> Tensor:
    return x + experts(norm(x))


def three_blocks(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    r = r + dense(h)
    return r + experts(norm(r))


@pytest.mark.parametrize(("body", "count"), [(one_block, 1), (moe_layer, 2), (three_blocks, 3)])
def test_any_number_of_sub_blocks(body: Body, count: int) -> None:
    assert [write.number for write in writes(find_stream(capture(body)))] == list(range(1, count + 1))


# --- refusals ------------------------------------------------------------------------------------


def gated_residual(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    gate = r.sigmoid()
    return gate * r + (1 - gate) * experts(h)


def norm_on_the_stream(x: Tensor) -> Tensor:
    r, _ = after_attention(x)
    r = norm(r)
    return r + experts(r)


def dropout_on_the_stream(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return torch.nn.functional.dropout(r + experts(h), 0.1)


def doubled(x: Tensor) -> Tensor:
    return x + x


def scaled_addition(x: Tensor) -> Tensor:
    return torch.add(x, experts(norm(x)), alpha=2)


@pytest.mark.parametrize(
    "body",
    [
        gated_residual,
        norm_on_the_stream,
        dropout_on_the_stream,
        doubled,
        scaled_addition,
    ],
)
def test_a_stream_that_is_no_chain_of_additions(body: Body) -> None:
    with pytest.raises(PassError, match="is not the stream plus the output of one sub-block") as caught:
        find_stream(capture(body))
    assert "\n  hint   " in str(caught.value)


def test_the_refusal_names_the_module() -> None:
    class Gate(torch.nn.Module):
        def forward(self, x: Tensor, moe: Tensor) -> Tensor:
            return torch.lerp(x, moe, 0.5)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate()

        def forward(self, x: Tensor) -> Tensor:
            merged: Tensor = self.gate(x, experts(norm(x)))
            return merged

    with pytest.raises(PassError, match=r"'merged' \(lerp\)[\s\S]*in module gate"):
        find_stream(capture(Layer()))


def test_a_layer_that_adds_nothing() -> None:
    with pytest.raises(PassError, match="the layer adds nothing to the stream"):
        find_stream(capture(lambda x: x))


def test_a_layer_that_ignores_its_input() -> None:
    with pytest.raises(PassError, match="the layer's output does not depend on its input"):
        find_stream(capture(lambda x: torch.ones(2, 3, 4)))


def test_a_stream_that_is_overwritten_in_place() -> None:
    """An addition of another type has no ordinary equivalent, so `functionalise` leaves it."""

    def body(x: Tensor) -> Tensor:
        x += attention(norm(x)).float()
        return x + experts(norm(x))

    with pytest.raises(PassError, match=r"iadd \('x'\) writes into the stream in place"):
        find_stream(functionalise(capture(body)))
