"""`sparse_kl` as a custom operator: what runs, below autograd and torch.compile."""

# N tokens, n that count, D width, V vocabulary, K entries of a teacher row

import torch
from torch import Tensor

from fxskip.loss.arguments import require_weights
from fxskip.loss.engine import Chunking, Problem, RowLoss, Wanted, form
from fxskip.loss.gradient_rules import as_results, register_gradient_rules
from fxskip.loss.head import Head
from fxskip.loss.products import accumulation_dtype, gemm_operand
from fxskip.loss.sparse_rows import SparseTarget, TorchRows
from fxskip.loss.teacher_rows import TeacherRows
from fxskip.loss.vocabulary import group_of, shard_of

WHO = "sparse_kl"


@torch.library.custom_op("fxskip::sparse_kl", mutates_args=())
def sparse_kl_operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: list[bool],
    ids: Tensor,
    logp: Tensor,
    counts: Tensor | None,
    token_weight: Tensor | None,
    denominator: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
    tail: str,
    vocabulary: int | None,
    chunk_tokens: int,
    accumulate: int,
    logits_dtype: torch.dtype | None,
    group: str,
    implementation: str,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and gradients; arguments are those of `sparse_kl`, checked but for what needs their values."""
    # The dtypes are chosen here; an autocast region around the call would choose others.
    with torch.autocast(hidden.device.type, enabled=False):
        shard = shard_of(WHO, weight, vocabulary, group_of(group), hidden, validate=validate)
        teacher = TeacherRows(ids, logp, counts)
        if validate and token_weight is not None:
            require_weights(WHO, token_weight)
        if validate:
            teacher.require_valid(WHO, shard.vocabulary, token_weight)
        is_triton = implementation == "triton"
        operand_VD = weight.to(hidden.dtype) if is_triton else gemm_operand(weight.to(hidden.dtype))
        operand_VD = operand_VD[: shard.columns]
        share_N = share_of_tokens(hidden, token_weight, denominator)
        head = Head(operand_VD, None if bias is None else bias[: shard.columns], scale, softcap, temperature)
        target = SparseTarget(head, teacher, share_N, tail, shard)
        wide = accumulation_dtype(hidden.dtype)
        chunking = Chunking(
            chunk_tokens, accumulate, logits_dtype or (operand_VD.dtype if is_triton else wide)
        )
        counted_n = None if token_weight is None else token_weight.nonzero().flatten()
        problem = Problem(
            row_loss(target, implementation),
            hidden,
            operand_VD,
            counted_n,
            Wanted(*wanted),
            chunking,
            shard.group,
        )
        return as_results(form(problem), hidden, weight, bias)


def row_loss(target: SparseTarget, implementation: str) -> RowLoss:
    if implementation == "torch":
        return TorchRows(target)
    # Imported late: a process that never runs the kernels needs no Triton.
    from fxskip.loss.sparse_triton import TritonRows

    return TritonRows(target)


def share_of_tokens(hidden: Tensor, token_weight: Tensor | None, denominator: Tensor) -> Tensor:
    """[N]: what a token's loss is multiplied by. In it before gradients are rounded to the dtype of the GEMMs."""
    ones_or_weights = (
        hidden.new_ones(len(hidden), dtype=denominator.dtype) if token_weight is None else token_weight
    )
    return (ones_or_weights / denominator).to(accumulation_dtype(hidden.dtype))


register_gradient_rules(sparse_kl_operator, WHO)
