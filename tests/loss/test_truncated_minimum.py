"""The least that the truncated loss can be."""

import math

import pytest
import torch

from fxskip.errors import FxskipError
from fxskip.loss import truncated_minimum
from tests.loss.device import on_device
from tests.loss.sparse_inputs import COUNTS, WEIGHTS, K, N, Sparse


def test_the_truncated_minimum_counts_what_the_loss_counts():
    case = Sparse()
    case.logp[WEIGHTS == 0] = torch.nan
    counted = case.logp.where(torch.arange(K) < COUNTS[:, None], -torch.inf).exp().sum(-1)
    rows = torch.tensor([m * math.log(m) if m > 0 else 0.0 for m in counted.tolist()])
    expected = (rows * WEIGHTS)[WEIGHTS > 0].sum() / WEIGHTS.sum()
    got = truncated_minimum(case.logp, counts=COUNTS, token_weight=WEIGHTS)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": [[-1.0]]}, "truncated_minimum: logp is a list"),
        ({"logp": torch.zeros(N)}, r"logp has shape \[13\]\n.*\[N, K\]"),
        ({"logp": torch.zeros(N, K).long()}, "logp is torch.int64"),
        ({"logp": torch.full((N, K), torch.nan)}, r"logp\[0, 0\] is nan"),
        ({"logp": torch.zeros(N, K)}, "row 0 of logp add up to 5"),
        ({"counts": torch.full((N,), K + 1)}, r"counts\[0\] is 6"),
        ({"counts": COUNTS[1:]}, r"counts is torch.int64 \[12\]"),
        ({"token_weight": -WEIGHTS}, r"token_weight\[1\] is -2.0"),
        ({"denominator": 0.0}, "denominator is 0.0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_argument_of_the_minimum_is_named(change, message):
    with pytest.raises(FxskipError, match=message):
        truncated_minimum(**on_device({"logp": Sparse().logp} | change))
