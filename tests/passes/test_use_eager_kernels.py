"""Grouped matrix products are chosen when the graph runs, by transformers, as in the original."""

import pytest
import torch
from torch import fx
from transformers.integrations import moe

from fxskip.ir import show
from fxskip.passes.use_eager_kernels import use_eager_kernels


def grouped_product() -> fx.Graph:
    graph = fx.Graph()
    rows, weights, offsets = (graph.placeholder(name) for name in ("rows", "weights", "offsets"))
    loop = torch.ops.transformers.grouped_mm_fallback
    graph.output(graph.call_function(loop, (rows, weights), {"offs": offsets}))
    return graph


def test_the_loop_becomes_a_choice_and_the_input_stays() -> None:
    graph = grouped_product()
    text = show(graph)

    assert "_grouped_mm(rows, weights, offs=offsets)" in show(use_eager_kernels(graph))
    assert show(graph) == text


def test_the_choice_is_asked_for_when_the_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *tensors: asked.append(tensors) or False)
    run = fx.GraphModule({}, use_eager_kernels(grouped_product()))
    rows, weights = torch.randn(6, 4), torch.randn(2, 4, 3)

    got = run(rows, weights, torch.tensor([2, 6], dtype=torch.int32))

    assert len(asked) == 1
    assert torch.equal(got, torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[1]]))
