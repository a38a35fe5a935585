"""Streams beyond `x + f(norm(x))` twice: scaled streams, parallel blocks, shortcuts. Values follow the formula."""

import pytest
import torch
from torch import Tensor, fx

from fxskip.errors import PassError
from fxskip.ir import show, writes
from fxskip.passes.find_stream import find_stream
from fxskip.passes.reroute import reroute
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.passes.unshare import unshare
from fxskip.passes.verify import verify
from fxskip.pipeline import analyse
from fxskip.wiring import FULL, BlockWiring, RegionWiring
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
    norm,
    run,
    shared,
    stream,
)

SCALE = torch.tensor([0.5, 2.0, -1.0, 0.25], dtype=torch.float64)


def rewired(body: Body, wiring: RegionWiring, **arguments: Tensor) -> fx.Graph:
    graph = analyse(capture(body, inputs=len(wiring.inputs), outputs=len(wiring.outputs), **arguments))
    return verify(reroute(unshare(graph, wiring), wiring), wiring)


# --- a stream that is scaled by constants ----------------------------------------------------------


def scaled_by_numbers(x: Tensor) -> Tensor:
    r = 0.9 * x + attention(norm(x))
    h = norm(r)
    return r * 1.1 + (experts(h) + shared(h))


def test_every_variant_is_scaled_as_the_stream_is() -> None:
    x, y = stream(1), stream(2)
    full, without = run(rewired(scaled_by_numbers, FARSKIP), x, y)

    r, h = 0.9 * x + attention(norm(y)), norm(0.9 * x)
    assert torch.equal(full, r * 1.1 + (experts(h) + shared(h)))
    assert torch.equal(without, r * 1.1 + shared(h))


