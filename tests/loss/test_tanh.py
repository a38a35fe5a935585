"""The kernels' tanh by itself: relative error over its two branches and where they meet."""

import pytest
import torch

from tests.loss.device import DEVICE
from tests.loss.implementations import NEEDS_TRITON

pytestmark = [NEEDS_TRITON, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
JOINT = 0.6  # below it a power series, which errs most there: by 8.5e-8
FOUR_UNITS = 4 * 2.0**-23


def applied(x):
    from tests.loss.tanh_kernel import write_tanh

    y = torch.empty_like(x)
    write_tanh[(1,)](x, y, SIZE=len(x))
    return y


def relative_error(x):
    right = x.double().tanh()
    return ((applied(x).double() - right) / right).abs().max().item()


def test_within_four_units_in_the_last_place():
    wide = torch.linspace(-12, 12, 8192, device=DEVICE)
    small = torch.logspace(-30, -1, 2048, device=DEVICE)
    for x in (wide, torch.cat([small, -small])):
        assert relative_error(x) <= FOUR_UNITS


def test_the_branches_meet():
    ulps = torch.arange(-1024, 1024, device=DEVICE)
    near = (torch.tensor(JOINT, device=DEVICE).view(torch.int32) + ulps).int().view(torch.float32)
    assert near.min() < JOINT < near.max()
    assert relative_error(torch.cat([near, -near])) <= FOUR_UNITS


def test_zero_is_zero():
    zeros = torch.tensor([0.0, -0.0], device=DEVICE)
    assert torch.equal(applied(zeros), zeros)
