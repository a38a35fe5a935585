"""Settings of the whole suite."""

import datetime
import os

import pytest

# Before transformers is imported: no look-ups on a network, and no notes about tiny models.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# Which architectures tests/ecosystem tries today; set once, for parallel test processes must agree across midnight.
os.environ.setdefault("COVERAGE_DAY", str(datetime.date.today().toordinal()))

import torch

# Without a GPU, kernels run in Triton's interpreter. Triton reads the switch when fxskip.loss defines them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models are too small to gain from threads, and parallel test processes would fight over cores."""
    torch.set_num_threads(1)
