"""Adds up the gradient of a value that several steps read, in one order whatever the order of their backward.

Floating-point addition is not associative. Autograd executes nodes from the last one created to the first, so the
gradient of a value is the sum over its uses, last use first, from left to right; and so it is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fxskip.errors import ScheduleError


class OrderedSum:
    """The gradient of one value, while the steps that read it run backward.

    readers   numbers of the steps that read the value, last first
    """

    __slots__ = ("_arrived", "_next", "_owned", "readers", "total")

    def __init__(self, readers: Sequence[int]) -> None:
        self.readers = readers
        self.total: Tensor | None = None
        """Sum over the first readers, as far as they have arrived without a gap; None for no gradient."""
        self._next = 0
        self._owned = False  # whether `total` is a tensor that nobody else can see
        self._arrived: dict[int, Sequence[Tensor]] = {}

    def also_read_by(self, readers: Iterable[int]) -> None:
        """The value has a second name, under which these steps read it."""
        self.readers = sorted({*self.readers, *readers}, reverse=True)

    def is_turn_of(self, step: int) -> bool:
        """Whether all readers after `step` have arrived, so that its gradient is the next one to be added."""
        return self._next < len(self.readers) and self.readers[self._next] == step

    @property
    def is_complete(self) -> bool:
        """Whether all readers have arrived."""
        return self._next == len(self.readers)

    def take(self) -> Tensor | None:
        """Give the sum so far away, to be the start of the next reader's."""
        total, self.total, self._owned = self.total, None, False
        return total

    def put(self, step: int, gradients: Sequence[Tensor]) -> None:
        """Step number `step` has run backward; `gradients` are those of its uses, last use first."""
        self._arrived[step] = gradients
        while self._next < len(self.readers) and self.readers[self._next] in self._arrived:
            for gradient in self._arrived.pop(self.readers[self._next]):
                self._add(gradient)
            self._next += 1

    def result(self) -> Tensor | None:
        """The gradient of the value; None for none."""
        if not self.is_complete:
            raise ScheduleError(
                "scheduled backward",
                f"a gradient is used before steps {list(self.readers[self._next :])} have given theirs",
                hint="this is a defect in the scheduled backward: please report it with the program",
            )
        return self.total

    def _add(self, gradient: Tensor) -> None:
        if self.total is None:
            self.total = gradient
        elif self._owned and self.total.layout == gradient.layout:
            self.total.add_(gradient)
        else:
            self.total = self.total + gradient
            self._owned = True
