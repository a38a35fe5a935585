"""The engine of the chunked losses: the gradient is formed in the forward, a chunk of tokens at a time.

A loss whose value needs the logits of a chunk also has, at that moment, all that its gradient needs. Forming
the gradient there means three GEMMs (logits, d hidden, d weight), none done twice, and no logits kept: what
survives the forward is d hidden [N, D] and d weight [V, D]. The backward multiplies them by one number.

A few chunks form a step. Their gradients by the logits lie in one buffer until a single GEMM adds them to
d weight: the fewer times that large matrix is read and written, the better. Under a vocabulary that is spread
over ranks, a step's exchanges run under the GEMMs of its other chunks.
"""

# N tokens of the call, n that count, s of one step, t of one chunk (t <= chunk_tokens), D width, V vocabulary

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fxskip.loss.products import accumulation_dtype, gradient_dtype, multiply_into

# Rows of the buffer start at multiples of this many elements, whatever V is: GEMMs and kernels want alignment.
ROW_ALIGNMENT = 128

Rows = slice | Tensor
Finish = Callable[[], Tensor]


class RowLoss(Protocol):
    def begin(
        self, product_tV: Tensor, gradient_tV: Tensor | None, rows: Rows, spare: Tensor | None
    ) -> Finish:
        """Starts on one chunk: `product_tV` is hidden W^T of `rows`, and may be overwritten. With the
        problem's `beside_ND`, their products are a second half of its rows.

        The function it returns gives the loss [t], with the tokens' weights in it and divided by the denominator,
        and has then written the gradient by the products into `gradient_tV` (None: none is wanted), which may be
        the memory of `product_tV`. Between the two calls other chunks are begun.

        `spare` is memory [t, D] that nobody needs until the loss that was returned is added up: the chunk's
        rows of d hidden, which are formed next.
        """


@dataclass(frozen=True)
class Wanted:
    """Which gradients to form."""

    hidden: bool
    weight: bool
    bias: bool

    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass(frozen=True)
