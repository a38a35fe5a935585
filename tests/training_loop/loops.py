"""The training loops that a student and its reference both go through."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from tests.transform.compare import Batch, assert_equal_tensors

Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def sgd_steps(model: nn.Module, batches: Iterable[Sequence[Batch]], *, lr: float = 0.1) -> None:
    """Plain SGD; each step takes the mean loss of its batches, whose gradients are accumulated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in batches:
        for batch in step:
            (model(**batch).loss / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered where it is spread over processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, whole, by name."""
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def assert_same_weights(got: nn.Module, want: nn.Module) -> None:
    ours, theirs = weights(got), weights(want)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert_equal_tensors(f"weights {name}", ours[name], tensor)
