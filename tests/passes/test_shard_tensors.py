"""What lies between cut matrices, run in parts, computes the whole; what does not run in parts is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxskip.capture import hf
from fxskip.capture.region import compile_region
from fxskip.collectives.cut_linear import CutLinear
from fxskip.errors import PassError
from fxskip.ir import module_path, op_name
from fxskip.passes.partial_values import enter, reduce, require_reduced
from fxskip.passes.shard_tensors import shard_tensors
from fxskip.passes.tensor_plan import tensor_plan
from fxskip.pipeline import analyse
from tests.passes.graphs import stream
from tests.passes.lockstep import RANKS, in_lockstep
from tests.zoo import MODEL_TYPES, tiny

D, HEADS, WIDTH = 4, 4, 2
F64 = torch.float64


class Layer(nn.Module):
    """x + inner(norm(x)), whose inner part is given; matrices q, k, v, up, gate, down and o, in float64."""

    def __init__(self, inner: Callable[["Layer", Tensor], Tensor], *, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.inner, self.kv_heads = inner, kv_heads
        wide = HEADS * WIDTH
        sizes = {"q": (D, wide), "k": (D, kv_heads * WIDTH), "v": (D, kv_heads * WIDTH), "o": (wide, D),
                 "up": (D, wide), "gate": (D, wide), "both": (D, 2 * wide), "down": (wide, D)}  # fmt: skip
        for name, (given, made) in sizes.items():
            setattr(self, name, nn.Linear(given, made, bias=name in ("q", "o", "down"), dtype=F64))
        self.scale = nn.Parameter(torch.randn(wide, dtype=F64))
        self.head_scale = nn.Parameter(torch.randn(WIDTH, dtype=F64))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.inner(self, hidden_states.sin())


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, WIDTH).transpose(1, 2)


def attention(layer: Layer, x: Tensor) -> Tensor:
    """The number of heads is a number in the graph; keys and values are repeated where they have fewer."""
    q = layer.q(x).view(2, 3, HEADS, WIDTH).transpose(1, 2)
    k, v = heads(layer.k(x)), heads(layer.v(x))
    times = HEADS // layer.kv_heads
    k, v = (
        t[:, :, None].expand(2, layer.kv_heads, times, 3, WIDTH).reshape(2, HEADS, 3, WIDTH) for t in (k, v)
    )
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return layer.o((weights @ v).transpose(1, 2).reshape(2, 3, HEADS * WIDTH))


def latent_attention(layer: Layer, x: Tensor) -> Tensor:
    """A part of the keys is the same for all heads, and keys are written into memory made beforehand, as MLA does."""
    q, v = heads(layer.q(x)), heads(layer.v(x))
    shared = x[..., None, :1].transpose(1, 2).expand(-1, HEADS, -1, -1)
    k = q.new_empty(2, HEADS, 3, WIDTH)
    k[..., :1].copy_(heads(layer.k(x))[..., :1])
    k[..., 1:].copy_(shared)
    return layer.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 3, -1))


def normalised_heads(layer: Layer, x: Tensor) -> Tensor:
    """Queries with a norm and a scale within a head; keys with a norm over, and a scale of, all their features."""
    q, k, v = layer.q(x), layer.k(x), layer.v(x)
    q = F.rms_norm(q.view(2, 3, -1, WIDTH), (WIDTH,)) * layer.head_scale
    k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + 1e-6) * layer.scale
    made = F.scaled_dot_product_attention(q.transpose(1, 2), heads(k), heads(v))
    return layer.o(made.transpose(1, 2).reshape(2, 3, -1))


def gated_mlp(layer: Layer, x: Tensor) -> Tensor:
    return layer.down(F.silu(layer.gate(x)) * layer.up(x))


RIGHT = {
    "attention": Layer(attention),
    "grouped_queries": Layer(attention, kv_heads=2),
    "latent_attention": Layer(latent_attention),
    "normalised_heads": Layer(normalised_heads),
    "gated_mlp": Layer(gated_mlp),
}


class _Grabbed(Exception):
    """Stops a capture before the graph runs: matrices are cut on paper only."""


def grab(layer: nn.Module) -> fx.Graph:
    graphs: list[fx.Graph] = []

    def backend(captured: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(captured.graph)

        def stop(*arguments: Any) -> Any:
            raise _Grabbed

        return stop

    x = stream()
    torch._dynamo.mark_static(x)
    with pytest.raises(_Grabbed):
        compile_region(backend, 1, "grab")(layer, type(layer), (x,), (), {})
    return graphs[0]


def cut(layer: nn.Module, graph: fx.Graph) -> int:
    """Turn the linears that can be cut into cut ones, whose matrices stay whole; returns how many."""
    plan = tensor_plan(analyse(graph))
    for path, how in plan.items():
        linear = layer.get_submodule(path)
        linear.__class__ = CutLinear
        linear.fxskip_path, linear.fxskip_cut = path, how  # type: ignore[assignment]
    return len(plan)


def sharded(layer: nn.Module) -> fx.Graph:
    cut(layer, grab(layer))
    return require_reduced(shard_tensors(analyse(grab(layer)), RANKS))


@pytest.mark.parametrize("name", RIGHT)
def test_parts_compute_the_whole(name: str) -> None:
    layer = RIGHT[name]
    parameters = dict(layer.named_parameters())
    x = stream()
    want = layer(x)
    graph = sharded(layer)
    inputs = [
        x if "streams" in n.name else parameters[_name(n)] for n in graph.nodes if n.op == "placeholder"
    ]
    for got in in_lockstep(graph, inputs, layer, parts_are_made=True):
        torch.testing.assert_close(got[0], want, rtol=1e-13, atol=1e-13)


def _name(node: fx.Node) -> str:
    return node.name.removeprefix("l_layer_parameters_").removesuffix("_")


def fused_mlp(layer: Layer, x: Tensor) -> Tensor:
    up, gate = layer.both(x).chunk(2, -1)
    return layer.down(F.silu(gate) * up)


def softmax_of_features(layer: Layer, x: Tensor) -> Tensor:
    return layer.down(layer.up(x).softmax(-1))


def interleaved_heads(layer: Layer, x: Tensor) -> Tensor:
    """Heads of batch and sequence in one dimension, where a rank's heads are no slice."""
    q = heads(layer.q(x)).reshape(2 * HEADS, 3, WIDTH)
    made = (q @ q.transpose(1, 2)).softmax(-1) @ q
    return layer.o(made.view(2, HEADS, 3, WIDTH).transpose(1, 2).reshape(2, 3, -1))


