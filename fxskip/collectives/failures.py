"""Who failed, when a collective does not come to its end.

A rank that stops in the middle of a pass leaves the others waiting. So it says so in the store of the process
group, and whoever waits for longer than a moment looks there; so does one whose process ends. A rank that was killed
says nothing: its connections break, the others say that theirs did, and the one without a word is the one.

Ranks that make different calls may wait for each other for ever: `waiting` finds that out.

After an error that all ranks had at the same place, they may go on together. They compare how many collectives each
has issued, for one that is ahead would pair its next one with another of its peers.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from fxskip.collectives.waiting import RECENT, Wait, for_each_other, strike_out, write_down
from fxskip.errors import CollectiveError, first_line

PATIENCE_S = 1.0
"""A wait that takes longer looks for what the other ranks say."""
GRACE_S = 5.0
"""When a connection broke: how long the others have to say why."""
MEETING_S = 60.0
"""After an error: how long to wait for the others to have it too."""
_EXIT = "at its exit"
_SAME_CALLS = (
    "all processes make the same calls in the same order: forward and backward passes, average_gradients, "
    "clip_grad_norm_; see which one each process is in, then start all again"
)


class Work(Protocol):
    """What torch.distributed returns for a collective that runs by itself."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block the host, or the current stream of a device, until the collective is done."""

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""


