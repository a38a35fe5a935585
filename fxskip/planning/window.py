"""What can run beside each collective under a wiring, and how much of it that hides.

Equation (9) of the FarSkip paper asks of every MoE layer

    T_dispatch + T_combine <= T_layer - (T_routed + T_gate)

that what does not depend on the exchange is at least as long as the exchange. Which of that compute may really
run beside a given collective is a matter of the wiring; `hidden` gives each piece of compute to one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxskip.schedule.costs import Costs
from fxskip.schedule.roofline import Transfer, Work
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
    dispatch_flops_per_token: float
    combine_flops_per_token: float


@dataclass(frozen=True)
class LayerWindow:
    """Equation (9) for one MoE layer, in estimated microseconds on one rank."""

    layer: int
    dispatch_us: float
    combine_us: float
    layer_us: float
    """T_layer: all compute of the layer."""
    routed_us: float
    gate_us: float
    exposed_before_us: float
    """Part of the exchange that nothing can hide in the original wiring."""
    exposed_after_us: float
    """The same in the planned wiring."""

    @property
    def exchange_us(self) -> float:
        """Left side of (9)."""
        return self.dispatch_us + self.combine_us

    @property
    def room_us(self) -> float:
        """Right side of (9)."""
        return self.layer_us - (self.routed_us + self.gate_us)

    @property
    def margin_us(self) -> float:
        """How much room is left; below 0 the layer is short of compute, however it is wired."""
        return self.room_us - self.exchange_us


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
        sum(costs[i].flops_per_token for i in before),
        sum(costs[i].flops_per_token for i in after),
    )


def _sees(reader: Connection, write: int, connections: Sequence[Connection]) -> bool:
    """Whether the block sees any addend of an earlier write."""
    addends = connections[write - 1].block.addends
    return any((write, addend) not in reader.lacks for addend in addends)


def _sees_travelling(reader: Connection, writer: Connection) -> bool:
    """Whether a later block needs what the writer's collective delivers: the routed addend, or all of it."""
    addends = writer.block.addends
    travelling = ("routed",) if "routed" in addends else addends
    return any((writer.write, addend) not in reader.lacks for addend in travelling)


@dataclass(frozen=True)
class _Job:
    """One collective and the compute that may run beside it, in order."""

    block: int
    name: str
    deadline: int
    """Position of the first block that waits for it."""
    us: float
    beside: tuple[tuple[int, str], ...]
    """(block, part)."""


def exposed(
    connections: Sequence[Connection],
    works: Sequence[Sequence[Work]],
    transfers: Sequence[Sequence[Transfer]],
) -> dict[tuple[int, str], float]:
    """Microseconds of each collective, by (block, name), that no compute can hide under this wiring.

    Each part of a sub-block hides one collective at a time. Collectives that are waited for first choose first,
    and take the earliest compute: since both ends of the spans move on with the blocks, nothing hides more.
    """
    left = {(i, w.name): w.est_us for i, block in enumerate(works) for w in block}
    found: dict[tuple[int, str], float] = {}
    jobs = [job for i in range(len(connections)) for job in _jobs(connections, i, works, transfers[i])]
    for job in sorted(jobs, key=lambda j: (j.deadline, j.block)):
        need = job.us
        for part in job.beside:
            used = min(need, left[part])
            left[part] -= used
            need -= used
        found[job.block, job.name] = need
    return found


def _jobs(
    connections: Sequence[Connection],
    index: int,
    works: Sequence[Sequence[Work]],
    transfers: Sequence[Transfer],
) -> list[_Job]:
    before, after = spans(connections, index)
    ahead = [(i, w.name) for i in before for w in works[i]]
    behind = [(i, w.name) for i in after for w in works[i]]
    # The shared experts of a MoE read what its router reads, and wait for no exchange.
    shared = [(index, w.name) for w in works[index] if w.name == "shared"]
    routed = [(index, w.name) for w in works[index] if w.name == "routed"]
    is_moe = bool(routed)
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
    before: dict[tuple[int, str], float],
    after: dict[tuple[int, str], float],
) -> tuple[LayerWindow, ...]:
    """Equation (9) for each MoE block that exchanges tokens. `before`, `after`: what `exposed` found."""
    found = []
    for i, connection in enumerate(connections):
        exchange = {t.name: t.est_us for t in transfers[i] if t.name in ("dispatch", "combine")}
        if not exchange:
            continue
        layer = connection.block.layer
        total = sum(w.est_us for j, c in enumerate(connections) if c.block.layer == layer for w in works[j])
        parts = {w.name: w.est_us for w in works[i]}
        found.append(
            LayerWindow(
                layer,
                exchange.get("dispatch", 0.0),
                exchange["combine"],
                total,
                parts["routed"],
                parts["gate"],
                sum(before[i, name] for name in exchange),
                sum(after[i, name] for name in exchange),
            )
        )
    return tuple(found)
