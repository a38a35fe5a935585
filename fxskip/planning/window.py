"""What can run beside each collective under a wiring, and how much of it that hides.

Equation (9) of the FarSkip paper asks of every MoE layer

    T_dispatch + T_combine <= T_layer - (T_routed + T_gate)

that what does not depend on the exchange is at least as long as the exchange. Which of that compute may really
run beside a given collective is a matter of the wiring; `exposed` gives each piece of compute to one collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fxskip.schedule.costs import Costs
from fxskip.schedule.roofline import Transfer, Work
from fxskip.schedule.sizes import total
from fxskip.wiring import Connection


@dataclass(frozen=True)
class Window:
    """Which sub-blocks can run while a block's communication is under way, by module path.

    Under expert parallelism a MoE block sends tokens before its experts (dispatch) and gets them back after
    (combine); under tensor parallelism every block ends in an all-reduce, which is its combine.
    """

    dispatch_under: tuple[str, ...]
    """Blocks between the last write that this block waits for and the block itself."""
    combine_under: tuple[str, ...]
    """Blocks between this block and the first one that needs what it leaves to a collective."""
    dispatch_flops_per_token: float | None
    combine_flops_per_token: float | None
    """Of the blocks above; None where those of one are not known."""


@dataclass(frozen=True)
class LayerWindow:
    """Equation (9) for one MoE layer, in estimated microseconds on one rank; None where the graph does not show it."""

    layer: int
    dispatch_us: float | None
    combine_us: float | None
    layer_us: float | None
    """T_layer: all compute of the layer."""
    routed_us: float | None
    gate_us: float | None
    exposed_before_us: float | None
    """Piece of the exchange that nothing can hide in the original wiring."""
    exposed_after_us: float | None
    """The same in the planned wiring."""

    @property
    def exchange_us(self) -> float | None:
        """Left side of (9)."""
        return total((self.dispatch_us, self.combine_us))

    @property
    def room_us(self) -> float | None:
        """Right side of (9)."""
        if self.layer_us is None or self.routed_us is None or self.gate_us is None:
            return None
        return self.layer_us - (self.routed_us + self.gate_us)

    @property
    def margin_us(self) -> float | None:
        """How much room is left; below 0 the layer is short of compute, however it is wired."""
        room, exchange = self.room_us, self.exchange_us
        return None if room is None or exchange is None else room - exchange


def spans(connections: Sequence[Connection], index: int) -> tuple[range, range]:
    """Positions of the blocks that can run beside the dispatch, and beside the combine, of block `index`."""
    own = connections[index]
    unseen = {write for write in range(1, own.write) if not _sees(own, write, connections)}
    last_seen = max((w for w in range(1, own.write) if w not in unseen), default=0)
    readers = (c.write for c in connections if c.write > own.write and _sees_travelling(c, own))
    first_reader = next(readers, len(connections) + 1)
    return range(last_seen, own.write - 1), range(own.write, first_reader - 1)


def window(connections: Sequence[Connection], index: int, costs: Sequence[Costs]) -> Window:
    before, after = spans(connections, index)
    return Window(
        tuple(connections[i].block.path for i in before),
        tuple(connections[i].block.path for i in after),
        total(costs[i].flops_per_token for i in before),
        total(costs[i].flops_per_token for i in after),
    )


def _sees(reader: Connection, write: int, connections: Sequence[Connection]) -> bool:
    """Whether the block sees any addend of an earlier write."""
    addends = connections[write - 1].block.addends
    return any((write, addend) not in reader.reads for addend in addends)


def _sees_travelling(reader: Connection, writer: Connection) -> bool:
    """Whether a later block needs what the writer's collective delivers: the routed addend, or all of it."""
    addends = writer.block.addends
    travelling = ("routed",) if "routed" in addends else addends
    return any((writer.write, addend) not in reader.reads for addend in travelling)


Piece = tuple[int, str]
"""A piece of compute: a block's position and the name of its part."""


@dataclass(frozen=True)
class _Job:
    """One collective and the compute that may run beside it, in order."""

    block: int
    name: str
    deadline: int
    """Position of the first block that waits for it."""
    us: float | None
    beside: tuple[Piece, ...]


def exposed(
    connections: Sequence[Connection],
    works: Sequence[Sequence[Work]],
    transfers: Sequence[Sequence[Transfer]],
) -> dict[tuple[int, str], float | None]:
    """Microseconds of each collective, by (block, name), that no compute can hide under this wiring.

    Compute hides one collective at a time. As much is hidden as can be, and the collectives that are waited for
    first get the most that they can. None for a collective where its time, or that of some compute that it or one
    that it competes with could take, is not known.
    """
    times = {(i, w.name): w.est_us for i, block in enumerate(works) for w in block}
    jobs = [job for i in range(len(connections)) for job in _jobs(connections, i, works, transfers[i])]
    jobs.sort(key=lambda job: (job.deadline, job.block))
    left = {piece: us for piece, us in times.items() if us is not None}
    used: dict[Piece, dict[_Job, float]] = {part: {} for part in left}
    found: dict[tuple[int, str], float | None] = {(job.block, job.name): None for job in jobs}
    for job in _known(jobs, left):
        need = job.us or 0.0
        while need > _NOTHING and (path := _path_to_free_compute(job, left, used)):
            need -= _move_along(path, need, left, used)
        found[job.block, job.name] = max(0.0, need)
    return found


