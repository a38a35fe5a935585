"""Settings of the whole suite."""

import os

import pytest

# Before transformers is imported: no look-ups on a network, and no notes about tiny models.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models are too small to gain from threads, and parallel test processes would fight over cores."""
    torch.set_num_threads(1)