class Formed:
    """loss [], and the gradients, None if not wanted; `hidden` in `gradient_dtype`, the others in the accumulation
    dtype."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class Chunking:
    """chunk_tokens bounds the tokens of one chunk, accumulate is the number of chunks of a step."""

    chunk_tokens: int
    accumulate: int
    logits_dtype: torch.dtype


@dataclass(frozen=True)
class Problem:
    """One call. `weight_VD` has the GEMMs' dtype; `counted_n` are the tokens that count, None for all. `beside_ND` are
    states that are multiplied by the same weight in the same products; not with a group."""

    row_loss: RowLoss
    hidden_ND: Tensor
    weight_VD: Tensor
    counted_n: Tensor | None
    wanted: Wanted
    chunking: Chunking
    group: dist.ProcessGroup | None
    beside_ND: Tensor | None = None

    @property
    def step_tokens(self) -> int:
        # A step of several chunks serves d weight, and the exchanges of a group. Else it would only cost memory.
        has_use = self.wanted.weight or self.group is not None
        return self.chunking.chunk_tokens * (self.chunking.accumulate if has_use else 1)


def form(problem: Problem) -> Formed:
    hidden_ND, weight_VD, wanted = problem.hidden_ND, problem.weight_VD, problem.wanted
    wide = accumulation_dtype(hidden_ND.dtype)
    tokens = len(hidden_ND) if problem.counted_n is None else len(problem.counted_n)
    make_sum = torch.empty_like if tokens else torch.zeros_like  # the first step overwrites
    formed = Formed(
        torch.zeros((), dtype=torch.float64, device=hidden_ND.device),
        torch.empty(
            tokens, hidden_ND.shape[1], dtype=gradient_dtype(hidden_ND.dtype), device=hidden_ND.device
        )
        if wanted.hidden
        else None,
        make_sum(weight_VD, dtype=wide, memory_format=torch.contiguous_format) if wanted.weight else None,
        weight_VD.new_zeros(len(weight_VD), dtype=wide) if wanted.bias else None,
    )
    run_steps(problem, tokens, formed)
    return replace(formed, loss=formed.loss.to(wide), hidden=with_masked_rows(problem, formed.hidden))


def run_steps(problem: Problem, tokens: int, formed: Formed) -> None:
    """Fills `formed`, whose `hidden` has a row for each token that counts. Its own memory is free when it returns."""
    buffer_sV = logits_buffer(problem, tokens)
    reductions: list[dist.Work] = []
    for start, rows in steps(problem, tokens):
        reductions += run_step(problem, formed, buffer_sV, start, rows)
    for reduction in reductions:
        reduction.wait()


def run_step(problem: Problem, formed: Formed, buffer_sV: Tensor, start: int, rows: Rows) -> list[dist.Work]:
    """A function of its own, so that a step's states are gone before the next one's are gathered."""
    weight_VD = problem.weight_VD
    reductions: list[dist.Work] = []
    hidden_sD = problem.hidden_ND[rows].to(weight_VD.dtype)
    gradient_sV = as_gradient(buffer_sV, weight_VD.dtype)[: len(hidden_sD), : len(weight_VD)]
    d_hidden_sD = None if formed.hidden is None else formed.hidden[start : start + len(hidden_sD)]
    for begin, end, finish in begun_chunks(problem, hidden_sD, buffer_sV, gradient_sV, rows, d_hidden_sD):
        formed.loss.add_(finish().sum(dtype=torch.float64))
        if d_hidden_sD is not None:
            d_hidden_tD = d_hidden_sD[begin:end]
            multiply_into(d_hidden_tD, gradient_sV[begin:end], weight_VD)
            if problem.group is not None:
                reductions.append(reduced(d_hidden_tD, problem.group))
    if formed.weight is not None:
        multiply_into(formed.weight, gradient_sV.T, hidden_sD, add=start > 0)
    if formed.bias is not None:
        formed.bias.add_(gradient_sV.sum(dim=0, dtype=formed.bias.dtype))
    return reductions


def steps(problem: Problem, tokens: int) -> Iterator[tuple[int, Rows]]:
    """Of each step its position among the tokens that count, and its rows."""
    for start in range(0, tokens, problem.step_tokens):
        part = slice(start, min(start + problem.step_tokens, tokens))
        yield start, part if problem.counted_n is None else problem.counted_n[part]


def begun_chunks(
    problem: Problem,
    hidden_sD: Tensor,
    buffer_sV: Tensor,
    gradient_sV: Tensor,
    rows: Rows,
    d_hidden_sD: Tensor | None,
) -> list[tuple[int, int, Finish]]:
    """The logits of each chunk of a step, and what completes it. All are begun before the first is finished."""
    begun = []
    for begin in range(0, len(hidden_sD), problem.chunking.chunk_tokens):
        end = min(begin + problem.chunking.chunk_tokens, len(hidden_sD))
        part = slice(rows.start + begin, rows.start + end) if isinstance(rows, slice) else rows[begin:end]
        product_tV = product_of(problem, hidden_sD[begin:end], buffer_sV[begin:], part)
        gradient_tV = gradient_sV[begin:end] if problem.wanted.any() else None
        spare = None if d_hidden_sD is None else d_hidden_sD[begin:end]
        begun.append((begin, end, problem.row_loss.begin(product_tV, gradient_tV, part, spare)))
    return begun


def product_of(problem: Problem, states_tD: Tensor, memory: Tensor, rows: Rows) -> Tensor:
    """The products of a chunk, at the front of `memory`; a function of its own: stacked states are gone with it."""
    if problem.beside_ND is not None:
        # Theirs take the rows of the next chunk, which is not begun before this one is done with them.
        states_tD = torch.cat((states_tD, problem.beside_ND[rows].to(states_tD.dtype)))
    product = memory[: len(states_tD), : len(problem.weight_VD)]
    multiply_into(product, states_tD, problem.weight_VD.T)
    return product


def logits_buffer(problem: Problem, tokens: int) -> Tensor:
    rows = min(problem.step_tokens, tokens)
    if problem.beside_ND is not None:
        rows += min(problem.chunking.chunk_tokens, tokens)
    columns = -(-len(problem.weight_VD) // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return problem.hidden_ND.new_empty(rows, columns, dtype=problem.chunking.logits_dtype)


def as_gradient(buffer_sV: Tensor, dtype: torch.dtype) -> Tensor:
    """The buffer in the dtype of the gradients, which are no wider than the logits: the front of each row."""
    return buffer_sV if buffer_sV.dtype == dtype else buffer_sV.view(dtype)


def reduced(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work


def with_masked_rows(problem: Problem, d_hidden_nD: Tensor | None) -> Tensor | None:
    """[N, D]: zeros where a token does not count."""
    if d_hidden_nD is None or problem.counted_n is None:
        return d_hidden_nD
    full_ND = d_hidden_nD.new_zeros(len(problem.hidden_ND), d_hidden_nD.shape[1])
    return full_ND.index_copy_(0, problem.counted_n, d_hidden_nD)
