"""A state-space layer's scan is one operation of the graph, and gives the original's bits at every length."""

import torch
from transformers import PreTrainedModel

import fxskip
from fxskip.ir import op_name
from fxskip.runtime import capture_count
from tests.ecosystem.architectures import tiny


def _ids(columns: int) -> torch.Tensor:
    return torch.randint(3, 128, (2, columns), generator=torch.Generator().manual_seed(columns))


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def test_jamba_has_the_original_bits_and_one_graph_for_all_lengths() -> None:
    model = tiny("jamba")
    student = fxskip.transform(model, "identity")
    assert torch.equal(_logits(student, _ids(9)), _logits(model, _ids(9)))

    captured = capture_count()
    for columns in (12, 17):
        assert torch.equal(_logits(student, _ids(columns)), _logits(model, _ids(columns)))
    assert capture_count() == captured


def test_the_scan_is_one_operation() -> None:
    from fxskip.capture.hf import capture_layers

    graph = capture_layers(tiny("jamba"))[0].graph
    assert [op_name(n) for n in graph.nodes].count("selective_scan") == 1
