"""Numbers behind the sizes of captured tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch


class DependsOnValues(Exception):
    """A size is known only when the graph runs."""


def hint(size: Any) -> int:
    """The number behind a size, which is symbolic where it depends on batch or length.

    Raises DependsOnValues for a size that no shape says.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.hint is None:
        raise DependsOnValues
    return int(size.node.hint)


def product(shape: Iterable[Any]) -> int:
    """Elements of a tensor of that shape. Raises DependsOnValues."""
    return math.prod(map(hint, shape))


def total(numbers: Iterable[float | None]) -> float | None:
    """The sum; None where one of the numbers is not known."""
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)
