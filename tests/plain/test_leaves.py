"""Modules that Dynamo cannot follow run as they are: found, declared, checked, and refused where they hide too much."""

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxskip
from fxskip import leaves
from fxskip.leaves import Leaf
from tests.plain.formulas import WIRINGS, rewired
from tests.plain.models import EXPERTS, TOP, D, Expert, Model, MoE, SkippingExperts, SkippingMoE, WholeMoE
from tests.plain.test_rewiring import gradients, ids
from tests.transform.compare import assert_equal_tensors, assert_same_gradients

INPUTS = (ids(),)


def farskip(model: nn.Module) -> Any:
    return fxskip.transform(model, "farskip", example_inputs=INPUTS)


@contextlib.contextmanager
def declared(kind: type[nn.Module], **wanted: Any) -> Iterator[None]:
    """A declaration that does not outlive the test."""
    fxskip.leaf(kind, **wanted)
    try:
        yield
    finally:
        del leaves._DECLARED[kind]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(SkippingMoE, layers=2)


@pytest.fixture(scope="module")
def student(model: Model) -> Any:
    return farskip(model)


def expected(model: nn.Module, given: Tensor) -> Tensor:
    return rewired(model, given, WIRINGS["farskip"])


def test_the_deepest_module_is_the_leaf(model: Model, student: Any) -> None:
    assert fxskip.explain(student).rewired == 3
    for layer, original in zip(student.layers, model.layers, strict=True):
        assert [m for m in layer.modules() if isinstance(m, Leaf)] == [layer.moe.experts]
        assert isinstance(layer.moe.experts, SkippingExperts)
        assert type(original.moe.experts) is SkippingExperts


def test_hooks_of_a_leaf_run_once(student: Any) -> None:
    twin = copy.deepcopy(student)
    calls: list[str] = []
    leaf = twin.layers[0].moe.experts
    leaf.register_forward_pre_hook(lambda *_: calls.append("before"))
    leaf.register_forward_hook(lambda *_: calls.append("after"))
    leaf.register_full_backward_hook(lambda *_: calls.append("backward"))
    assert torch.equal(twin(ids()), student(ids()))
    twin(ids()).sum().backward()

    assert calls == ["before", "after"] * 2 + ["backward"]


def test_checkpointed_layers_find_their_leaves(model: Model, student: Any) -> None:
    class Checkpointed(Model):
        def forward(self, given: Tensor) -> Tensor:
            x = self.embed(given)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            return self.head(self.norm(x))

    twin = copy.deepcopy(student)
    twin.__class__ = Checkpointed
    twin.reentrant = False
    got, wanted = twin(ids()), expected(model, ids())
    assert_equal_tensors("logits", got, wanted)
    assert_same_gradients(gradients(twin, got), gradients(model, wanted))

    twin.reentrant = True
    with pytest.raises(fxskip.PassError, match=r"reentrant[\s\S]*use_reentrant=False"):
        twin(ids())


def test_threads_run_their_own_leaves(student: Any) -> None:
    models = [student, copy.deepcopy(student)]
    with torch.no_grad():
        for parameter in models[1].layers[0].moe.experts.parameters():
            parameter.zero_()
    wanted = [one(ids()) for one in models]
    assert not torch.equal(*wanted)
    got: dict[int, list[Tensor]] = {0: [], 1: []}

    def work(number: int) -> None:
        for _ in range(8):
            got[number].append(models[number](ids()))

    threads = [threading.Thread(target=work, args=(number,)) for number in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(outs) == 8 for outs in got.values())
    assert all(torch.equal(out, wanted[number]) for number, outs in got.items() for out in outs)


def test_ddp_reduces_the_gradients_of_a_leaf(student: Any, tmp_path: Any) -> None:
    alone = copy.deepcopy(student)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(copy.deepcopy(student), find_unused_parameters=True)
        seen: list[int] = []
        wrapped.register_comm_hook(
            None, lambda _, bucket: (seen.append(bucket.buffer().numel()), _done(bucket))[1]
        )
        wrapped(ids()).square().mean().backward()
    finally:
        dist.destroy_process_group()
    wanted = gradients(alone, alone(ids()))
    assert sum(seen) == sum(p.numel() for p in alone.parameters())
    got = {name: p.grad for name, p in wrapped.module.named_parameters() if name in wanted}
    assert_same_gradients(got, wanted)


