"""Compare students that are spread over ranks with the same tokens on each with the student of one process."""

from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxskip
from fxskip.collectives.all_reduce import Enter, Reduce
from fxskip.collectives.in_flight import Issued, poisoned_buffers, under_way
from tests.collectives.device import DEVICE, on_device
from tests.zoo import batch, tiny

MODES = ("reference", "scheduled", "eager_wait")
ROUNDING = 1e-12
"""Bound of relative differences in float64 that another order of additions explains."""


class Outcome(NamedTuple):
    """What one forward and backward gave, gradients as each rank has them."""

    logits: Tensor
    gradients: dict[str, Tensor]


def model(kind: str, **overrides: Any) -> nn.Module:
    """A tiny model in float64."""
    found = tiny(kind, **{"layers": 3} | overrides).to(DEVICE).double().eval()
    found.set_experts_implementation("batched_mm")  # the grouped kernel has no float64
    return found


def outcome(student: nn.Module, seed: int = 0) -> Outcome:
    """One step on a batch that all ranks have alike, in which unfinished buffers hold NaN."""
    student.zero_grad(set_to_none=True)
    with poisoned_buffers():
        out = student(**on_device(batch(seed=seed)), use_cache=False)
        out.loss.backward()
    assert under_way() == []
    return Outcome(
        out.logits.detach(), {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    )


def spread(
    original: nn.Module, preset: str, parallel: dict[str, Any], mode: str, **sections: Any
) -> nn.Module:
    """The student on all ranks."""
    spec = {"fxskip": 1, "preset": preset, "parallel": parallel, "runtime": {"mode": mode}, **sections}
    return fxskip.transform(original, spec)


def assert_equal_to_one_process(
    kind: str, preset: str, parallel: dict[str, Any], modes: tuple[str, ...] = MODES, **overrides: Any
) -> None:
    """The modes give the same bits, an explicit backward too, and what one process gives to rounding."""
    original = model(kind, **overrides)
    want = outcome(fxskip.transform(original, preset))
    first, *others = [outcome(spread(original, preset, parallel, mode)) for mode in modes]
    assert_rounding_only(first, want)
    explicit = {"schedule": {"backward": "explicit"}}
    for other in (*others, outcome(spread(original, preset, parallel, "scheduled", **explicit))):
        assert_same_bits(first, other)


def assert_equal_in_all_wirings(kind: str, parallel: dict[str, Any]) -> None:
    """To one process."""
    for preset in ("farskip", "ladder", "identity"):
        assert_equal_to_one_process(kind, preset, parallel)


def wrong_without_sums_of_gradients(parallel: dict[str, Any]) -> set[str]:
    """Parameters whose gradients are wrong where gradients are not added up over ranks: logits are right there, and
    wrong where values are not added up."""
    original = model("qwen3_moe", layers=2)
    want = outcome(fxskip.transform(original, "farskip"))
    with patch.object(Reduce, "issue", _unsummed):
        got = outcome(spread(original, "farskip", parallel, "scheduled"))
    assert difference(got.logits, want.logits) > 1e-3
    with patch.object(Enter, "issue_reverse", _unsummed):
        got = outcome(spread(original, "farskip", parallel, "scheduled"))
    assert difference(got.logits, want.logits) < ROUNDING
    return {n for n, g in got.gradients.items() if difference(whole(g), want.gradients[n]) > 1e-3}


def _unsummed(self: Reduce | Enter, tensor: Tensor) -> Issued:
    return Issued(tensor.clone(), None, tensor)


def assert_rounding_only(got: Outcome, want: Outcome) -> None:
    """The whole gradients, of replicated parameters as this rank has them, are those of one process."""
    assert difference(got.logits, want.logits) < ROUNDING
    assert got.gradients.keys() == want.gradients.keys()
    wrong = {
        name: difference(whole(gradient), want.gradients[name]) for name, gradient in got.gradients.items()
    }
    assert {name: d for name, d in wrong.items() if not d < ROUNDING} == {}


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    """Logits and this rank's gradients."""
    assert torch.equal(one.logits, other.logits)
    assert unequal(one.gradients, other.gradients) == []


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of tensors of which this rank's parts have other bits, or that are on one side alone."""
    alone = one.keys() ^ other.keys()
    return sorted(n for n in one | other if n in alone or not torch.equal(own(one[n]), own(other[n])))


def difference(got: Tensor, want: Tensor) -> float:
    """The largest, relative to the largest value that is wanted."""
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def whole(tensor: Tensor) -> Tensor:
    """All ranks' parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm_in_float64(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """What the RMSNorm classes of transformers compute, without their cast to float32."""
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))  # type: ignore[operator]
