"""A graph as a program of steps, run in other orders and with split weight gradients: bitwise the graph itself."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fxskip.backward.program import WeightGradient
from fxskip.backward.program_of import attribute_values, program_of
from fxskip.backward.scheduled_region import ScheduledRegion
from fxskip.backward.weight_gradients import WeightQueue
from fxskip.errors import PassError
from fxskip.leaves import run_leaf
from tests.backward.random_programs import random_backward, random_forward

TOKENS, WIDTH, EXPERTS = 12, 8, 3


class Block(nn.Module):
    """Attention-like and expert-like parts: linear with and without bias, bmm and grouped products on stacks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.Parameter(torch.rand(WIDTH))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.stack = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.grouped = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.norm
        h = F.gelu(self.up(normed))
        dense = self.down(h) + x
        parts = normed.view(EXPERTS, TOKENS // EXPERTS, WIDTH)
        experts = torch.bmm(torch.bmm(parts, self.stack.transpose(1, 2)), self.stack.transpose(1, 2))
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (TOKENS // EXPERTS)
        routed = F.grouped_mm(normed.to(torch.bfloat16), self.grouped.to(torch.bfloat16), offs=ends).float()
        again = F.linear(dense, self.down.weight.t(), self.up.bias)
        return dense + experts.view(TOKENS, WIDTH) * routed + again.view(TOKENS, 2, WIDTH).sum(1)


def captured(module: nn.Module, x: Tensor) -> fx.Graph:
    """The graph that Dynamo captures, with parameters as placeholders."""
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=True)(x)
    return graphs[0].graph


def in_runs(graph: fx.Graph, draw: random.Random) -> dict[fx.Node, str]:
    """Steps of 1 to 5 consecutive operations."""
    steps: dict[fx.Node, str] = {}
    number, left = -1, 0
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            if left == 0:
                number, left = number + 1, draw.randint(1, 5)
            steps[node] = f"part{number}"
            left -= 1
    return steps


def by_placeholder(graph: fx.Graph, module: nn.Module, x: Tensor) -> list[Any]:
    """The values of the placeholders: x, or the parameter whose path the placeholder's name spells."""
    paths = {name.replace(".", "_"): parameter for name, parameter in module.named_parameters()}

    def find(name: str) -> Any:
        name = name.replace("_modules_", "_").replace("_parameters_", "_").strip("_")
        return next((p for path, p in paths.items() if name.endswith(f"self_{path}")), x)

    return [find(node.name) for node in graph.nodes if node.op == "placeholder"]


@pytest.fixture(scope="module")
def block() -> tuple[Block, fx.Graph]:
    module = Block()
    return module, captured(module, torch.randn(TOKENS, WIDTH))


def x_of(seed: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(module: nn.Module, x: Tensor, out: Tensor) -> dict[str, Tensor | None]:
    """Of `x` and all parameters; their .grad is cleared."""
    (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum().backward()
    leaves = {"x": x, **dict(module.named_parameters())}
    found = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    return found


def assert_equal(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert gradient is not None
        found = got[name]
        assert found is not None
        assert torch.equal(found, gradient), f"{name}: {(found - gradient).abs().max()}"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("autocast", [False, True])
def test_any_partition_in_any_order_is_bitwise_the_graph(
    block: tuple[Block, fx.Graph], seed: int, autocast: bool
) -> None:
    module, graph = block
    draw = random.Random(seed)
    program = program_of(graph, in_runs(graph, draw))
    split = [step.name for step in program.steps if draw.random() < 0.6]
    region = ScheduledRegion(
        program, forward=random_forward(program, draw), backward=random_backward(program, draw, split)
    )
    x = x_of(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        whole = fx.GraphModule(nn.Module(), graph)(*by_placeholder(graph, module, x))[0].float()
        want = gradients(module, x, whole)
        (out,) = region(*by_placeholder(graph, module, x))
    assert torch.equal(out.float(), whole)
    assert_equal(gradients(module, x, out.float()), want)


def whole_step(graph: fx.Graph) -> dict[fx.Node, str]:
    return {n: "all" for n in graph.nodes if n.op in ("call_function", "call_method")}


def test_the_record_says_which_weight_gradients_are_split_off(block: tuple[Block, fx.Graph]) -> None:
    program = program_of(block[1], whole_step(block[1]))
    not_every = "not every use is that of a product's weight: "
    assert {w.weight: w for w in program.weight_gradients} == {
        w.weight: w
        for w in (
            WeightGradient("all", "l_self_parameters_norm_", False, not_every + "normed"),
            WeightGradient("all", "l_self_modules_up_parameters_weight_", True),
            WeightGradient("all", "l_self_modules_up_parameters_bias_", True),
            WeightGradient("all", "l_self_modules_down_parameters_weight_", False, not_every + "linear_1, t"),
            WeightGradient("all", "l_self_parameters_stack_", False, not_every + "transpose, transpose_1"),
            WeightGradient("all", "l_self_parameters_grouped_", True),
        )
    }


@pytest.mark.parametrize("recomputed", [False, True])
def test_exactly_the_recorded_weight_gradients_come_later(
    block: tuple[Block, fx.Graph], monkeypatch: pytest.MonkeyPatch, recomputed: bool
) -> None:
    module, graph = block
    program = program_of(graph, whole_step(graph))
    region = ScheduledRegion(program, backward=("all.dgrad", "all.wgrad"))
    x, later = x_of(0), []
    original = WeightQueue.weight_gradients

    def spy(queue: WeightQueue, leaves: Any) -> Any:
        found = original(queue, leaves)
        later.extend(found)
        return found

    monkeypatch.setattr(WeightQueue, "weight_gradients", spy)
    inputs = by_placeholder(graph, module, x)
    out = checkpoint(region, *inputs, use_reentrant=False) if recomputed else region(*inputs)
    got = gradients(module, x, out[0])
    assert_equal(got, gradients(module, x, fx.GraphModule(nn.Module(), graph)(*inputs)[0]))
    assert sorted(later) == sorted(w.weight for w in program.weight_gradients if w.deferred)


class Tied(nn.Module):
    """A weight and a bias in three places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, self.inner.weight, self.inner.bias))
        return F.linear(h, self.inner.weight, self.inner.bias) @ self.inner.weight


@pytest.mark.parametrize(
    ("names", "order"),
    [
        ("aabc", ("c.dgrad", "b.dgrad", "a.dgrad", "a.wgrad", "c.wgrad", "b.wgrad")),
        ("aaaa", ("a.dgrad", "a.wgrad")),
    ],
)
def test_attributes_are_inputs_and_their_hooks_run_once(names: str, order: tuple[str, ...]) -> None:
    module = Tied()
    graph = fx.symbolic_trace(module).graph
    name = iter(names)
    program = program_of(graph, lambda node: next(name))
    assert program.inputs == ("x", "inner.weight", "inner.bias")
    assert program.attributes == ("inner.weight", "inner.bias")
    assert all(weight.deferred for weight in program.weight_gradients)
    x, runs = x_of(1), []
    want = gradients(module, x, module(x))
    module.inner.weight.register_post_accumulate_grad_hook(runs.append)
    region = ScheduledRegion(program, backward=order)
    got = gradients(module, x, region(x, *attribute_values(program, module))[0])
    assert_equal(got, want)
    assert len(runs) == 1


def test_steps_in_a_circle_are_refused() -> None:
    graph = fx.symbolic_trace(lambda x: torch.cos(y := torch.sin(x)) + y).graph
    steps = dict(zip((n for n in graph.nodes if n.op == "call_function"), ["a", "b", "a"], strict=True))
    with pytest.raises(PassError, match="in a circle: 'b' reads 'sin' of 'a', 'a' reads 'cos' of 'b'"):
        program_of(graph, steps)


def test_a_node_without_a_step_is_refused() -> None:
    graph = fx.symbolic_trace(lambda x: torch.cos(x)).graph
    with pytest.raises(PassError, match="node 'cos' is in no step"):
        program_of(graph, {})


def test_modules_that_hide_their_parameters_are_refused() -> None:
    with pytest.raises(PassError, match="calls the module '0'"):
        program_of(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))).graph, lambda node: "a")
    graph = fx.Graph()
    graph.output((graph.call_function(run_leaf, ("experts", "routed", (graph.placeholder("x"),), {})),))
    with pytest.raises(PassError, match="calls the module 'experts'"):
        program_of(graph, lambda node: "a")


class Partly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.sin()
        return x.cos() + y


def test_a_mode_that_reaches_into_another_step_is_refused() -> None:
    x = x_of(0)
    graph = captured(Partly(), x)
    out = ScheduledRegion(program_of(graph, whole_step(graph)))(x)[0]
    assert_equal({"x": torch.autograd.grad(out.sum(), x)[0]}, {"x": -x.sin()})
    calls = [n for n in graph.nodes if n.op.startswith("call")]
    with pytest.raises(
        PassError, match="node 'y' of step 's1' runs in a mode that '_set_grad_enabled' of step 's0'"
    ):
        program_of(graph, {n: f"s{i}" for i, n in enumerate(calls)})


@pytest.mark.parametrize(
    ("p", "training", "draws"), [(0.5, True, True), (0.0, True, False), (0.5, False, False)]
)
def test_steps_that_draw_random_numbers_are_found(p: float, training: bool, draws: bool) -> None:
    graph = fx.symbolic_trace(lambda x: F.dropout(x, p, training)).graph
    assert program_of(graph, lambda node: "a").steps[0].random is draws
    graph = fx.symbolic_trace(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=p)).graph
    assert program_of(graph, lambda node: "a").steps[0].random is (p > 0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_split_region_leaves_nothing_alive(autocast: bool, differentiated: bool) -> None:
    """Without the help of the garbage collector: no part of the graph refers to itself."""
    module = Tied()
    name = iter("aabc")
    program = program_of(fx.symbolic_trace(module).graph, lambda node: next(name))
    order = ("c.dgrad", "b.dgrad", "a.dgrad", "a.wgrad", "c.wgrad", "b.wgrad")
    region = ScheduledRegion(program, backward=order)
    gc.collect()
    gc.disable()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            (out,) = region(x_of(0), *attribute_values(program, module))
        alive = [weakref.ref(out.grad_fn), weakref.ref(out.grad_fn.backward_state.call)]
        if differentiated:
            out.float().sum().backward()
        del out
        assert [weak() for weak in alive] == [None, None]
    finally:
        gc.enable()
