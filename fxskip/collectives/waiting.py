"""Ranks that wait for each other, because one has left a call out that the others make.

Whoever waits for a collective for longer than a moment writes down in the store what for, and how many collectives of
each group it has issued. A rank waits for those of its group that have not issued the collective. Where they wait
themselves, for something that the first has not issued, none of them ever will.

    rank 0   waits for its comparison in average_gradients     rank 1 has not begun it
    rank 1   waits for the counts of its next forward pass     rank 0 has not begun it
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import _get_default_store

RECENT = 64
"""So many names of collectives are compared."""


@dataclass(frozen=True)
class Wait:
    """What one rank waits for, of which group, and how far it is with each of its groups."""

    name: str
    group: str
    number: int
    ranks: list[int]
    issued: dict[str, int]
    recent: dict[str, list[str]]
    """The names of the last collectives of each group."""

    def name_of(self, group: str, number: int) -> str | None:
        """Of a collective of a group; None where it is not known any more, or not yet."""
        names = self.recent.get(group, [])
        at = number - self.issued.get(group, 0) + len(names) - 1
        return names[at] if 0 <= at < len(names) else None


def _key(rank: int) -> str:
    return f"fxskip/waits/{rank}"


def write_down(me: int, wait: Wait) -> None:
    """Let the other ranks know what this one, `me`, waits for."""
    with suppress(RuntimeError):  # the process that keeps the store is gone
        _get_default_store().set(_key(me), json.dumps(asdict(wait)))


def strike_out(me: int) -> None:
    """It waits no longer."""
    with suppress(RuntimeError):
        _get_default_store().delete_key(_key(me))


class _Written:
    """What ranks have written down; each is read when it is first asked for, since there may be very many."""

    def __init__(self) -> None:
        self._store = _get_default_store()
        self._known: dict[int, Wait | None] = {}

    def of(self, rank: int) -> Wait | None:
        """None where it has not waited for more than a moment."""
        if rank not in self._known:
            self._known[rank] = self._read(rank)
        return self._known[rank]

    def _read(self, rank: int) -> Wait | None:
        with suppress(RuntimeError):
            if self._store.check([_key(rank)]):
                return Wait(**json.loads(self._store.get(_key(rank))))
        return None


def for_each_other(me: int) -> str:
    """A line for each rank of those that wait for each other, if this one is among them; else "".

    What a rank has issued stays as it is while it waits, so what is seen here does not change any more.
    """
    written = _Written()
    mine = written.of(me)
    if mine is None:
        return ""
    for rank in mine.ranks:
        other = written.of(rank)
        if rank != me and other is not None and (number := _unlike(mine, other)):
            of = f"collective number {number} of ranks {', '.join(map(str, mine.ranks))}"
            told = {me: mine, rank: other}
            return "\n".join(
                f"rank {one}: {of} is {wait.name_of(mine.group, number)}; waits for {wait.name}"
                for one, wait in sorted(told.items())
            )
    return "\n".join(
        f"rank {rank}: waits for {wait.name}, which rank {following} has not begun"
        for rank, wait, following in _circle(me, mine, written)
    )


def _unlike(one: Wait, other: Wait) -> int:
    """The number of the first collective, of those that are known of the group that `one` waits in, that the two take
    for different ones; 0 where there is none."""
    last = min(one.issued[one.group], other.issued.get(one.group, 0))
    for number in range(max(1, last - RECENT + 1), last + 1):
        names = one.name_of(one.group, number), other.name_of(one.group, number)
        if None not in names and names[0] != names[1]:
            return number
    return 0


def _circle(me: int, mine: Wait, written: _Written) -> list[tuple[int, Wait, int]]:
    """Ranks that wait each for the next, and the last for `me`, the first, with what for and the next; none where there
    is no such circle."""
    ranks = [(me, mine)]
    before: dict[int, list[tuple[int, Wait, int]]] = {me: []}
    for rank, wait in ranks:  # grows
        for following in wait.ranks:
            other = written.of(following)
            if other is None or other.issued.get(wait.group, 0) >= wait.number:
                continue
            way = [*before[rank], (rank, wait, following)]
            if following == me and rank != me:
                return way
            if following not in before:
                before[following] = way
                ranks.append((following, other))
    return []