@dataclass
class _Member:
    """What this process has to do with one process group."""

    store: Any
    ranks: list[int]
    me: int
    group: str
    """The name that all ranks of the group know it by."""
    issued: int = 0
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The names of the collectives that were issued last."""
    meetings: int = 0
    """How often the ranks of the group have met without a collective."""
    at_pass_begin: int = 0
    shared_at: int = -1
    """How many collectives this rank had issued when it had an error before the first one of a pass, and went on. What
    another says of an error at that place is of the same one, unless its process ends by it."""
    failures: int = 0
    """How many errors the ranks of the group have had together and gone on after: errors are told apart by it."""
    told: bool = False
    """Whether this rank has said that it failed."""
    last: dict[str, Any] = field(default_factory=dict)
    """What it said."""
    broken: CollectiveError | None = None

    def key(self, rank: int) -> str:
        return f"fxskip/failed/{self.failures}/{rank}"


_MEMBERS: weakref.WeakKeyDictionary[Any, _Member] = weakref.WeakKeyDictionary()


def _member(group: Any) -> _Member:
    if group not in _MEMBERS:
        store = _get_process_group_store(group)
        _MEMBERS[group] = _Member(
            store, dist.get_process_group_ranks(group), dist.get_rank(), group.group_name
        )
        _speak_at_exit()
    return _MEMBERS[group]


@cache
def _speak_at_exit() -> None:
    """Not by atexit, which the processes of multiprocessing leave out."""
    Finalize(None, _say_that_this_process_ends, exitpriority=0)


def _say_that_this_process_ends() -> None:
    for member in list(_MEMBERS.values()):
        if member.told:
            _store_set(member, json.dumps(member.last | {"ended": True}))
        else:
            _tell_ranks_of(
                member, f"its process ended, after {member.issued} collectives of the group", _EXIT
            )


def join(group: Any) -> None:
    """From now on tell the ranks of `group` of errors, also before the first collective there."""
    _member(group)


def begin_pass() -> None:
    """A forward pass begins; an error before its first collective leaves the ranks in step."""
    for member in _MEMBERS.values():
        if not member.told:
            member.at_pass_begin = member.issued


def tell(error: BaseException | str, place: str) -> None:
    """Say to the other ranks of all groups that this one has failed, once. Errors of the store are left aside."""
    what = error if isinstance(error, str) else f"{type(error).__name__}: {first_line(error)}"
    for member in list(_MEMBERS.values()):
        _tell_ranks_of(member, what, place, follows=isinstance(error, CollectiveError))


def _tell_ranks_of(
    member: _Member, what: str, place: str, *, follows: bool = False, crossed: str | None = None
) -> None:
    if not member.told:
        member.told = True
        member.last = {
            "what": what, "place": place, "issued": member.issued, "follows": follows, "crossed": crossed
        }  # fmt: skip
        _store_set(member, json.dumps(member.last))


@contextmanager
def issuing(name: str, group: Any) -> Iterator[int]:
    """Around the call that hands the collective `name` to `group`; gives its number among those of the group.

    Raises CollectiveError where the group is out of step after an error, or the transport refuses.
    """
    member = _member(group)
    if member.told:
        _go_on_together(name, member)
    if member.broken is not None:
        raise member.broken
    member.issued += 1
    member.recent.append(name)
    try:
        yield member.issued
    except (RuntimeError, ValueError) as error:
        raise _broken(name, member, error) from error


def issued(group: Any) -> int:
    """How many collectives of `group` this rank has issued: the number of the last one."""
    return _member(group).issued


def wait_until_done(name: str, group: Any, work: Work, number: int) -> None:
    """Wait for a collective that the host waits for, the group's `number`-th. Raises CollectiveError with the rank that
    failed, if one has."""
    until(name, group, lambda: _done_within(work, PATIENCE_S), number)


def meet(name: str, group: Any) -> None:
    """Wait until all ranks of the group have come here, over its store: before what waits for all of them in silence,
    such as the making of a group. Raises what `until` does."""
    member = _member(group)
    member.meetings += 1
    key, ranks, store = f"fxskip/met/{member.meetings}", len(member.ranks), member.store
    wait = partial(_wait, name, member, member.meetings, _meetings_of(member.group))
    try:
        store.add(key, 1)
    except RuntimeError as error:
        raise _broken(name, member, error) from error
    _until(name, member, lambda: _comes_true(lambda: store.add(key, 0) == ranks), wait)


def until(name: str, group: Any, done: Callable[[], bool], number: int) -> None:
    """Call `done`, which waits for a moment, until it returns True: the group's `number`-th collective is done then.

    Raises CollectiveError where another rank has failed meanwhile, where ranks wait for each other, or where the
    transport fails in `done`.
    """
    member = _member(group)
    _until(name, member, done, partial(_wait, name, member, number, member.group))


def _until(name: str, member: _Member, done: Callable[[], bool], wait: Callable[[], Wait]) -> None:
    is_written, crossed = False, ""
    try:
        while not done():
            if said := _said_by_others(member):
                raise _stopped(name, member, said)
            if not is_written:
                is_written = True
                write_down(member.me, wait())
            elif crossed := for_each_other(member.me):
                raise _tell_crossed(name, member, crossed)
    except RuntimeError as error:
        raise _broken(name, member, error) from error
    finally:
        if is_written and not crossed:  # the others are to see the same circle
            strike_out(member.me)


def _wait(name: str, member: _Member, number: int, group: str) -> Wait:
    members = list(_MEMBERS.values())
    issued = {one.group: one.issued for one in members}
    met = {_meetings_of(one.group): one.meetings for one in members}
    return Wait(
        name, group, number, member.ranks, issued | met, {one.group: list(one.recent) for one in members}
    )


def _meetings_of(group: str) -> str:
    """What a group's meetings are counted under, beside its collectives."""
    return f"{group}, meetings"


