"""What `sparse_kl` refuses, and what it says then."""

import math

import pytest
import torch

from fxskip.errors import FxskipError
from fxskip.loss import sparse_kl
from tests.loss.device import on_device
from tests.loss.implementations import NEEDS_TRITON
from tests.loss.sparse_inputs import D, K, N, Sparse, V

BAD = [
    ({"ids": torch.full((N, K), V)}, r"ids\[0, 0\] is 50\n.*ids are 0 to 49"),
    ({"ids": torch.full((N, K), -1)}, r"ids\[0, 0\] is -1"),
    ({"ids": torch.zeros(N, K)}, "ids is torch.float32"),
    ({"ids": torch.zeros(N, K + 1, dtype=torch.int64)}, r"ids is \[13, 6\], logp \[13, 5\]"),
    ({"ids": torch.zeros(N, 0, dtype=torch.int64)}, r"ids has shape \[13, 0\]"),
    (
        {"ids": torch.zeros(N, K, dtype=torch.int64, device="meta")},
        "arguments are on several devices: .*ids on meta",
    ),
    ({"logp": torch.full((N, K), -torch.inf)}, r"logp\[0, 0\] is -inf"),
    ({"logp": torch.full((N, K), torch.nan)}, r"logp\[0, 0\] is nan"),
    ({"logp": torch.zeros(N, K)}, "row 0 of logp add up to 5"),
    ({"logp": torch.zeros(N, K, requires_grad=True)}, "logp requires a gradient"),
    ({"logp": torch.zeros(N, K, dtype=torch.int64)}, "logp is torch.int64"),
    ({"counts": torch.full((N,), K + 1)}, r"counts\[0\] is 6"),
    ({"counts": torch.zeros(N)}, "counts is torch.float32"),
    ({"hidden": torch.zeros(1, N, D)}, r"hidden has shape \[1, 13, 6\]"),
    ({"hidden": torch.zeros(N, D).long()}, "hidden is torch.int64"),
    ({"hidden": torch.zeros(N - 1, D)}, r"ids has shape \[13, 5\]\n.*\[12, K\]"),
    ({"weight": torch.zeros(V, D + 1)}, "weight is .*widths differ"),
    ({"bias": torch.zeros(V + 1)}, r"bias is \[51\]"),
    ({"tail": "other"}, "tail is 'other'\n.*truncated, ghost, renormalised, subset"),
    ({"temperature": 0.0}, "temperature is 0.0"),
    ({"softcap": -1.0}, "softcap is -1.0"),
    ({"scale": 0.0}, "scale is 0.0"),
    ({"token_weight": torch.full((N,), -1.0)}, r"token_weight\[0\] is -1.0"),
    ({"denominator": 0.0}, "denominator is 0.0"),
    ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ({"accumulate": 0}, "accumulate is 0"),
    ({"vocabulary": V + 1}, "vocabulary is 51, and weight has 50 rows"),
    ({"logits_dtype": torch.bfloat16}, "logits_dtype is torch.bfloat16, hidden torch.float32"),
    ({"implementation": "cuda"}, "implementation is 'cuda'"),
]


@pytest.mark.parametrize(
    ("change", "message"), BAD, ids=lambda value: "" if isinstance(value, str) else next(iter(value))
)
def test_a_bad_argument_is_named(change, message):
    case = Sparse()
    arguments = {"hidden": case.leaves[0], "weight": case.leaves[1], "ids": case.ids, "logp": case.logp}
    with pytest.raises(FxskipError, match=message):
        sparse_kl(**on_device(arguments | change))


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("dtype", "scale", "obstacle"),
    [(torch.float64, 1.0, "hidden is torch.float64"), (torch.float32, -1.0, "scale is -1.0")],
)
def test_the_kernels_are_not_replaced_when_they_are_asked_for(dtype, scale, obstacle):
    case = Sparse(dtype=dtype, options={"scale": scale})
    with pytest.raises(FxskipError, match=f"implementation='triton' cannot run: {obstacle}"):
        case.call(implementation="triton")


@pytest.mark.parametrize("denominator", [0.0, -2.0, math.nan])
def test_the_value_of_a_denominator_is_checked(denominator):
    with pytest.raises(FxskipError, match=f"sparse_kl: denominator is {denominator}"):
        Sparse(options={"denominator": torch.tensor(denominator)}).call()


@pytest.mark.parametrize("value", [1e39, 1e-50, math.inf, 10**400])
def test_numbers_that_float32_cannot_hold(value):
    with pytest.raises(FxskipError, match="sparse_kl: scale is .*"):
        Sparse().call(scale=value)