def _known(jobs: Sequence[_Job], left: dict[Piece, float]) -> list[_Job]:
    """The collectives whose exposure can be told, in the same order."""
    known = list(jobs)
    unknown: set[Piece] = {piece for job in jobs for piece in job.beside if piece not in left}
    while True:
        lost = [job for job in known if job.us is None or unknown & set(job.beside)]
        if not lost:
            return known
        unknown |= {piece for job in lost for piece in job.beside}
        known = [job for job in known if job not in lost]


_NOTHING = 1e-6
"""Microseconds that are rounding."""


def _path_to_free_compute(
    job: _Job, left: dict[Piece, float], used: dict[Piece, dict[_Job, float]]
) -> list[tuple[_Job, Piece]]:
    """Shortest chain of (collective, compute that it would take); all but the last compute is taken from the next
    collective in the chain, which has another choice. Augmenting paths of a maximum flow."""
    came: dict[Piece, tuple[_Job, Piece | None]] = {}
    queue: deque[tuple[_Job, Piece | None]] = deque([(job, None)])
    while queue:
        taker, given_up = queue.popleft()
        for part in taker.beside:
            if part in came:
                continue
            came[part] = (taker, given_up)
            if left[part] > _NOTHING:
                return _chain(part, came)
            queue.extend((other, part) for other, us in used[part].items() if us > _NOTHING)
    return []


def _chain(part: Piece, came: dict[Piece, tuple[_Job, Piece | None]]) -> list[tuple[_Job, Piece]]:
    links = []
    at: Piece | None = part
    while at is not None:
        taker, given_up = came[at]
        links.append((taker, at))
        at = given_up
    return links[::-1]


def _move_along(
    path: list[tuple[_Job, Piece]],
    need: float,
    left: dict[Piece, float],
    used: dict[Piece, dict[_Job, float]],
) -> float:
    """Let each collective of the chain take its compute; the microseconds that the first one gains."""
    givers = [(part, giver) for (_, part), (giver, _) in zip(path, path[1:], strict=False)]
    amount = min(need, left[path[-1][1]], *(used[part][giver] for part, giver in givers))
    for part, giver in givers:
        used[part][giver] -= amount
    for taker, part in path:
        used[part][taker] = used[part].get(taker, 0.0) + amount
    left[path[-1][1]] -= amount
    return amount


def _jobs(
    connections: Sequence[Connection],
    index: int,
    works: Sequence[Sequence[Work]],
    transfers: Sequence[Transfer],
) -> list[_Job]:
    before, after = spans(connections, index)
    ahead = [(i, w.name) for i in before for w in works[i]]
    behind = [(i, w.name) for i in after for w in works[i]]
    # The shared experts of a MoE read what its router reads, and wait for no exchange; a leaf may hold some.
    shared = [(index, w.name) for w in works[index] if w.name in ("shared", "moe")]
    routed = [(index, w.name) for w in works[index] if w.name in ("routed", "moe")]
    is_moe = connections[index].block.kind == "moe"
    jobs = []
    for transfer in transfers:
        if transfer.name == "dispatch":
            beside, deadline = ahead + shared, index
        elif transfer.name == "combine":
            beside, deadline = shared + behind, after.stop
        else:  # of the shared experts: it is over before the block is
            beside, deadline = (routed, index) if is_moe else (behind, after.stop)
        jobs.append(_Job(index, transfer.name, deadline, transfer.est_us, tuple(beside)))
    return jobs


def layer_windows(
    connections: Sequence[Connection],
    works: Sequence[Sequence[Work]],
    transfers: Sequence[Sequence[Transfer]],
    before: dict[tuple[int, str], float | None],
    after: dict[tuple[int, str], float | None],
) -> tuple[LayerWindow, ...]:
    """Equation (9) for each MoE block that exchanges tokens. `before`, `after`: what `exposed` found."""
    found = []
    for i, connection in enumerate(connections):
        exchange = {t.name: t.est_us for t in transfers[i] if t.name in ("dispatch", "combine")}
        if not exchange:
            continue
        layer = connection.block.layer
        parts = {w.name: w.est_us for w in works[i]}
        found.append(
            LayerWindow(
                layer,
                exchange.get("dispatch", 0.0),
                exchange["combine"],
                total(
                    w.est_us for j, c in enumerate(connections) if c.block.layer == layer for w in works[j]
                ),
                parts.get("routed"),
                parts.get("gate"),
                total(before[i, name] for name in exchange),
                total(after[i, name] for name in exchange),
            )
        )
    return tuple(found)
