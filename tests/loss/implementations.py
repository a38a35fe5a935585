"""What a test of a loss needs of this machine: plain PyTorch, Triton's kernels, or both in turn."""

import importlib.util

import pytest

from fxskip.loss.tails import TAILS


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


NEEDS_TRITON = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", ["torch", pytest.param("triton", marks=NEEDS_TRITON)]
)
BY_TAIL = pytest.mark.parametrize("tail", TAILS)