def _done(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# --- a leaf that routes itself -------------------------------------------------------------------


def test_routed_and_shared_inside_one_leaf_are_not_told_apart() -> None:
    torch.manual_seed(0)
    model = Model(WholeMoE, layers=2)
    with pytest.raises(fxskip.PassError, match=r"cannot be told apart[\s\S]*moe runs as it is[\s\S]*all@1"):
        farskip(model)

    ladder = fxskip.transform(model, "ladder", example_inputs=INPUTS)
    x = before = model.embed(ids())
    for layer in model.layers:
        r = x + layer.attn(layer.attn_norm(before))
        x, before = r + layer.moe(layer.ffn_norm(x)), r
    assert_equal_tensors("logits", ladder(ids()), model.head(model.norm(x)))


class RoutedOnly(WholeMoE):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        return self.routed(rows, *self.router(rows)).view(x.shape)


def test_a_leaf_that_is_declared_routed() -> None:
    torch.manual_seed(0)
    model = Model(RoutedOnly, layers=2)
    with declared(RoutedOnly, adds="routed"):
        student = farskip(model)
        x = y = model.embed(ids())
        for layer in model.layers:
            r = x + layer.attn(layer.attn_norm(y))
            x, y = r + layer.moe(layer.ffn_norm(x)), r
        assert_equal_tensors("logits", student(ids()), model.head(model.norm(x)))


# --- what a leaf returns -------------------------------------------------------------------------


class PairExperts(SkippingExperts):
    """Returns the number of tokens of each expert too."""

    def forward(self, *args: Tensor) -> Any:
        return super().forward(*args), torch.bincount(args[2].flatten(), minlength=EXPERTS)


class PairMoE(MoE):
    def __init__(self) -> None:
        super().__init__()
        self.experts = PairExperts()  # type: ignore[assignment]
        self.register_buffer("counts", torch.zeros(EXPERTS, dtype=torch.long))

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out, counts = self.experts(x, weights, chosen)
        self.counts += counts
        return out


def test_several_results_are_declared() -> None:
    torch.manual_seed(0)
    model = Model(PairMoE, layers=2)

    def outputs(x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), chosen.new_empty(EXPERTS)

    with declared(PairExperts, outputs=outputs):
        student = farskip(model)
        assert_equal_tensors("logits", student(ids()), expected(model, ids()))
    assert student.layers[1].moe.counts.sum() == ids().numel() * TOP


class WideExperts(SkippingExperts):
    def forward(self, *args: Tensor) -> Tensor:
        return F.pad(super().forward(*args), (0, 1))


class WideMoE(SkippingMoE):
    def __init__(self) -> None:
        super().__init__()
        self.experts = WideExperts()  # type: ignore[assignment]

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.experts(x, weights, chosen)[..., :D]


def test_a_result_of_another_shape_than_assumed_is_an_error() -> None:
    student = fxskip.transform(Model(WideMoE, layers=2), "identity", example_inputs=INPUTS)
    with pytest.raises(fxskip.CaptureError) as caught:
        student(ids())
    message = str(caught.value)
    assert "WideExperts returned float32[16, 33] where float32[16, 32] was assumed" in message
    assert "fxskip.leaf(WideExperts, outputs=" in message
    assert "decoder layer 0: module moe.experts" in message


class Overwriting(SkippingExperts):
    def forward(self, *args: Tensor) -> Tensor:
        return args[0].add_(super().forward(*args))


class OverwritingMoE(SkippingMoE):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Overwriting()  # type: ignore[assignment]


def test_a_leaf_that_writes_into_its_argument_is_an_error() -> None:
    student = fxskip.transform(Model(OverwritingMoE, layers=2), "identity", example_inputs=INPUTS)
    with (
        torch.no_grad(),
        pytest.raises(fxskip.CaptureError, match="Overwriting writes into one of its arguments"),
    ):
        student(ids())


# --- declarations --------------------------------------------------------------------------------


def test_declared_modules_are_leaves_though_dynamo_could_follow() -> None:
    torch.manual_seed(0)
    model = Model(SkippingMoE, layers=2)
    with declared(Expert):
        student = fxskip.transform(model, "identity", example_inputs=INPUTS)
    held = [path for path, m in student.layers[0].named_modules() if isinstance(m, Leaf)]
    assert held == ["moe.experts", "moe.shared"]
    assert_equal_tensors("logits", student(ids()), model(ids()))


def test_a_declaration_is_of_a_class() -> None:
    with pytest.raises(fxskip.CaptureError, match="pass the class, not an instance"):
        fxskip.leaf(Expert())  # type: ignore[type-var]
    with pytest.raises(fxskip.CaptureError, match="adds='shared'"):
        fxskip.leaf(Expert, adds="shared")  # type: ignore[arg-type]

    @fxskip.leaf(adds="routed")
    class Decorated(nn.Module):
        pass

    assert isinstance(Decorated(), nn.Module)
    del leaves._DECLARED[Decorated]


class Unclear(nn.Module):
    """Depends on values, and nothing says that it holds experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum().item() > 0 else x


def test_a_leaf_that_may_be_anything() -> None:
    with pytest.raises(
        fxskip.PassError, match=r"cannot tell what this sub-block is: moe runs as it is"
    ) as caught:
        farskip(Model(Unclear, layers=2))
    assert 'fxskip.leaf(ItsClass, adds="routed")' in str(caught.value)


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


def test_what_is_no_loop_over_experts_is_not_made_a_leaf_unasked() -> None:
    with pytest.raises(fxskip.CaptureError, match=r"module moe \(Breaks\)[\s\S]*fxskip\.leaf\(Breaks\)"):
        farskip(Model(Breaks, layers=2))
