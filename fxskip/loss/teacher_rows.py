"""A sparse teacher's rows, checked and cut: what `sparse_kl` knows about each token's target."""

# N tokens, t of one chunk, K entries of a row

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxskip.errors import FxskipError
from fxskip.loss.arguments import DTYPES, require_same_device

# How far a row's probabilities may add up to more than 1.
MASS_TOLERANCE = 1e-2
# Rounded log-probabilities move the mass by entropy times rounding unit at most; of 200,000 tokens it is 12.2.
LARGEST_ENTROPY = 12.2
WHOLE_NUMBERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


@dataclass(frozen=True)
class TeacherRows:
    """ids [n, K] integer, logp [n, K] natural logarithms, counts [n] or None when all entries are given."""

    ids: Tensor
    logp: Tensor
    counts: Tensor | None

    def of(self, rows: slice | Tensor) -> "TeacherRows":
        """The given rows, contiguous, as the kernels need them."""
        counts = None if self.counts is None else self.counts[rows].contiguous()
        return TeacherRows(self.ids[rows].contiguous(), self.logp[rows].contiguous(), counts)

    def given(self) -> Tensor:
        """[n, K]: which entries count; the first counts[n] of each row."""
        if self.counts is None:
            return torch.ones_like(self.ids, dtype=torch.bool)
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.counts[:, None]

    def p(self, dtype: torch.dtype) -> Tensor:
        """[n, K]: probabilities, 0 where nothing is given."""
        return torch.where(self.given(), self.logp.to(dtype), -torch.inf).exp()

    def merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """ids and p [n, K], sorted by id: of equal ids the first has the sum of their p. Elsewhere -1 and 0."""
        ids_nK, order_nK = torch.where(self.given(), self.ids, -1).sort(dim=-1, stable=True)
        starts_nK = torch.ones_like(ids_nK, dtype=torch.bool)
        starts_nK[:, 1:] = ids_nK[:, 1:] != ids_nK[:, :-1]
        run_nK = starts_nK.cumsum(dim=-1) - 1
        p_nK = self.p(dtype).gather(1, order_nK)
        sums_nK = torch.zeros_like(p_nK).scatter_add_(1, run_nK, p_nK).gather(1, run_nK)
        is_first_nK = starts_nK & (ids_nK >= 0)
        return ids_nK.where(is_first_nK, -1), sums_nK.where(is_first_nK, 0.0)

    def require_valid(self, who: str, vocabulary: int, weight_N: Tensor | None) -> None:
        """Raises at the first wrong value of a row that counts. Waits for the device, once."""
        checked = self.given()
        if weight_N is not None:
            checked &= (weight_N > 0)[:, None]
        wrong = {
            "ids": checked & ((self.ids < 0) | (self.ids >= vocabulary)),
            "logp": checked & ~self.logp.isfinite(),
            "mass": self.masses(checked) > 1.0 + mass_tolerance(self.logp.dtype),
        }
        if self.counts is not None:
            wrong["counts"] = (self.counts < 0) | (self.counts > self.ids.shape[1])
            if weight_N is not None:
                wrong["counts"] &= weight_N > 0
        flags = torch.stack([bad.any() for bad in wrong.values()]).tolist()
        for name, is_wrong in zip(wrong, flags, strict=True):
            if is_wrong:
                raise self.error(who, name, wrong[name].nonzero()[0].tolist(), checked, vocabulary)

    def masses(self, checked_NK: Tensor) -> Tensor:
        return torch.where(checked_NK, self.logp.float().exp(), 0.0).sum(dim=-1)

    def error(self, who: str, name: str, at: list[int], checked_NK: Tensor, vocabulary: int) -> FxskipError:
        place = ", ".join(map(str, at))
        if name == "ids":
            return FxskipError(
                who, f"ids[{place}] is {int(self.ids[*at])}", hint=f"ids are 0 to {vocabulary - 1}"
            )
        if name == "logp":
            return FxskipError(
                who,
                f"logp[{place}] is {float(self.logp[*at])}",
                hint="logp are finite; leave out what has probability 0, with counts",
            )
        if name == "counts":
            found = int(self.counts[*at]) if self.counts is not None else 0
            return FxskipError(
                who, f"counts[{place}] is {found}", hint=f"counts are 0 to {self.ids.shape[1]}"
            )
        mass = float(self.masses(checked_NK)[*at])
        return FxskipError(
            who,
            f"the probabilities of row {place} of logp add up to {mass:.6g}",
            hint="logp are log-probabilities over the whole vocabulary, not logits; those of equal ids are added",
        )


def mass_tolerance(dtype: torch.dtype) -> float:
    return max(MASS_TOLERANCE, LARGEST_ENTROPY * torch.finfo(dtype).eps / 2)


def checked_teacher(who: str, hidden: Tensor, ids: Any, logp: Any, counts: Any) -> TeacherRows:
    """Types, shapes and devices; the values are `require_valid`'s."""
    require_entries(who, "ids", ids, len(hidden))
    require_logp(who, logp, counts, len(hidden))
    if ids.dtype not in (torch.int64, torch.int32):
        raise FxskipError(who, f"ids is {ids.dtype}", hint="ids are int64 or int32")
    if ids.shape != logp.shape:
        raise FxskipError(
            who, f"ids is {list(ids.shape)}, logp {list(logp.shape)}", hint="one logp for each id"
        )
    require_same_device(who, hidden=hidden, ids=ids, logp=logp, counts=counts)
    # Narrow counts could not be compared with K.
    return TeacherRows(ids, logp, None if counts is None else counts.long())


def require_entries(who: str, name: str, value: Any, tokens: int | None) -> None:
    """`tokens` is the N of [N, K], None for any."""
    if not isinstance(value, Tensor):
        raise FxskipError(who, f"{name} is a {type(value).__name__}", hint=f"{name} is a [N, K] tensor")
    if value.dim() != 2 or (tokens is not None and value.shape[0] != tokens) or value.shape[1] == 0:
        expected = f"[{'N' if tokens is None else tokens}, K]"
        raise FxskipError(
            who, f"{name} has shape {list(value.shape)}", hint=f"{name} is {expected}, K at least 1"
        )


def require_logp(who: str, logp: Any, counts: Any, tokens: int | None) -> None:
    require_entries(who, "logp", logp, tokens)
    if logp.dtype not in DTYPES:
        raise FxskipError(who, f"logp is {logp.dtype}", hint="logp is a float tensor of natural logarithms")
    if logp.requires_grad:
        raise FxskipError(who, "logp requires a gradient", hint="the teacher is a constant: logp.detach()")
    if counts is None:
        return
    is_whole = isinstance(counts, Tensor) and counts.dtype in WHOLE_NUMBERS
    if not is_whole or list(counts.shape) != [len(logp)]:
        found = (
            f"{counts.dtype} {list(counts.shape)}" if isinstance(counts, Tensor) else type(counts).__name__
        )
        raise FxskipError(who, f"counts is {found}", hint=f"counts is [{len(logp)}], whole numbers, or None")
    require_same_device(who, logp=logp, counts=counts)
