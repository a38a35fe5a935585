"""Where the processes of these tests compute: all on one GPU, where there is one, over gloo; else here."""

from torch import Tensor, cuda

DEVICE = "cuda" if cuda.is_available() else "cpu"


def on_device(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch, there."""
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
