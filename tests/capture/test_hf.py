"""capture_layers: the graphs of all decoder layers from one forward of a twin without weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxskip.capture.hf import capture_layers, decoder_layers
from fxskip.capture.region import capture_count
from fxskip.capture.twin import layer_class, meta_twin, require_own_class_forward
from fxskip.errors import CaptureError
from fxskip.ir import stream_inputs, stream_outputs
from tests.zoo import batch, tiny


def test_layers_of_one_kind_share_a_graph() -> None:
    before = capture_count()
    captured = capture_layers(tiny("deepseek_v3", layers=4))  # the first layer is dense

    assert [layer.path for layer in captured] == [f"model.layers.{i}" for i in range(4)]
    dense, *moe = [layer.graph for layer in captured]
    assert moe[0] is moe[1] is moe[2]
    assert dense is not moe[0]
    assert capture_count() == before + 2
    assert all(list(markers(dense)) == [0] for markers in (stream_inputs, stream_outputs))


def test_the_model_is_left_alone() -> None:
    model = tiny("mixtral").train()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    capture_layers(model)

    assert model.training
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_twin_has_the_structure_and_no_memory() -> None:
    model = tiny("qwen2_moe", tie_word_embeddings=True)
    twin = meta_twin(model)

    assert list(twin.state_dict()) == list(model.state_dict())
    assert {tensor.device.type for tensor in [*twin.parameters(), *twin.buffers()]} == {"meta"}
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert next(model.parameters()).device.type == "cpu"


def test_layers_are_found_by_their_number() -> None:
    """Also where lists of experts have as many entries."""
    path, layers = decoder_layers(tiny("qwen2_moe", layers=4))
    assert (path, len(layers)) == ("model.layers", 4)


# --- refusals ------------------------------------------------------------------------------------


def test_a_module_that_is_no_language_model() -> None:
    with pytest.raises(CaptureError, match="Linear is no causal language model of transformers"):
        decoder_layers(nn.Linear(4, 4))


def test_a_headless_model() -> None:
    with pytest.raises(CaptureError, match="MixtralModel is no causal language model"):
        decoder_layers(tiny("mixtral").model)


def test_a_decoder_without_layers() -> None:
    model = tiny("mixtral")
    model.model.layers = nn.ModuleList()
    with pytest.raises(CaptureError, match="MixtralModel holds no list of decoder layers"):
        decoder_layers(model)


def test_a_model_that_changes_the_stream_between_layers() -> None:
    model = tiny("mixtral")
    model.model.layers[0].register_forward_hook(lambda module, args, out: out * 2.0)
    with pytest.raises(
        CaptureError, match="the input of decoder layer 1 is not the output of the layer that ran before it"
    ):
        capture_layers(model)


def test_a_model_that_skips_a_layer() -> None:
    model = tiny("mixtral")

    class Skips(type(model.model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            kept, self.layers = self.layers, nn.ModuleList(self.layers[:2])
            self.config.num_hidden_layers = 2
            out = super().forward(*args, **kwargs)
            self.layers, self.config.num_hidden_layers = kept, 3
            return out

    model.model.__class__ = Skips
    with pytest.raises(CaptureError, match=r"ran in the order \[0, 1\], and there are 3"):
        capture_layers(model)


def test_a_layer_with_a_forward_of_its_own() -> None:
    """As accelerate's hooks install it: it would go on running the original body under a swapped class."""
    model = tiny("mixtral")
    layer = model.model.layers[1]
    inner = layer.forward

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = inner(*args, **kwargs)
        return out

    layer.forward = wrapped
    with pytest.raises(CaptureError, match=r"layer 1: the layer has a forward of its own[\s\S]*accelerate"):
        capture_layers(model)
    del layer.forward
    require_own_class_forward(layer, 1)
    assert layer_class(copy.deepcopy(layer)) is type(layer)
    with torch.no_grad():
        model(**batch())
