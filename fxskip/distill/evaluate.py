"""How good a student is: cross-entropy on text, and KL and top-1 agreement with its teacher."""

# B windows, L length, t tokens of one chunk, D width, V vocabulary

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fxskip.distill.data import IGNORED, Batch, Windows, as_windows
from fxskip.distill.parts import Parts, in_eval_mode, split
from fxskip.errors import FxskipError
from fxskip.loss.arguments import checked_head
from fxskip.loss.head import Head


@dataclass(frozen=True)
class Metrics:
    """Means over all predicted tokens of a data set; `kl` and `agreement` are None without a teacher."""

    tokens: int
    cross_entropy: float
    kl: float | None
    agreement: float | None


def evaluate(
    student: PreTrainedModel,
    data: Any,
    *,
    teacher: PreTrainedModel | None = None,
    batch_size: int = 8,
    chunk_tokens: int = 1024,
) -> Metrics:
    """Metrics of `student` on the whole of `data` (what `distill` takes as data), without gradients.

    Cross-entropy and KL(teacher || student) are in nats a token, agreement is the part of the positions at
    which both models prefer the same token. Logits exist for `chunk_tokens` tokens at a time. Both models run
    in eval mode and have their modes back afterwards.
    """
    who = "evaluate"
    if batch_size < 1 or chunk_tokens < 1:
        raise FxskipError(
            who, f"batch_size is {batch_size}, chunk_tokens is {chunk_tokens}", hint="both are 1 or more"
        )
    parts, teacher_parts = split_pair(who, student, teacher)
    windows = as_windows(who, "data", data, parts.vocabulary)
    return evaluate_parts(parts, teacher_parts, windows, batch_size, chunk_tokens)


def split_pair(who: str, student: Any, teacher: Any) -> tuple[Parts, Parts | None]:
    """Both models in parts, known to share a vocabulary and a device."""
    parts = split(who, "student", student)
    if teacher is None:
        return parts, None
    teacher_parts = split(who, "teacher", teacher)
    if parts.vocabulary != teacher_parts.vocabulary:
        raise FxskipError(
            who,
            f"the student's vocabulary is {parts.vocabulary}, the teacher's {teacher_parts.vocabulary}",
            hint="both models need the same tokenizer and the same number of output rows",
        )
    if parts.device != teacher_parts.device:
        raise FxskipError(
            who,
            f"the student is on {parts.device}, the teacher on {teacher_parts.device}",
            hint=f"teacher.to({str(parts.device)!r})",
        )
    return parts, teacher_parts


def evaluate_parts(
    student: Parts, teacher: Parts | None, windows: Windows, batch_size: int, chunk_tokens: int
) -> Metrics:
    tokens = 0
    sums = dict.fromkeys(("cross_entropy", "kl", "agreement"), 0.0)
    models = [student.model] if teacher is None else [student.model, teacher.model]
    with torch.no_grad(), in_eval_mode(*models):
        for batch in windows.in_order(batch_size, student.device):
            tokens += int((batch.targets_BL != IGNORED).sum())
            for name, value in batch_sums(student, teacher, batch, chunk_tokens).items():
                sums[name] += value
    means = {name: value / tokens for name, value in sums.items()}
    if teacher is None:
        return Metrics(tokens, means["cross_entropy"], None, None)
    return Metrics(tokens, means["cross_entropy"], means["kl"], means["agreement"])


def batch_sums(student: Parts, teacher: Parts | None, batch: Batch, chunk_tokens: int) -> dict[str, float]:
    """Sums over the predicted tokens of a batch."""
    targets = batch.targets_BL.flatten()
    counted = (targets != IGNORED).nonzero().flatten()
    student_hidden = student.hidden(batch).flatten(0, 1)
    student_head = head_of(student, student_hidden)
    teacher_hidden = None if teacher is None else teacher.hidden(batch).flatten(0, 1)
    teacher_head = None if teacher is None or teacher_hidden is None else head_of(teacher, teacher_hidden)
    # float64: a sum over millions of tokens in float32 loses the digits that two runs are compared by.
    sums: dict[str, float] = {}
    for start in range(0, len(counted), chunk_tokens):
        rows = counted[start : start + chunk_tokens]
        logq_tV = log_probs(student_head, student_hidden[rows])
        parts = {"cross_entropy": -logq_tV.gather(1, targets[rows][:, None]).squeeze(1)}
        if teacher_head is not None and teacher_hidden is not None:
            parts |= compare(logq_tV, log_probs(teacher_head, teacher_hidden[rows]))
        for name, part_t in parts.items():
            sums[name] = sums.get(name, 0.0) + float(part_t.double().sum())
    return sums


def compare(logq_tV: Tensor, logp_tV: Tensor) -> dict[str, Tensor]:
    same_t = logq_tV.argmax(dim=-1) == logp_tV.argmax(dim=-1)
    p_tV = logp_tV.exp()
    kl_t = logp_tV.sub_(logq_tV).masked_fill_(p_tV == 0, 0.0).mul_(p_tV).sum(dim=-1)
    return {"kl": kl_t, "agreement": same_t}


def head_of(parts: Parts, hidden: Tensor) -> Head:
    return checked_head(
        "evaluate",
        f"{parts.name}_",
        hidden,
        parts.weight_VD,
        parts.bias_V,
        scale=1.0,
        softcap=None,
        temperature=1.0,
    )


def log_probs(head: Head, hidden_tD: Tensor) -> Tensor:
    return head.log_probs(head.logits(hidden_tD))
