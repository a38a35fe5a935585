"""compile_region: what is captured, when it is captured again, and what cannot be captured."""

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxskip.capture.region import CompiledRegion, capture_count, compile_region
from fxskip.errors import CaptureError, PassError
from fxskip.ir import remove_markers


def as_captured(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    return fx.GraphModule(module, remove_markers(module.graph)).forward


class Block(nn.Module):
    """x + W x, doubled in training mode, with what else it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Any:
        out = hidden_states + self.linear(hidden_states) * scale
        if self.training:
            out = out * 2.0
        return out if bias is None else (out + bias, bias)


@pytest.fixture
def region() -> CompiledRegion:
    return compile_region(as_captured, 1, "test")


def call(region: CompiledRegion, layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    out, others = region(layer, type(layer), (x,), args, kwargs)
    assert others == ()
    return out


def test_all_layers_of_one_kind_share_a_capture_with_their_own_weights(region: CompiledRegion) -> None:
    before = capture_count()
    x = torch.randn(2, 3, 4)
    for _ in range(3):
        layer = Block()
        assert torch.equal(call(region, layer, x), layer(x))
    assert capture_count() == before + 1


def test_sizes_do_not_matter_but_modes_do(region: CompiledRegion) -> None:
    layer = Block()
    captured = []
    for x in (torch.randn(2, 3, 4), torch.randn(5, 7, 4), torch.randn(3, 33, 4)):
        assert torch.equal(call(region, layer, x), layer(x))
        captured.append(capture_count())
    layer.eval()
    assert torch.equal(call(region, layer, x), layer(x))
    captured.append(capture_count())

    first = captured[0]
    assert captured == [first, first, first, first + 1]


def test_a_call_leaves_nothing_in_the_thread(region: CompiledRegion) -> None:
    """PyTorch's patches of settings are context variables, which a thread keeps for ever."""
    layer, x = Block(), torch.randn(2, 3, 4)
    call(region, layer, x)
    before = len(contextvars.copy_context())
    for _ in range(5):
        call(region, layer, x)
    assert len(contextvars.copy_context()) == before


def test_settings_are_what_they_were(region: CompiledRegion) -> None:
    """After a call, and after a capture that failed inside another one's settings."""
    before = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=3):
        call(region, Block(), torch.randn(2, 3, 4))
        assert torch._dynamo.config.recompile_limit == 3
        with pytest.raises(CaptureError):
            call(compile_region(as_captured, 1, "fails"), DataDependent(), torch.randn(2, 3, 4))
        assert torch._dynamo.config.recompile_limit == 3
    assert torch._dynamo.config.recompile_limit == before


def test_arguments_and_results_are_those_of_the_layer(region: CompiledRegion) -> None:
    layer, x, bias = Block(), torch.randn(2, 3, 4), torch.randn(4)

    got = call(region, layer, x, bias, scale=0.5)
    expected = layer(x, bias, scale=0.5)
    assert isinstance(got, tuple)
    assert torch.equal(got[0], expected[0])
    assert got[1] is bias


def test_streams_beside_the_first_come_back_in_order() -> None:
    """Unwired, every marker returns what it marks: here the last stream that came in."""
    region = compile_region(as_captured, 3, "three")
    layer, streams = Block(), tuple(torch.randn(2, 3, 4) for _ in range(2))
    out, others = region(layer, Block, streams, (), {})

    assert torch.equal(out, layer(streams[0]))
    assert len(others) == 2
    assert all(torch.equal(other, streams[1]) for other in others)


def test_gradients_reach_weights_and_streams(region: CompiledRegion) -> None:
    layer, x = Block(), torch.randn(2, 3, 4, requires_grad=True)
    call(region, layer, x).sum().backward()
    got = [x.grad, layer.linear.weight.grad]
    x.grad = layer.linear.weight.grad = None
    layer(x).sum().backward()

    assert got[0] is not None and got[1] is not None
    assert torch.equal(got[0], x.grad)
    assert torch.equal(got[1], layer.linear.weight.grad)


# --- what cannot be captured ---------------------------------------------------------------------


class Expert(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert()])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.experts[0](hidden_states)


def test_a_branch_on_data_names_module_and_remedy(region: CompiledRegion) -> None:
    with pytest.raises(CaptureError) as caught:
        call(region, DataDependent(), torch.randn(2, 3, 4))
    message = str(caught.value)
    assert message.startswith("capture of DataDependent: ")
    assert "module experts.0 (Expert)" in message
    assert 'set_experts_implementation("grouped_mm")' in message


class Breaks(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return hidden_states + 1


def test_any_other_graph_break_is_a_capture_error(region: CompiledRegion) -> None:
    with pytest.raises(CaptureError, match=r"capture of Breaks[\s\S]*torch.compile\(fullgraph=True\)"):
        call(region, Breaks(), torch.randn(2, 3, 4))


def test_an_error_of_the_layer_itself_is_the_cause(region: CompiledRegion) -> None:
    """A stream of the wrong width: the message names the module, the cause says what is wrong."""
    with pytest.raises(CaptureError, match="capture of Block: [\\s\\S]*module linear") as caught:
        call(region, Block(), torch.randn(2, 3, 5))
    assert "linear" in str(caught.value.__cause__)


def test_an_error_of_a_pass_arrives_as_it_is() -> None:
    def refuse(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        raise PassError("somebody", "found something", hint="write something else")

    with pytest.raises(PassError) as caught:
        compile_region(refuse, 1, "refused")(Block(), Block, (torch.randn(2, 3, 4),), (), {})
    assert str(caught.value) == "somebody: found something\n  hint   write something else"
