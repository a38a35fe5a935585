"""What folders of tests that capture layers share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def forget_captures() -> Iterator[None]:
    """Captures would otherwise stay in memory, and be tried first, in all later modules of the process."""
    yield
    torch._dynamo.reset()
