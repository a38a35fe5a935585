"""Without a GPU the kernels run in Triton's interpreter. Triton reads the switch when the kernels are defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
