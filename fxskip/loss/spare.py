"""Scratch memory for the kernels out of memory that exists and is not in use yet."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: what kernels load at once


class Spare:
    """Hands out parts of `memory` (contiguous, any dtype), and new tensors on `device` once it is used up."""

    def __init__(self, memory: Tensor | None, device: torch.device) -> None:
        self.device = device
        self.free = None if memory is None else memory.view(-1).view(torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape) * dtype.itemsize
        if self.free is not None:
            start = -self.free.data_ptr() % ALIGNMENT
            if start + size <= len(self.free):
                taken, self.free = self.free[start : start + size], self.free[start + size :]
                return taken.view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=self.device)
