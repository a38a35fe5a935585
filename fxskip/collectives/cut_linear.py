"""Matrices that are cut over the ranks of the axis "tensor": what a linear layer runs of which a rank has a part.

A *column* linear has some of the outputs: it takes the whole input and gives this rank's features. A *row* linear has
some of the inputs: it takes this rank's features and gives a part of a sum. Like a leaf, a cut linear is its module
with another class, and one operation of the captured graph, whose shapes there are those of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fxskip.collectives.expert_parallel import local
from fxskip.errors import PassError
from fxskip.leaves import running_layer
from fxskip.parallel import TENSOR, running_axis

Cut = Literal["column", "row"]


class CutLinear(nn.Linear):
    """A linear layer of which this rank has some of the outputs (column) or of the inputs (row)."""

    fxskip_path: str
    """Path of the module in its decoder layer."""
    fxskip_cut: Cut

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return run_cut_linear(self.fxskip_path, self.fxskip_cut, self.out_features, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """This rank's features [..., out / ranks] of whole inputs, or a part of the sum [..., out] of its inputs."""
        if not _IN_A_REGION.get():
            raise PassError(
                "cut linear",
                f"{self.fxskip_path} has this rank's part of its matrix, and was called outside its decoder layer",
                hint="call the model, or whole layers",
            )
        held: Tensor | None = self.bias
        bias = None if held is None else local(held)
        if self.fxskip_cut == "row" and bias is not None:
            is_first = running_axis(TENSOR).get_local_rank() == 0
            bias = _OnFirstRank.apply(bias, is_first)  # type: ignore[no-untyped-call]
        return F.linear(input, local(self.weight), bias)


_IN_A_REGION: ContextVar[bool] = ContextVar("fxskip_in_a_region", default=False)


@contextmanager
def _in_a_region() -> Iterator[None]:
    token = _IN_A_REGION.set(True)
    try:
        yield
    finally:
        _IN_A_REGION.reset(token)


class _OnFirstRank(torch.autograd.Function):
    """A summand that the first rank alone adds. All know its gradient, which is that of the sum."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, is_first: bool) -> Tensor:
        return summand.view_as(summand) if is_first else torch.zeros_like(summand)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def run_cut_linear(path: str, cut: Cut, out_features: int, input: Tensor) -> Tensor:
    """Call the cut linear at `path` of the layer that runs now.

    Where Dynamo traces, tensors have no values, and the result has the shape that the whole matrix gives.
    """
    if isinstance(input, FakeTensor) or input.is_meta:
        return input.new_empty((*input.shape[:-1], out_features))
    module = running_layer().get_submodule(path)
    if not isinstance(module, CutLinear):
        raise PassError(
            "cut linear",
            f"{path} was cut over processes and is a {type(module).__name__} now",
            hint="add adapters, or change layers otherwise, before parallelize",
        )
    with _in_a_region():
        made: Tensor = module(input)
    return made


def own_part(value: Tensor, dim: int, axis: str) -> Tensor:
    """This rank's part of a value that all ranks of `axis` have, cut along `dim`."""
    mesh = running_axis(axis)
    size = value.shape[dim] // mesh.size()
    return value.narrow(dim, mesh.get_local_rank() * size, size)


def cut_linear(layer: nn.Module, path: str, cut: Cut, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the linear layer at `path`, in place; its parameters become DTensors on `mesh`.

    Raises   PassError for what is no plain linear layer, and where its features do not divide
    """
    module = layer.get_submodule(path)
    _require_divisible(module, path, cut, mesh.size())
    dim = 0 if cut == "column" else 1
    module.weight = _own(module.weight, mesh, dim)
    if isinstance(module.bias, nn.Parameter) and cut == "column":
        module.bias = _own(module.bias, mesh, 0)
    module.__class__ = CutLinear
    module.fxskip_path, module.fxskip_cut = path, cut  # type: ignore[assignment]


def _own(parameter: Any, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    part = parameter.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    return nn.Parameter(
        DTensor.from_local(part, mesh, [Shard(dim)], run_check=False), parameter.requires_grad
    )


def _require_divisible(module: nn.Module, path: str, cut: Cut, ranks: int) -> None:
    if type(module) is not nn.Linear or isinstance(module.weight, DTensor):
        raise PassError(
            "parallelize",
            f"{path} is a {type(module).__name__} and no plain nn.Linear, and cannot be cut over {ranks} processes",
            where=f"weight: {type(module.weight).__name__}",
            hint="parallelize before adapters, quantization or anything else changes the layers; or leave "
            "parallel.tensor out",
        )
    features = module.out_features if cut == "column" else module.in_features
    if features % ranks:
        raise PassError(
            "parallelize",
            f"{path} has {features} {'outputs' if cut == 'column' else 'inputs'}, which {ranks} processes cannot share",
            hint="parallel.tensor.size must divide the number of heads and the widths of the MLPs",
        )
