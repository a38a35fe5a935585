import pytest
import torch

from tests.loss.device import DEVICE


@pytest.fixture(autouse=True)
def default_device():
    with torch.device(DEVICE):
        yield
