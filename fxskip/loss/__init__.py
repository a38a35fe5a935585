"""Losses that compare a student with its teacher at the head, without a [tokens, vocabulary] tensor.

    sparse_kl      the teacher is known by its top tokens, as a cache stores them
    hidden_kl      the teacher runs beside the student: KL over the whole vocabulary, and the Jensen-Shannon family
    cross_entropy  labels in place of a teacher
    feature_loss   distance of hidden states, without a head

These form their gradient in the forward, a chunk of tokens at a time (`engine`). The baselines compute the number of
`hidden_kl` in the three usual ways, for tests to agree with:

    dense_kl             all logits at once, autograd
    forward_chunked_kl   a chunk of logits at a time, computed again in the backward
    full_chunked_kl      a pass over chunks for the loss, and one in the backward for the gradient

`sparse_baselines` does so for `sparse_kl`, for the benchmark.
"""

from fxskip.loss.baselines import dense_kl, forward_chunked_kl, full_chunked_kl
from fxskip.loss.cross_entropy import cross_entropy
from fxskip.loss.feature_loss import feature_loss
from fxskip.loss.hidden_kl import hidden_kl
from fxskip.loss.sparse_kl import sparse_kl
from fxskip.loss.tails import truncated_minimum

__all__ = [
    "cross_entropy",
    "dense_kl",
    "feature_loss",
    "forward_chunked_kl",
    "full_chunked_kl",
    "hidden_kl",
    "sparse_kl",
    "truncated_minimum",
]
