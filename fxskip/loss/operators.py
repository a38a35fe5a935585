"""The losses as custom operators: what runs below autograd and torch.compile.

Arguments are those of the public functions, which have checked all but what needs values. `who` is the function that
was called. Kernels are imported late: a process that never runs them needs no Triton.
"""

# N tokens, n that count, D width, V vocabulary, K entries of a teacher row

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fxskip.loss.arguments import require_denominator, require_weights
from fxskip.loss.engine import Chunking, Problem, RowLoss, Wanted, form
from fxskip.loss.gradient_rules import Results, as_results, register_gradient_rules
from fxskip.loss.head import Head
from fxskip.loss.hidden_rows import OnlineTarget, TorchPairs
from fxskip.loss.products import accumulation_dtype, gemm_operand
from fxskip.loss.sparse_rows import SparseTarget, TorchRows
from fxskip.loss.tails import TAILS
from fxskip.loss.teacher_rows import TeacherRows
from fxskip.loss.vocabulary import Shard, group_of, shard_of


@torch.library.custom_op("fxskip::sparse_kl", mutates_args=())
def sparse_kl_operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: list[bool],
    who: str,
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
    # The dtypes are chosen here; an autocast region around the call would choose others.
    with torch.autocast(hidden.device.type, enabled=False):
        same = partial(alike, hidden, token_weight, wanted, chunk_tokens, accumulate, tail=TAILS.index(tail))
        shard = shard_of(who, weight, vocabulary, group_of(group), same, validate=validate)
        teacher = TeacherRows(ids, logp, counts)
        if validate:
            require_weights(who, token_weight)
            require_denominator(who, denominator)
            teacher.require_valid(who, shard.vocabulary, token_weight)
        operand_VD = operand(weight, hidden, implementation)[: shard.columns]
        head = Head(operand_VD, cut(bias, shard), scale, softcap, temperature)
        share_N = share_of_tokens(hidden, token_weight, denominator)
        target = SparseTarget(head, teacher, share_N, tail, shard)
        row_loss: RowLoss = TorchRows(target)
        if implementation == "triton":
            from fxskip.loss.sparse_triton import TritonRows

            row_loss = TritonRows(target)
        dtype = logits_dtype or default_logits(operand_VD, implementation)
        chunking = Chunking(chunk_tokens, accumulate, dtype)
        if implementation == "triton" and shard.group is None and wanted[1]:
            # The kernels need no memory beside the step's logits, and one large product is faster than several.
            chunking = Chunking(chunk_tokens * accumulate, 1, dtype)
        return formed(row_loss, hidden, weight, bias, operand_VD, token_weight, wanted, chunking, shard.group)


@torch.library.custom_op("fxskip::hidden_kl", mutates_args=())
def hidden_kl_operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: list[bool],
    who: str,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    token_weight: Tensor | None,
    denominator: Tensor,
    beta: float,
    scale: float,
    softcap: float | None,
    temperature: float,
    vocabulary: int | None,
    chunk_tokens: int,
    accumulate: int,
    logits_dtype: torch.dtype | None,
    group: str,
    implementation: str,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(hidden.device.type, enabled=False):
        same = partial(alike, hidden, token_weight, wanted, chunk_tokens, accumulate, beta=beta)
        shard = shard_of(who, weight, vocabulary, group_of(group), same, validate=validate)
        if validate:
            require_weights(who, token_weight)
            require_denominator(who, denominator)
        operand_VD = operand(weight, hidden, implementation)[: shard.columns]
        # A head that both share is cast once and, on one rank, read by the same products.
        is_cast = is_same(weight, teacher_weight) and teacher_hidden.dtype == hidden.dtype
        teacher_VD = operand_VD
        if not is_cast:
            teacher_VD = operand(teacher_weight, teacher_hidden, implementation)[: shard.columns]
        target = OnlineTarget(
            Head(operand_VD, cut(bias, shard), scale, softcap, temperature),
            Head(teacher_VD, cut(teacher_bias, shard), scale, softcap, temperature),
            teacher_hidden,
            share_of_tokens(hidden, token_weight, denominator),
            beta,
            shard,
            shares_products=is_cast and shard.group is None,
        )
        row_loss: RowLoss = TorchPairs(target)
        if implementation == "triton":
            from fxskip.loss.hidden_triton import TritonPairs

            row_loss = TritonPairs(target)
        chunking = Chunking(
            chunk_tokens, accumulate, logits_dtype or default_logits(operand_VD, implementation)
        )
        beside_ND = teacher_hidden if target.shares_products else None
        return formed(
            row_loss, hidden, weight, bias, operand_VD, token_weight, wanted, chunking, shard.group, beside_ND
        )


def formed(
    row_loss: RowLoss,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operand_VD: Tensor,
    token_weight: Tensor | None,
    wanted: list[bool],
    chunking: Chunking,
    group: dist.ProcessGroup | None,
    beside_ND: Tensor | None = None,
) -> Results:
    counted_n = None if token_weight is None else token_weight.nonzero().flatten()
    problem = Problem(row_loss, hidden, operand_VD, counted_n, Wanted(*wanted), chunking, group, beside_ND)
    return as_results(form(problem), hidden, weight, bias)


def alike(
    hidden: Tensor,
    token_weight: Tensor | None,
    wanted: list[bool],
    chunk_tokens: int,
    accumulate: int,
    **others: float,
) -> dict[str, float | Tensor]:
    """What decides which exchanges a rank of a vocabulary group takes part in, and which loss they are of."""
    tokens, width = hidden.shape
    return {
        "tokens of hidden": tokens,
        "width of hidden": width,
        "number of tokens with a weight": tokens if token_weight is None else token_weight.count_nonzero(),
        "hidden.requires_grad": wanted[0],
        "a gradient of anything": any(wanted),
        "chunk_tokens": chunk_tokens,
        "accumulate": accumulate,
        **others,
    }


def cut(bias: Tensor | None, shard: Shard) -> Tensor | None:
    return None if bias is None else bias[: shard.columns]


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same numbers in the same memory; a transpose or a part begins there too."""
    first, second = ((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (one, other))
    return first == second


def operand(weight: Tensor, hidden: Tensor, implementation: str) -> Tensor:
    """`weight` as it enters the products: cast to the dtype of `hidden`, as autocast would do."""
    cast_VD = weight.to(hidden.dtype)
    return cast_VD if implementation == "triton" else gemm_operand(cast_VD)


def default_logits(operand_VD: Tensor, implementation: str) -> torch.dtype:
    # Plain PyTorch computes in the dtype of the logits, the kernels in float32 whatever it is.
    return operand_VD.dtype if implementation == "triton" else accumulation_dtype(operand_VD.dtype)


def share_of_tokens(hidden: Tensor, token_weight: Tensor | None, denominator: Tensor) -> Tensor:
    """[N]: what a token's loss is multiplied by. In it before gradients are rounded to the dtype of the GEMMs."""
    if token_weight is None:
        return denominator.reciprocal().expand(len(hidden))
    return token_weight / denominator


register_gradient_rules(sparse_kl_operator)
register_gradient_rules(hidden_kl_operator)
