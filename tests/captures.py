"""What folders of tests that capture layers share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def forget_captures() -> Iterator[None]:
    """Captures would otherwise stay in memory, and be tried first, in all later modules of the process."""
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """Captures of hundreds of architectures would otherwise count as captures of one region, which has a limit."""
    torch._dynamo.reset()
