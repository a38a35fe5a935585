import pytest
import torch
from torch import Tensor

from fxskip.errors import PassError
from fxskip.ir import info, show, stream_inputs, stream_outputs
from fxskip.pipeline import ANALYSIS, REWIRING, analyse, rewire
from fxskip.wiring import FULL, BlockWiring, RegionWiring
from tests.passes.graphs import (
    FARSKIP,
    Layer,
    attention,
    capture,
    dense,
    experts,
    lacks,
    moe_layer,
    norm,
    run,
    shared,
    stream,
)


def test_every_pass_leaves_its_input_alone() -> None:
    graph = capture(moe_layer, inputs=2, outputs=2)
    for step in ANALYSIS:
        text = show(graph)
        after = step(graph)
        assert after is not graph
        assert show(graph) == text, step.__name__
        graph = after
    for rewiring in REWIRING:
        text = show(graph)
        after = rewiring(graph, FARSKIP)
        assert show(graph) == text, rewiring.__name__
        graph = after


def test_analyse_annotates_and_rewire_gives_what_runs() -> None:
    raw = capture(moe_layer, inputs=2, outputs=2)
    text = show(raw)
    assert any(info(n) is not None for n in analyse(raw).nodes)

    wired = rewire(raw, FARSKIP)
    assert stream_inputs(wired) == stream_outputs(wired) == {}
    x, y = stream(1), stream(2)
    r, h = x + attention(norm(y)), norm(x)
    full, without_routed = run(wired, x, y)
    assert torch.equal(full, r + (experts(h) + shared(h)))
    assert torch.equal(without_routed, r + shared(h))
    assert show(raw) == text


def test_two_layers_pass_both_streams_on() -> None:
    """x and y through two layers: y is what the second attention reads."""
    first = RegionWiring(
        (BlockWiring("attention", ("attention",), FULL), FARSKIP.blocks[1]), (FULL,), FARSKIP.outputs
    )
    second = RegionWiring(FARSKIP.blocks, FARSKIP.inputs, (FULL,))

    x0 = stream()
    r = x0 + attention(norm(x0))
    x1, y1 = r + (experts(norm(x0)) + shared(norm(x0))), r + shared(norm(x0))
    r = x1 + attention(norm(y1))
    expected = r + (experts(norm(x1)) + shared(norm(x1)))

    between = run(rewire(capture(moe_layer, outputs=2), first), x0)
    (got,) = run(rewire(capture(moe_layer, inputs=2), second), *between)
    assert torch.equal(got, expected)


class Switches(Layer):
    """A layer that is another one in training mode."""

    def __init__(self) -> None:
        super().__init__(moe_layer)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.training:
            r = hidden_states + attention(norm(hidden_states))
            return r + dense(norm(r))
        return moe_layer(hidden_states)


def test_a_capture_that_differs_from_the_planned_layer_is_refused() -> None:
    layer = Switches().eval()
    wiring = RegionWiring(FARSKIP.blocks, FARSKIP.inputs, FARSKIP.outputs)
    rewire(capture(layer, inputs=2, outputs=2), wiring)

    with pytest.raises(PassError) as caught:
        rewire(capture(layer.train(), inputs=2, outputs=2), wiring)
    message = str(caught.value)
    assert "('dense', ('dense',))" in message
    assert "planned for [('attention', ('attention',)), ('moe', ('routed', 'shared'))]" in message


def test_a_wiring_for_more_streams_than_were_captured_is_refused() -> None:
    more = RegionWiring(FARSKIP.blocks, FARSKIP.inputs, (*FARSKIP.outputs, lacks((1, "attention"))))
    with pytest.raises(PassError):
        rewire(capture(moe_layer, inputs=2, outputs=2), more)
