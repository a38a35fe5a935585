"""A rewired layer computes the rewired layer, or refuses; never the original."""

import copy
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import fxskip
from fxskip.runtime.regions import Region
from fxskip.swapped import swapped_class
from tests.transform.wirings import FARSKIP
from tests.zoo import batch, tiny


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**batch()).logits
    return out


class Pair:
    """A student, and what it and the original compute."""

    def __init__(self) -> None:
        model = tiny("mixtral")
        self.model: PreTrainedModel = model
        self.student: PreTrainedModel = fxskip.transform(model, FARSKIP.spec)
        self.right, self.stock = logits(FARSKIP.reference(model)), logits(model)
        assert not torch.equal(self.right, self.stock)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def assert_right_or_refused(
    pair: Pair, compute: Callable[[], Tensor], refusals: tuple[type[Exception], ...]
) -> None:
    try:
        got = compute()
    except refusals:
        return
    assert torch.equal(got, pair.right)


# --- TorchDynamo switched off --------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True])
def test_without_dynamo_a_student_refuses(pair: Pair, captured: bool) -> None:
    torch._dynamo.reset()
    if captured:
        assert torch.equal(logits(pair.student), pair.right)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(fxskip.PassError, match="TorchDynamo is off"),
    ):
        logits(pair.student)
    assert torch.equal(logits(pair.student), pair.right)


def test_under_a_disabled_caller(pair: Pair) -> None:
    assert_right_or_refused(pair, lambda: torch.compiler.disable(logits)(pair.student), (fxskip.PassError,))
    with torch._dynamo.config.patch(disable=True):
        assert_right_or_refused(pair, lambda: logits(pair.student), (fxskip.PassError,))


SCRIPT = """
import pickle, sys, torch, fxskip
from tests.zoo import batch, tiny
with open(sys.argv[1], "rb") as file:
    student = pickle.load(file)
try:
    student(**batch())
except fxskip.PassError as error:
    print("call:", error)
try:
    fxskip.transform(tiny("mixtral"), "farskip")
except fxskip.FxskipError as error:
    print("transform:", error)
"""


@pytest.mark.parametrize(
    "variable", ["TORCHDYNAMO_DISABLE", pytest.param("TORCH_COMPILE_DISABLE", marks=pytest.mark.slow)]
)
def test_in_a_process_without_dynamo(pair: Pair, tmp_path: Path, variable: str) -> None:
    file = tmp_path / "student.pickle"
    file.write_bytes(pickle.dumps(pair.student))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)],
        env=os.environ | {variable: "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    call, transform = done.stdout.split("transform:")
    for message in (call, transform):
        assert "TorchDynamo is off" in message
        assert variable in message


# --- somebody else's compiler --------------------------------------------------------------------


def compiled_model(student: nn.Module) -> Tensor:
    return logits(torch.compile(student, backend="eager"))  # type: ignore[arg-type]


def compiled_function(student: nn.Module) -> Tensor:
    out: Tensor = torch.compile(logits, backend="aot_eager")(student)
    return out


def compiled_as_one_graph(student: nn.Module) -> Tensor:
    return logits(torch.compile(student, backend="eager", fullgraph=True))  # type: ignore[arg-type]


def compiled_in_place(student: nn.Module) -> Tensor:
    twin = copy.deepcopy(student)
    twin.compile(backend="eager")
    return logits(twin)


def compiled_layer(student: nn.Module) -> Tensor:
    twin = copy.deepcopy(student)
    twin.model.layers[1] = torch.compile(twin.model.layers[1], backend="eager")
    return logits(twin)


@pytest.mark.parametrize(
    "compute",
    [
        compiled_model,
        compiled_as_one_graph,
        pytest.param(compiled_function, marks=pytest.mark.slow),
        pytest.param(compiled_in_place, marks=pytest.mark.slow),
        pytest.param(compiled_layer, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile(pair: Pair, compute: Callable[[nn.Module], Tensor]) -> None:
    torch._dynamo.reset()
    refusals = (fxskip.FxskipError, torch._dynamo.exc.TorchDynamoException)
    assert_right_or_refused(pair, lambda: compute(pair.student), refusals)
    assert torch.equal(logits(pair.student), pair.right)


@pytest.mark.filterwarnings("ignore")
def test_exported(pair: Pair) -> None:
    def exported() -> Tensor:
        arguments = {"input_ids": batch()["input_ids"], "use_cache": False}
        program = torch.export.export(pair.student, (), arguments, strict=False)
        out: Tensor = program.module()(**arguments).logits
        return out

    assert_right_or_refused(pair, exported, (Exception,))


# --- gradient checkpointing ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*use_reentrant parameter should be passed:UserWarning")
@pytest.mark.parametrize("options", [{"use_reentrant": True}, {}, {"preserve_rng_state": False}], ids=str)
def test_reentrant_checkpointing_is_refused(options: dict[str, bool]) -> None:
    """It sees no tensors inside a tuple, and is what torch does where `use_reentrant` is not given."""
    student = fxskip.transform(tiny("mixtral", layers=2), FARSKIP.spec).train()
    student.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    with pytest.raises(fxskip.PassError, match=r"reentrant[\s\S]*\{\"use_reentrant\": False\}"):
        student(**batch()).loss.backward()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_checkpointing_of_another_kind_is_refused() -> None:
    student = fxskip.transform(tiny("mixtral", layers=2), FARSKIP.spec).train()
    student.gradient_checkpointing_enable()

    def reentrant(function: Callable[..., Any], *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)

    for layer in student.model.layers:
        layer._gradient_checkpointing_func = reentrant
    with pytest.raises(fxskip.PassError, match="reentrant"):
        student(**batch()).loss.backward()


# --- layers that would not be rewired ------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("number", [0, 2])
def test_a_layer_with_a_forward_of_its_own_is_refused(number: int, inplace: bool) -> None:
    model = tiny("mixtral")
    layer = model.model.layers[number]
    layer.forward = types.MethodType(type(layer).forward, layer)

    with pytest.raises(fxskip.CaptureError, match=f"layer {number}: the layer has a forward of its own"):
        fxskip.transform(model, FARSKIP.spec, inplace=inplace)
    assert not fxskip.is_transformed(model)
    assert not any(isinstance(module, Region) for module in model.modules())


def test_a_layer_outside_its_model_is_refused(pair: Pair) -> None:
    _, second, third = copy.deepcopy(pair.student).model.layers
    x = torch.randn(2, 9, 64)
    for layer in (second, third):
        with pytest.raises(fxskip.CaptureError, match="1 streams arrive where the wiring needs 2"):
            layer(x)


def test_removed_layers_are_noticed(pair: Pair) -> None:
    student = copy.deepcopy(pair.student)
    student.model.layers = student.model.layers[1:]
    with pytest.raises(fxskip.CaptureError, match="layers must not be removed or reordered"):
        logits(student)


def test_one_class_for_all_layers_of_a_class(pair: Pair) -> None:
    original, swapped = (type(m.model.layers[0]) for m in (pair.model, pair.student))
    assert swapped is swapped_class(Region, original)
    assert issubclass(swapped, Region) and issubclass(swapped, original)
    assert {type(layer) for layer in pair.student.model.layers} == {swapped}
    assert not any("forward" in vars(module) for module in pair.student.modules())
