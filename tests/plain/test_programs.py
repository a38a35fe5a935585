"""Captured programs (symbolic_trace, torch.export) under every wiring, against formulas from the model's parts."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxskip
from fxskip.errors import CaptureError, CheckpointError, PassError
from tests.plain.formulas import WIRINGS, rewired
from tests.plain.models import VOCAB, EinsumMoE, Expert, IndexAddMoE, Model

HAS_DYNAMIC_EINSUM = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
BATCH = torch.export.Dim.DYNAMIC


def model(moe: type[nn.Module] = IndexAddMoE) -> Model:
    torch.manual_seed(0)
    built = Model(moe)
    for parameter in built.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return built


def ids(rows: int = 2, columns: int = 7) -> Tensor:
    return torch.randint(0, VOCAB, (rows, columns), generator=torch.Generator().manual_seed(rows))


def traced(original: nn.Module) -> Any:
    return fx.symbolic_trace(original)


def exported(original: nn.Module) -> Any:
    return torch.export.export(original, (ids(),), dynamic_shapes=({0: BATCH, 1: BATCH},))


def exported_module(original: nn.Module) -> Any:
    return exported(original).module()


Capture = Callable[[nn.Module], Any]
CAPTURES = pytest.mark.parametrize("capture", [traced, exported])


@CAPTURES
@pytest.mark.parametrize("moe", [EinsumMoE, IndexAddMoE])
def test_every_wiring_follows_the_formula(moe: type[nn.Module], capture: Capture) -> None:
    if capture is exported and moe is EinsumMoE and not HAS_DYNAMIC_EINSUM:
        pytest.skip("this torch exports a one-hot dispatch with constant sizes only")
    original = model(moe)
    program = capture(original)
    for spec, reads in WIRINGS.items():
        student = fxskip.transform(program, spec, example_inputs=(ids(),))

        assert isinstance(student, fx.GraphModule)
        for batch in (ids(), ids(3, 5)):
            assert torch.equal(student(batch), rewired(original, batch, reads)), spec


def test_gradients_follow_the_formula() -> None:
    original = model()
    student = fxskip.transform(traced(original), "farskip", example_inputs=(ids(),))
    student(ids()).square().mean().backward()
    rewired(original, ids(), WIRINGS["farskip"]).square().mean().backward()

    expected = dict(original.named_parameters())
    found = dict(student.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-6, msg=name)


def test_the_program_is_left_alone_or_rewired_itself() -> None:
    original = model()
    program = traced(original)
    before = str(program.graph)
    fxskip.transform(program, "farskip", example_inputs=(ids(),))
    assert str(program.graph) == before
    assert torch.equal(program(ids()), original(ids()))

    same = fxskip.transform(program, "farskip", example_inputs=(ids(),), inplace=True)
    assert same is program
    assert torch.equal(program(ids()), rewired(original, ids(), WIRINGS["farskip"]))


def test_a_module_of_an_exported_program() -> None:
    original = model()
    student = fxskip.transform(exported_module(original), "ladder", example_inputs=(ids(),))
    assert torch.equal(student(ids()), rewired(original, ids(), WIRINGS["ladder"]))


def test_blocks_have_the_layers_and_modules_of_the_model() -> None:
    plan = fxskip.plan(traced(model()), "farskip", example_inputs=(ids(),))
    assert [(b.layer, b.kind, b.path) for b in plan.blocks[:3]] == [
        (0, "attention", "layers.0.attn"),
        (0, "moe", "layers.0.moe"),
        (1, "attention", "layers.1.attn"),
    ]
    block = model().layers[0]
    assert plan.blocks[0].costs.parameters == sum(
        p.numel() for part in (block.attn, block.attn_norm) for p in part.parameters()
    )


def test_copies_and_pickles_stay_rewired() -> None:
    student = fxskip.transform(traced(model()), "farskip", example_inputs=(ids(),))
    expected = student(ids())
    buffer = io.BytesIO()
    torch.save(student, buffer)
    buffer.seek(0)

    for other in (copy.deepcopy(student), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(ids()), expected)
        assert fxskip.spec_of(other).name == "farskip"
        assert [b.reads for b in fxskip.explain(other).blocks] == [
            b.reads for b in fxskip.explain(student).blocks
        ]


# --- refusals ------------------------------------------------------------------------------------


def test_without_example_inputs() -> None:
    with pytest.raises(CaptureError, match=r"is a captured program[\s\S]*example_inputs=\(ids,\)"):
        fxskip.transform(traced(model()), "farskip")


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(CaptureError, match="the program does not run with the example inputs"):
        fxskip.transform(traced(model()), "farskip", example_inputs=())


def test_a_program_that_is_rewired_already() -> None:
    student = fxskip.transform(traced(model()), "farskip", example_inputs=(ids(),))
    with pytest.raises(PassError, match="rewired already"):
        fxskip.transform(student, "farskip", example_inputs=(ids(),))


def test_a_program_without_a_stream() -> None:
    with pytest.raises(CaptureError, match="shows no residual stream"):
        fxskip.plan(fx.symbolic_trace(Expert()), "farskip", example_inputs=(torch.ones(2, 32),))


def test_a_program_that_was_changed_afterwards() -> None:
    student = fxskip.transform(traced(model()), "farskip", example_inputs=(ids(),))
    add = next(n for n in student.graph.nodes if n.op == "call_function")
    with student.graph.inserting_after(add):
        student.graph.call_function(torch.neg, (add,))
    student.recompile()
    with pytest.raises(CheckpointError, match="the program's operations are not those that were rewired"):
        fxskip.explain(student)
