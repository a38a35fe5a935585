import pytest
import torch
from torch import Tensor, nn

from fxskip.ir import show
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.pipeline import analyse
from fxskip.wiring import SubBlock
from tests.passes.graphs import Body, after_attention, attention, capture, experts, norm


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.projection(attention(x))
        return out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4, dtype=torch.float64)
        self.shared = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.gate(x).topk(1).values + self.shared(x)
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Attention()
        self.ffn = Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(norm(x))
        moe: Tensor = self.ffn(norm(x))
        return x + moe


def test_kind_path_and_addends_of_each_sub_block() -> None:
    graph = analyse(capture(Layer()))
    text = show(graph)

    assert sub_blocks(graph, layer=3, layer_path="model.layers.3") == [
        SubBlock(3, "attention", "model.layers.3.mixer", ("attention",)),
        SubBlock(3, "moe", "model.layers.3.ffn", ("routed", "shared")),
    ]
    assert show(graph) == text


def test_a_layer_without_modules_is_its_own_path() -> None:
    graph = analyse(capture(lambda x: x + experts(norm(x))))
    assert sub_blocks(graph, layer=0, layer_path="layers.0") == [SubBlock(0, "moe", "layers.0", ("routed",))]


# --- shared experts that cannot be told apart ----------------------------------------------------


def projected(x: Tensor) -> Tensor:
    return x @ torch.full((4, 4), 0.3, dtype=x.dtype)


def only_routed(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    return r + experts(h)


def scaled_experts(x: Tensor) -> Tensor:
    """Norms, gates and scales around routed experts alone hide nothing."""
    r, h = after_attention(x)
    gate = projected(h).sigmoid()
    return r + norm(experts(projected(h)) * gate)


def expert_bias(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    weights, chosen = projected(h).topk(1)
    bias = torch.full((4, 4), 0.1, dtype=x.dtype)[chosen.squeeze(-1)]
    return r + norm(projected(h) * weights + bias)


def blank_memory(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    tokens = h.reshape(-1, 4)
    out = torch.zeros_like(tokens)
    out.index_add_(0, torch.arange(6), experts(projected(tokens)))
    return r + out.view(h.shape)


@pytest.mark.parametrize("body", [only_routed, scaled_experts, expert_bias, blank_memory])
def test_routed_experts_alone_are_separable(body: Body) -> None:
    moe = sub_blocks(analyse(capture(body)), layer=0, layer_path="")[1]

    assert moe.addends == ("routed",)
    assert moe.inseparable == ""


def norm_of_the_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    both = experts(h) + projected(h)
    return r + norm(both)


def dropout_of_the_sum(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    both = experts(h) + projected(h)
    return r + torch.nn.functional.dropout(both, 0.5)


def difference(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    both = experts(h) - projected(h)
    return r + both


def interpolation(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    both = torch.lerp(experts(h), projected(h), 0.5)
    return r + both


def stacked(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    both = torch.stack([experts(h), projected(h)])
    return r + both.sum(0)


def shared_memory(x: Tensor) -> Tensor:
    r, h = after_attention(x)
    tokens = h.reshape(-1, 4)
    both = projected(tokens)
    both[torch.arange(6)] += experts(tokens)
    return r + both.view(h.shape)


@pytest.mark.parametrize(
    "body", [norm_of_the_sum, dropout_of_the_sum, difference, interpolation, stacked, shared_memory]
)
def test_what_hides_shared_experts_is_named(body: Body) -> None:
    moe = sub_blocks(analyse(capture(body)), layer=0, layer_path="")[1]

    assert moe.addends == ("routed",)
    assert "'both'" in moe.inseparable, moe.inseparable
