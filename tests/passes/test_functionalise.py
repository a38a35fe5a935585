import pytest
import torch
from torch import Tensor, fx

from fxskip.ir import mutated_base, show
from fxskip.passes.functionalise import functionalise
from tests.passes.graphs import Body, attention, capture, experts, moe_layer, norm, run, shared, stream


def in_place_everywhere(x: Tensor) -> Tensor:
    n = norm(x)
    a = attention(n)
    x += a
    h = norm(x)
    rest = shared(h)
    routed = experts(h)
    rest.add_(routed)
    rest *= 0.5
    x.add_(rest)
    return x


def writers(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if mutated_base(n) is not None]


def test_in_place_additions_become_ordinary_ones() -> None:
    before = capture(in_place_everywhere)
    text = show(before)
    after = functionalise(before)

    assert (
        show(after)
        == """\
  0  l_streams_0_
  1  stream_in_default stream_in(l_streams_0_, 0)
  2  n            sin(stream_in_default)
  3  a            scaled_dot_product_attention(n, n, n)
  4  x            add(stream_in_default, a)
  5  h            sin(x)
  6  rest         tanh(h)
  7  topk         topk(h, 1)
  8  getitem      getitem(topk, 0)
  9  routed       mul(h, getitem)
 10  add_         add(rest, routed)
 11  rest_1       mul(add_, 0.5)
 12  add__1       add(x, rest_1)
 13  stream_out_default stream_out(add__1, 0)
 14  return (stream_out_default)"""
    )
    assert show(before) == text


def test_the_bits_stay() -> None:
    x = stream()
    r = x + attention(norm(x))
    h = norm(r)

    (got,) = run(functionalise(capture(in_place_everywhere)), x)
    assert torch.equal(got, r + (shared(h) + experts(h)) * 0.5)


def test_the_callers_tensor_is_no_longer_overwritten() -> None:
    """The original overwrites its input. Another block may still have to read it."""
    x, kept = stream(), stream()
    run(functionalise(capture(in_place_everywhere)), x)
    assert torch.equal(x, kept)


def test_a_write_into_a_view_is_one_into_its_tensor() -> None:
    def body(x: Tensor) -> Tensor:
        h = norm(x)
        rest = shared(h.reshape(-1, 4)).view(h.shape)
        rest += experts(h)
        return x + rest

    x = stream()
    after = functionalise(capture(body))
    assert writers(after) == []
    assert torch.equal(run(after, x)[0], x + (shared(norm(x)) + experts(norm(x))))


def seen_through_an_older_view(x: Tensor) -> Tensor:
    h = norm(x)
    rest = shared(h)
    view = rest[..., :]
    rest.add_(experts(h))
    return x + view


def of_another_type(x: Tensor) -> Tensor:
    rest = shared(norm(x)).float()
    rest += experts(norm(x))
    return x + rest


def into_a_part(x: Tensor) -> Tensor:
    rest = shared(norm(x))
    rest[:, 0] += experts(norm(x))[:, 0]
    return x + rest


@pytest.mark.parametrize("body", [seen_through_an_older_view, of_another_type, into_a_part])
def test_what_has_no_ordinary_equivalent_is_left_as_it_is(body: Body) -> None:
    x = stream()
    after = functionalise(capture(body))

    assert writers(after) != []
    assert torch.equal(run(after, x)[0], body(x.clone()))


def test_a_graph_without_writes_is_returned_equal() -> None:
    before = capture(moe_layer)
    assert show(functionalise(before)) == show(before)