def sorted_features(layer: Layer, x: Tensor) -> Tensor:
    return layer.down(layer.up(x).sort(-1).values)


WRONG = {
    fused_mlp: "works along dimension 2 of .*, which is cut",
    softmax_of_features: "runs over the dimension that is cut",
    interleaved_heads: r"makes \[8, 3, 2\] of \[2, 4, 3, 2\], whose dimension 1 2 processes share",
    sorted_features: "is not known to run on a part",
}


@pytest.mark.parametrize("inner", WRONG, ids=lambda inner: inner.__name__)
def test_what_does_not_run_in_parts_is_refused(inner: Callable[[Layer, Tensor], Tensor]) -> None:
    with pytest.raises(PassError, match=WRONG[inner]):
        sharded(Layer(inner))


def test_one_head_of_keys_cannot_be_shared() -> None:
    with pytest.raises(PassError, match="works along dimension 2 of .*, which is cut"):
        sharded(Layer(attention, kv_heads=1))


ATTENTION = {"o_proj": "row", "q_proj": "column", "k_proj": "column", "v_proj": "column"}
LATENT = {"o_proj": "row", "q_b_proj": "column", "kv_b_proj": "column"}
MLP = {"down_proj": "row", "gate_proj": "column", "up_proj": "column"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "olmoe")) for kind in MODEL_TYPES]
)
def test_matrices_of_the_supported_models(kind: str) -> None:
    """Attention, dense MLPs and shared experts are cut, routers, low-rank matrices and routed experts are not."""
    model = tiny(kind, layers=2)
    attention = LATENT if kind.startswith("deepseek") else ATTENTION
    has_shared = kind not in ("mixtral", "olmoe", "qwen3_moe")
    for captured in hf.capture_layers(model):
        plan = tensor_plan(analyse(captured.graph))
        found = {path.rpartition(".")[2]: how for path, how in plan.items()}
        assert found == (attention | MLP if has_shared else attention)
        layer = model.get_submodule(captured.path)
        cut(layer, captured.graph)
    for captured in hf.capture_layers(model):
        graph = require_reduced(shard_tensors(analyse(captured.graph), RANKS))
        reduced = [module_path(n.args[0].args[0]) for n in graph.nodes if n.target is reduce]
        assert len(reduced) == 1 + has_shared + 2 * (kind == "olmoe")
        assert any(n.target is enter and op_name(n) for n in graph.nodes)
