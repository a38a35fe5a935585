"""Losses that compare a student with its teacher at the head, without a [tokens, vocabulary] tensor.

`hidden_kl` is the one to use. The three baselines compute the same number in the three usual ways, so that
a benchmark has something to beat and a test something to agree with:

    dense_kl             all logits at once, autograd
    forward_chunked_kl   a chunk of logits at a time, computed again in the backward
    full_chunked_kl      a chunk at a time, its gradient taken by autograd before the next chunk starts
    hidden_kl            a chunk at a time, its gradient written down by hand in the forward
"""

from fxskip.loss.baselines import dense_kl, forward_chunked_kl, full_chunked_kl
from fxskip.loss.cross_entropy import cross_entropy
from fxskip.loss.hidden_kl import hidden_kl
from fxskip.loss.sparse_kl import sparse_kl
from fxskip.loss.tails import truncated_minimum

__all__ = [
    "cross_entropy",
    "dense_kl",
    "forward_chunked_kl",
    "full_chunked_kl",
    "hidden_kl",
    "sparse_kl",
    "truncated_minimum",
]
