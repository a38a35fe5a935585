"""What a teacher known by a few tokens of its vocabulary says about the others: four answers, four losses.

S is the support of one teacher row, p its probabilities, M = sum of p over S, q the student, Q = sum of q over S.

    truncated      sum_S p (log p - log q)
                   minimum M log M (not 0) at q = p / M on S; gradient M q_j off S: pushes all other tokens down
    ghost          truncated + (1 - M) (log(1 - M) - log(1 - Q)): one bucket for all that is off S
                   minimum 0 at q = p on S; gradient q_j - (1 - M) q_j / (1 - Q) off S, which is 0 at Q = M
    renormalised   sum_S p/M (log p/M - log q)
                   minimum 0 at q = p / M on S; gradient q_j off S
    subset         sum_S p/M (log p/M - log q/Q)
                   minimum 0 where q is proportional to p on S; gradient 0 off S

Nothing is clamped; `truncated` is negative where it should be. A row without mass says nothing: loss and gradient
are 0 (for ghost too, where they come out so). In `ghost`, a bucket without tokens (S is the whole vocabulary), and
one whose mass 1 - M is negative by rounding, has mass 0.
"""

# t rows of one chunk

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fxskip.errors import FxskipError
from fxskip.loss.arguments import (
    checked_denominator,
    checked_token_weight,
    require_denominator,
    require_weights,
)
from fxskip.loss.teacher_rows import TeacherRows, require_logp

Tail = Literal["truncated", "ghost", "renormalised", "subset"]
TAILS: tuple[Tail, ...] = get_args(Tail)


class Sums(NamedTuple):
    """What must be known of a row, all [t]: two log-sum-exps of the student's logits and two teacher sums."""

    rest: Tensor  # log of the sum over all tokens off the support; -inf if there are none
    support: Tensor  # over the support
    cross: Tensor  # sum over the support of p (log p - logit)
    mass: Tensor


class Coefficients(NamedTuple):
    """The loss [t] of each row, and its gradient by the logits x in two forms:

    off the support  rest_factor * exp(x - rest_reference)
    on the support   support_factor * exp(x - support_reference) - p_factor * p
    """

    loss: Tensor
    rest_reference: Tensor
    rest_factor: Tensor
    support_reference: Tensor
    support_factor: Tensor
    p_factor: Tensor


def coefficients(tail: str, sums: Sums) -> Coefficients:
    rest, support, cross, mass = sums
    everything = torch.logaddexp(rest, support)
    one, zero = torch.ones_like(mass), torch.zeros_like(mass)
    if tail == "truncated":
        return Coefficients(cross + mass * everything, everything, mass, everything, mass, one)
    if tail == "ghost":
        return ghost(sums, everything)
    has_mass = mass > 0
    some_mass = torch.where(has_mass, mass, one)
    counted, per_mass = has_mass.to(mass.dtype), torch.where(has_mass, 1.0 / some_mass, zero)
    known = everything
    if tail == "subset":
        known = torch.where(support > -torch.inf, support, zero)
    loss = (cross + mass * known) * per_mass - some_mass.log()
    return Coefficients(loss, everything, zero if tail == "subset" else counted, known, counted, per_mass)


def ghost(sums: Sums, everything: Tensor) -> Coefficients:
    rest, _, cross, mass = sums
    has_rest = rest > -torch.inf
    tail = torch.where(has_rest, (1.0 - mass).clamp_min(0.0), 0.0)
    # log(1 - Q), from a sum and not from a difference
    log_rest = torch.where(has_rest, rest - everything, 0.0)
    loss = cross + mass * everything + torch.xlogy(tail, tail) - tail * log_rest
    # Against the rest's own normaliser: 1 / (1 - Q) may overflow, 1 - Q cannot.
    rest_factor = (mass + tail) * log_rest.exp() - tail
    reference = torch.where(has_rest, rest, everything)
    return Coefficients(loss, reference, rest_factor, everything, mass + tail, torch.ones_like(mass))


def checked_tail(who: str, tail: object) -> str:
    if tail not in TAILS:
        raise FxskipError(who, f"tail is {tail!r}", hint=f"tail is one of {', '.join(TAILS)}")
    return tail


def truncated_minimum(
    logp: Tensor,
    *,
    counts: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    validate: bool = True,
) -> Tensor:
    """The smallest value that `sparse_kl(..., tail="truncated")` can have: the weighted mean of M log M.

    A float32 scalar. sparse_kl minus this is 0 or more, and is what to report as a metric. Arguments are as in
    `sparse_kl`.
    """
    who = "truncated_minimum"
    require_logp(who, logp, counts, None)
    weight_N = checked_token_weight(who, logp, token_weight, name="logp")
    total = checked_denominator(who, logp, weight_N, denominator)
    # M does not depend on which tokens they are.
    teacher = TeacherRows(
        torch.zeros((), dtype=torch.int64, device=logp.device).expand(logp.shape), logp, counts
    )
    if validate:
        require_weights(who, weight_N)
        if isinstance(total, Tensor):
            require_denominator(who, total)
        teacher.require_valid(who, 1, weight_N)
    mass_N = teacher.p(torch.float64).sum(dim=-1)
    lowest_N = torch.xlogy(mass_N, mass_N)
    if weight_N is not None:
        # where, not a product: a row of weight 0 may hold anything.
        lowest_N = torch.where(weight_N > 0, lowest_N * weight_N, 0.0)
    return (lowest_N.sum() / total).float()