def scaled_at_the_end(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    x = r + (experts(h) + shared(h))
    x *= 0.5
    return x


def test_a_scale_after_the_last_write_is_part_of_what_leaves() -> None:
    x, y = stream(1), stream(2)
    full, without = run(rewired(scaled_at_the_end, FARSKIP), x, y)

    r, h = x + attention(norm(y)), norm(x)
    assert torch.equal(full, (r + (experts(h) + shared(h))) * 0.5)
    assert torch.equal(without, (r + shared(h)) * 0.5)


def scaled_by_a_tensor(x: Tensor, scale: Tensor) -> Tensor:
    r = scale * x + attention(norm(x))
    h = norm(r)
    return (r + scale) + (experts(h) + shared(h))


def test_a_scale_and_a_shift_that_do_not_depend_on_the_stream() -> None:
    graph = rewired(scaled_by_a_tensor, FARSKIP, scale=SCALE)
    x, y = stream(1), stream(2)
    first = next(n.name for n in graph.nodes if n.op == "placeholder")
    inputs = (x, y, SCALE) if "stream" in first else (SCALE, x, y)
    full, without = run(graph, *inputs)

    h = norm(SCALE * x)
    r = SCALE * x + attention(norm(y)) + SCALE
    assert torch.equal(full, r + (experts(h) + shared(h)))
    assert torch.equal(without, r + shared(h))


# --- blocks that read an earlier value than the one they are added to ------------------------------


def parallel(x: Tensor) -> Tensor:
    h = norm(x)
    return x + attention(h) + (experts(h) + shared(h))


PARALLEL = (
    BlockWiring("attention", ("attention",), lacks((0, "routed"))),
    BlockWiring("moe", ("routed", "shared"), lacks((1, "attention")), behind=1),
)


def test_parallel_blocks_are_two_writes_and_share_a_norm() -> None:
    graph = analyse(capture(parallel))
    found = sub_blocks(graph, layer=0, layer_path="")
    assert [(b.kind, b.addends, b.behind) for b in found] == [
        ("attention", ("attention",), 0),
        ("moe", ("routed", "shared"), 1),
    ]
    assert "compute 1,2 attention" in show(graph)


def test_each_parallel_block_gets_a_norm_of_its_own_when_one_of_them_moves() -> None:
    wiring = RegionWiring(PARALLEL, (FULL, lacks((0, "routed"))), (FULL, lacks((2, "routed"))))
    x, y = stream(1), stream(2)
    full, without = run(rewired(parallel, wiring), x, y)

    a, h = attention(norm(y)), norm(x)
    assert torch.equal(full, x + a + (experts(h) + shared(h)))
    assert torch.equal(without, x + a + shared(h))


def test_parallel_blocks_that_stay_keep_their_graph() -> None:
    kept = (block("attention"), PARALLEL[1])
    wiring = RegionWiring(kept, (FULL,), (FULL,))
    graph = analyse(capture(parallel))
    assert show(reroute(unshare(graph, wiring), wiring)) == show(graph)


def shortcut(x: Tensor) -> Tensor:
    """Two dense blocks, and experts that are computed beside them and added at the end."""
    h = norm(x)
    late = experts(h)
    x = x + dense(h)
    x = x + attention(norm(x))
    return x + dense(norm(x)) + late


def test_a_shortcut_reads_where_it_starts_and_writes_where_it_ends() -> None:
    found = sub_blocks(analyse(capture(shortcut)), layer=0, layer_path="")
    assert [(b.kind, b.behind) for b in found] == [("dense", 0), ("attention", 0), ("dense", 0), ("moe", 3)]


def test_a_shortcut_whose_dense_neighbour_moves() -> None:
    unseen = lacks((1, "dense"), (2, "attention"), (3, "dense"))
    wiring = RegionWiring(
        (
            block("dense", lacks((0, "routed"))),
            block("attention"),
            block("dense"),
            BlockWiring("moe", ("routed",), unseen, behind=3),
        ),
        (FULL, lacks((0, "routed"))),
        (FULL, lacks((4, "routed"))),
    )
    x, y = stream(1), stream(2)
    full, without = run(rewired(shortcut, wiring), x, y)

    r = x + dense(norm(y))
    r = r + attention(norm(r))
    r = r + dense(norm(r))
    assert torch.equal(full, r + experts(norm(x)))
    assert torch.equal(without, r)


def reads_a_size_of_a_later_value(x: Tensor) -> Tensor:
    h = norm(x)
    x = x + attention(h)
    return x + experts(h).reshape(x.shape)


def test_a_size_is_no_value_of_the_stream() -> None:
    x = stream(1)
    kept = (block("attention"), BlockWiring("moe", ("routed",), lacks((1, "attention")), behind=1))
    (got,) = run(rewired(reads_a_size_of_a_later_value, RegionWiring(kept, (FULL,), (FULL,))), x)
    assert torch.equal(got, reads_a_size_of_a_later_value(x))


# --- refusals ------------------------------------------------------------------------------------


def reads_another_block(x: Tensor) -> Tensor:
    a = attention(norm(x))
    return x + a + experts(norm(a))


def reads_two_values(x: Tensor) -> Tensor:
    r = x + attention(norm(x))
    return r + experts(norm(r) * norm(x))


def shares_a_projection(x: Tensor) -> Tensor:
    h = norm(x) @ torch.ones(4, 4, dtype=torch.float64)
    return x + attention(h) + experts(h)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (reads_another_block, "what another block adds, beside the stream"),
        (reads_two_values, "reads several values of the stream"),
        (shares_a_projection, "two sub-blocks share more than a norm"),
    ],
)
def test_blocks_that_cannot_be_told_apart(body: Body, reason: str) -> None:
    with pytest.raises(PassError, match=reason):
        find_stream(capture(body))


def test_a_stream_that_a_block_reads_before_and_after_a_scale() -> None:
    def body(x: Tensor) -> Tensor:
        scaled = x * 0.5
        return scaled + experts(norm(x) + norm(scaled))

    with pytest.raises(PassError, match="reads several values of the stream"):
        find_stream(capture(body))


def test_a_block_that_reads_the_stream_before_its_scale() -> None:
    def body(x: Tensor) -> Tensor:
        return x * 0.5 + experts(norm(x))

    (write,) = writes(find_stream(capture(body)))
    assert (write.source.name, write.anchor.name) == ("stream_in_default", "mul")
