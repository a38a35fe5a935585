"""Grouped products called on sorted rows against the modules of transformers, which sort for themselves."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fxskip.collectives import expert_parallel as ep
from fxskip.collectives.grouped_experts import is_grouped
from fxskip.collectives.replicated_tokens import choices_of
from fxskip.collectives.routing import sort_pairs
from fxskip.leaves import make_leaf, running
from tests.collectives.device import DEVICE

KINDS = {
    "deepseek_v2": DeepseekV2Experts,
    "qwen3_moe": Qwen3MoeExperts,
    "mixtral": MixtralExperts,
    "olmoe": OlmoeExperts,
    "glm4_moe": Glm4MoeExperts,
    "gpt_oss": GptOssExperts,  # with bias, transposed, gates and values interleaved
}
EXPERTS, WIDTH = 4, 32


class Layer(nn.Module):
    """A decoder layer as far as experts need one."""

    def __init__(self, kind, chosen="grouped_mm"):
        super().__init__()
        config = AutoConfig.for_model(kind, hidden_size=WIDTH, intermediate_size=24)
        config.moe_intermediate_size = 24
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            setattr(config, name, EXPERTS)
        config._experts_implementation = chosen
        self.experts = KINDS[kind](config)
        torch.manual_seed(1)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)


def layer(kind="deepseek_v2", dtype=torch.float32, **options):
    return Layer(kind, **options).to(DEVICE, dtype)


def from_ranks(lengths):
    received = tuple(map(sum, lengths))
    return ep.Routing(received, received, torch.tensor(lengths, device=DEVICE), None)


def replicated(tokens):
    """As rank 1 of 2 has it, of twice the experts."""
    torch.manual_seed(2)
    index = torch.randint(2 * EXPERTS, (tokens, 2), device=DEVICE)
    return choices_of(sort_pairs(index, 2 * EXPERTS), EXPERTS, 2 * EXPERTS)


ROUTINGS = {
    "two ranks": lambda: from_ranks([[3, 0, 2, 5], [1, 0, 4, 6]]),
    "one expert gets all": lambda: from_ranks([[0, 0, 9, 0], [0, 0, 4, 0]]),
    "no rows": lambda: from_ranks([[0, 0, 0, 0]]),
    "the same tokens on all ranks": lambda: replicated(13),
}


def outcome(function, rows, module):
    found = function(rows)
    torch.manual_seed(3)
    gradient = torch.randn_like(found)
    return found, *torch.autograd.grad(found, [rows, *module.parameters()], gradient, allow_unused=True)


def by_module(held, rows, experts):
    ones = rows.new_ones(len(rows), 1)
    return outcome(lambda x: held.experts(x, experts.unsqueeze(1), ones), rows, held.experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_gives_what_the_module_gives_to_the_last_bit(kind, routing, dtype, monkeypatch):
    """Each expert's product has the same rows, and weights of 1 and sums of one change nothing. The module's sort
    leaves open how rows of one expert are ordered, so it is made stable, as that of `routing` is."""
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    held, route = layer(kind, dtype), ROUTINGS[routing]()
    experts = route.own_expert_of_each_row()
    rows = torch.randn(len(experts), WIDTH, device=DEVICE, dtype=dtype, requires_grad=True)
    assert is_grouped(held.experts)
    with running(held):
        got = outcome(lambda x: ep.run_own_experts("experts", x, route), rows, held.experts)
    if not len(experts):
        assert got[0].shape == rows.shape
        assert all(g is not None and not g.any() for g in got[1:])
        return
    for one, other in zip(got, by_module(held, rows, experts), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert bool(one.any())


@pytest.mark.parametrize("kind", ["deepseek_v2", "gpt_oss"])
def test_another_order_of_rows_is_only_a_matter_of_rounding(kind):
    held, route = layer(kind), ROUTINGS["two ranks"]()
    rows = torch.randn(21, WIDTH, device=DEVICE, requires_grad=True)
    with running(held):
        got = outcome(lambda x: ep.run_own_experts("experts", x, route), rows, held.experts)
    for one, other in zip(got, by_module(held, rows, route.own_expert_of_each_row()), strict=True):
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


def test_the_module_itself_is_not_called(monkeypatch):
    held, route = layer(), ROUTINGS["two ranks"]()
    make_leaf(held, "experts")
    rows = torch.randn(21, WIDTH, device=DEVICE)
    called = []
    monkeypatch.setattr(torch.func, "functional_call", lambda *args: called.append(args) or args[2][0])
    with running(held):
        ep.run_own_experts("experts", rows, route)
        assert called == []
        held.experts.config._experts_implementation = "batched_mm"
        ep.run_own_experts("experts", rows, route)
        assert len(called) == 1


def own_forward(module):
    class Own(type(module)):
        def forward(self, *args):
            return super().forward(*args)

    module.__class__ = Own


def patched(module):
    module.forward = lambda *args: args[0]


def with_adapter(module):
    module.lora = nn.Linear(WIDTH, WIDTH)


def parametrised(module):
    nn.utils.parametrize.register_parametrization(module, "down_proj", nn.Identity())


def quantised(module):
    module.register_buffer("down_proj_scale", torch.ones(EXPERTS))


def quantised_weight(module):
    module.down_proj = nn.Parameter(module.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)


DIFFERENT = {
    "eager": lambda m: setattr(m.config, "_experts_implementation", "eager"),
    "no choice": lambda m: setattr(m.config, "_experts_implementation", None),
    "batched_mm": lambda m: setattr(m.config, "_experts_implementation", "batched_mm"),
    "a forward of its own": own_forward,
    "a forward put in its place": patched,
    "a hook": lambda m: m.register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "a hook of gradients": lambda m: m.register_full_backward_hook(lambda *_: None),
    "a norm": lambda m: setattr(m, "has_post_expert_norm", True),
    "spread by transformers": lambda m: setattr(m, "_is_expert_parallel", True),
    "an adapter": with_adapter,
    "a parametrised weight": parametrised,
    "quantised": quantised,
    "a quantised weight": quantised_weight,
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_module_that_does_more_is_called_as_it_is(what):
    held = layer()
    assert is_grouped(held.experts)
    DIFFERENT[what](held.experts)
    assert not is_grouped(held.experts)


def test_hooks_of_all_modules_are_run():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_grouped(layer().experts)
    finally:
        handle.remove()
    assert is_grouped(layer().experts)


def test_other_modules_are_not_taken_for_experts():
    assert not is_grouped(nn.Linear(3, 3))
    other = nn.Linear(3, 3)
    other.config = SimpleNamespace(_experts_implementation="grouped_mm")
    assert not is_grouped(other)
