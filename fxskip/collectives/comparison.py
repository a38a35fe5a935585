"""A few numbers of each rank of a group, on their way to the hosts of all, so that ranks can see whether they agree."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxskip.collectives.landing import Issued, Landing, launch
from fxskip.collectives.measuring import Sent
from fxskip.collectives.to_host import ToHost


class Comparison:
    """Under way from its making to `get`, on a GPU to pinned memory; whatever the host has enqueued meanwhile is not
    waited for.

    sent    which collective it is, in errors and traces
    mine    [k] int64: the numbers of this rank
    """

    def __init__(self, sent: Sent, group: Any, mine: Tensor) -> None:
        begin = partial(launch, sent, group, partial(_gather, group), mine)
        self._coming: ToHost | Landing = (
            ToHost(sent.name, group, mine, lambda: _landed(begin())) if mine.is_cuda else begin()
        )

    def get(self) -> list[list[int]]:
        """The numbers of each rank, in the order of the group. Raises CollectiveError where another rank failed."""
        coming = self._coming
        numbers = coming.get() if isinstance(coming, ToHost) else _landed(coming)
        found: list[list[int]] = numbers.tolist()
        return found


def _landed(landing: Landing) -> Tensor:
    landing.land()
    return landing.buffer


def _gather(group: Any, mine: Tensor) -> Issued:
    everyone = mine.new_empty((dist.get_world_size(group), *mine.shape))
    return Issued(everyone, dist.all_gather(list(everyone), mine, group, async_op=True), mine)