def _comes_true(holds: Callable[[], bool]) -> bool:
    """Whether it does within a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _done_within(work: Work, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():  # it failed; otherwise it only takes longer
            raise
        return False
    return True


def _broken(name: str, member: _Member, error: Exception) -> CollectiveError:
    """The error for a collective that the transport gave up: with what the others say, and who is silent."""
    tell(error, name)
    others = [rank for rank in member.ranks if rank != member.me]
    deadline = time.monotonic() + GRACE_S
    said = _said_by_others(member)
    while len(said) < len(others) and time.monotonic() < deadline:
        time.sleep(0.1)
        said = _said_by_others(member)
    silent = [rank for rank in others if rank not in said]
    if not silent and any(record["place"] == _EXIT for record in said.values()):
        return _remember(member, _stopped(name, member, said))
    found = f"the transport gave up: {first_line(error)}"
    if silent:
        found += f"; no word from rank {', '.join(map(str, silent))}: killed, out of memory, out of reach, or ended"
    return _remember(member, CollectiveError(
        name, found, where=_listed(said) or None,
        hint="look at the output of the ranks named here first, then start all processes again. A process that leaves "
        f"out a forward or backward pass of the others breaks the transport like this: this one had issued "
        f"{member.issued} collectives of the group",
    ))  # fmt: skip


def _stopped(name: str, member: _Member, said: dict[int, dict[str, Any]]) -> CollectiveError:
    if crossed := next((record["crossed"] for record in said.values() if record["crossed"]), None):
        return _apart(name, crossed)
    first = [rank for rank, record in said.items() if not record["follows"]] or list(said)
    ended = all(said[rank]["place"] == _EXIT for rank in first)
    return CollectiveError(
        name,
        f"waited for in vain: rank {', '.join(map(str, first))} {'ended' if ended else 'had an error and stopped'}",
        where=_listed({rank: said[rank] for rank in first}),
        hint="all processes call the model equally often, with as many batches and new tokens: let all end together"
        if ended
        else "mend the error of that rank. Processes go on together only where all had theirs at the same place",
    )


def _tell_crossed(name: str, member: _Member, crossed: str) -> CollectiveError:
    for one in list(_MEMBERS.values()):
        _tell_ranks_of(one, "the processes wait for each other", name, crossed=crossed)
    return _remember(member, _apart(name, crossed))


def _apart(name: str, crossed: str) -> CollectiveError:
    return CollectiveError(
        name, "the processes make different calls, and wait for each other", where=crossed, hint=_SAME_CALLS
    )


def _go_on_together(name: str, member: _Member) -> None:
    """After an error of this rank: wait until all had one, and compare how far each had come."""
    if member.issued == member.at_pass_begin:  # before the first collective of a pass: nothing is out of step
        member.told = False
        member.shared_at = member.issued
        _store_delete(member)
        return
    others = [rank for rank in member.ranks if rank != member.me]
    deadline = time.monotonic() + MEETING_S
    said = _said_by_others(member)
    while len(said) < len(others) and time.monotonic() < deadline:
        time.sleep(0.05)
        said = _said_by_others(member)
    progress = {rank: record["issued"] for rank, record in said.items()} | {member.me: member.issued}
    if len(progress) < len(member.ranks) or len(set(progress.values())) > 1:
        lines = [f"rank {rank}: {_progress(progress.get(rank))}" for rank in member.ranks]
        raise _remember(member, CollectiveError(
            name, "after an error, the processes are not at the same place and cannot go on together",
            where="\n".join(lines), hint="start all processes again from the last checkpoint",
        ))  # fmt: skip
    member.failures += 1
    member.told = False
    member.at_pass_begin = member.issued


def _progress(issued: int | None) -> str:
    return "no error" if issued is None else f"an error after {issued} collectives"


def _remember(member: _Member, error: CollectiveError) -> CollectiveError:
    """A group that broke stays broken: the next collective says the same."""
    member.broken = error
    return error


def _listed(said: dict[int, dict[str, Any]]) -> str:
    return "\n".join(f"rank {rank}, {record['place']}: {record['what']}" for rank, record in said.items())


def _said_by_others(member: _Member) -> dict[int, dict[str, Any]]:
    try:
        others = [r for r in member.ranks if r != member.me and member.store.check([member.key(r)])]
        said = {rank: json.loads(member.store.get(member.key(rank))) for rank in others}
        return {rank: r for rank, r in said.items() if r["issued"] != member.shared_at or r.get("ended")}
    except RuntimeError:  # the process that keeps the store is gone; it is then among those without a word
        return {}


def _store_set(member: _Member, record: str) -> None:
    try:
        member.store.set(member.key(member.me), record)
    except RuntimeError:
        return  # as above


def _store_delete(member: _Member) -> None:
    try:
        member.store.delete_key(member.key(member.me))
    except RuntimeError:
        return
