"""Where the tests of the losses run: on a GPU, with compiled kernels, or else here, with interpreted ones."""

from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` whose tensors, made when their module was imported, are where the test runs."""
    return {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in arguments.items()
    }
