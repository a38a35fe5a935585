"""Where the layers of a plain PyTorch model are, what is kept on it, and which models are refused."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxskip
from fxskip.capture.plain import find_layers, without_values
from fxskip.leaves import Leaf
from fxskip.runtime.regions import Region
from tests.plain import shapes
from tests.plain.formulas import WIRINGS, rewired
from tests.plain.models import Args, Block, IndexAddMoE, Model, SkippingMoE, Transformer
from tests.plain.test_rewiring import ids
from tests.transform.compare import assert_equal_tensors
from tests.zoo import tiny

INPUTS = (ids(),)


def refusal(model: Any, kind: type[fxskip.FxskipError] = fxskip.CaptureError, **given: Any) -> str:
    with pytest.raises(kind) as caught:
        fxskip.transform(model, "farskip", **({"example_inputs": INPUTS} | given))
    assert "\n  hint   " in str(caught.value)
    return str(caught.value)


# --- finding the layers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "inputs", "paths"),
    [
        (Model(layers=2), INPUTS, ["layers.0", "layers.1"]),
        (Transformer(Args(n_layers=2)), INPUTS, ["layers.0", "layers.1"]),
        (shapes.NanoStyle(), (ids(), ids()), ["transformer.h.0", "transformer.h.1"]),
        (shapes.InSequence(), INPUTS, ["model.1.0", "model.1.1"]),
        (shapes.TupleLayers(), INPUTS, ["layers.0", "layers.1"]),
        (Model(SkippingMoE, layers=1), INPUTS, ["layers.0"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_are_found(model: nn.Module, inputs: tuple[Tensor, ...], paths: list[str]) -> None:
    assert list(find_layers(model, without_values(inputs))) == paths
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (shapes.Drops, "layers (2 modules): the input of module 1 is not the output of module 0"),
        (
            shapes.ByName,
            "layers (2 modules): module 0 was not called with a tensor as its first positional argument",
        ),
        (shapes.TwoChains, "has 2 lists of modules that form a chain"),
        (
            shapes.ReadsValues,
            "does not run without values: RuntimeError: Tensor.item() cannot be called on meta",
        ),
    ],
)
def test_models_without_one_chain_of_layers(kind: type[nn.Module], found: str) -> None:
    message = refusal(kind(layers=2) if kind is not shapes.TwoChains else kind())
    assert found in message
    assert "example_inputs must be" in message or "for layer in self.layers: x = layer(x, ...)" in message


def test_layers_that_change_the_width_are_no_chain() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6))
    assert "module 0 is int64[2, 8], not a stream" in refusal(model)


def test_a_model_that_collects_its_hidden_states() -> None:
    message = refusal(shapes.Collects(layers=2))
    assert "the model does more with a layer's output than hand it to the next layer" in message


def test_recomputation_inside_a_layer() -> None:
    model = Model(layers=1)
    model.layers[0].__class__ = shapes.CheckpointsInside
    message = refusal(model)
    assert "linear is called inside tag_activation_checkpoint" in message
    assert "checkpoint whole layers" in message


def test_a_layer_with_a_forward_of_its_own() -> None:
    model = Model(layers=2)
    model.layers[1].forward = model.layers[1].forward
    assert "layer 1: the layer has a forward of its own" in refusal(model)


@pytest.mark.parametrize("call", [fxskip.transform, fxskip.plan])
def test_example_inputs_are_for_plain_models_and_needed_there(call: Any) -> None:
    with pytest.raises(fxskip.CaptureError, match=r"example_inputs=\(ids,\)"):
        call(Model(layers=1), "farskip")
    with pytest.raises(fxskip.CaptureError, match="leave example_inputs= out"):
        call(tiny("mixtral", layers=1), "farskip", example_inputs=INPUTS)


def test_what_is_no_model_is_refused() -> None:
    assert "int is no model" in refusal(3)


# --- the rewired model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(SkippingMoE, layers=2)


@pytest.fixture(scope="module")
def student(model: Model) -> Any:
    return fxskip.transform(model, "farskip", example_inputs=INPUTS)


def saved_and_loaded(student: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(student, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_weights(student: nn.Module) -> Any:
    """As the README says: build, transform with the same spec, load."""
    again = fxskip.transform(Model(SkippingMoE, layers=2), fxskip.spec_of(student), example_inputs=INPUTS)
    assert again.load_state_dict(student.state_dict()) == nn.modules.module._IncompatibleKeys([], [])
    return again


@pytest.mark.parametrize("keep", [copy.deepcopy, saved_and_loaded, through_weights])
def test_a_kept_student_stays_rewired(model: Model, student: Any, keep: Any) -> None:
    kept = keep(student)
    assert type(kept) is Model
    assert fxskip.is_transformed(kept)
    assert fxskip.spec_of(kept) == fxskip.spec_of(student)
    with torch.no_grad():
        for parameter in kept.head.parameters():
            parameter.mul_(2.0)  # its own weights
    assert_equal_tensors("logits", kept(ids()), 2 * rewired(model, ids(), WIRINGS["farskip"]))


def test_what_stays_and_what_is_new(model: Model, student: Any) -> None:
    assert list(student.state_dict()) == list(model.state_dict())
    assert type(student) is Model
    assert all(isinstance(layer, Region) and isinstance(layer, Block) for layer in student.layers)
    assert fxskip.is_transformed(student) and not fxskip.is_transformed(model)
    assert not any(isinstance(m, Region | Leaf) or "fxskip" in vars(m) for m in model.modules())

    plan = fxskip.plan(model, "farskip", example_inputs=INPUTS)
    assert fxskip.explain(student) == plan
    assert plan.model == "Model" and plan.streams == 2


def test_a_rewired_model_is_not_rewired_again(student: Any) -> None:
    assert "rewired already, by the spec 'farskip'" in refusal(student, fxskip.PassError)


def test_in_place() -> None:
    torch.manual_seed(0)
    mine = Model(SkippingMoE, layers=2)
    wanted = rewired(mine, ids(), WIRINGS["farskip"])
    assert fxskip.transform(mine, "farskip", inplace=True, example_inputs=INPUTS) is mine
    assert_equal_tensors("logits", mine(ids()), wanted)


def test_a_replaced_layer_is_noticed(student: Any) -> None:
    twin = copy.deepcopy(student)
    twin.layers[1] = Block(SkippingMoE())
    with pytest.raises(fxskip.CheckpointError, match="not wired as the model's record says"):
        fxskip.explain(twin)


def test_a_model_that_indexes_what_a_layer_returned() -> None:
    """`x[-1]` is the last row of a batch in the original, and would be the last stream of a rewired model."""

    class Peeks(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x, extra = self.embed(ids), 0.0
            for layer in self.layers:
                x = layer(x)
                extra = extra + x[-1].mean()
            return self.head(self.norm(x)) + extra

    with pytest.raises(
        fxskip.CaptureError, match=r"does more with a layer's output[\s\S]*opens the tuple of streams"
    ):
        fxskip.transform(Peeks(layers=2), "farskip", example_inputs=INPUTS)


def test_dropout_around_the_experts_sum_is_found_before_training() -> None:
    """In eval mode it does nothing, but the plan is made for training too: nothing can be told apart behind it."""

    class Drops(IndexAddMoE):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(super().forward(x), 0.1, self.training)

    original = Model(Drops, layers=2)
    with pytest.raises(fxskip.PassError, match="cannot be told apart"):
        fxskip.transform(original, "farskip", example_inputs=INPUTS)
    student = fxskip.transform(original, "farskip-moe", example_inputs=INPUTS).train()
    student(INPUTS[0]).sum().backward()
    assert all(p.grad is not None for p in student.parameters())
