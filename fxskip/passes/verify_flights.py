"""Check that no value is touched while it is in flight, before anything runs.

    start(rows, flight) -> buffer     rows may be read, not written, until the wait
    ... the flight ...                buffer may not be touched, by any alias
    wait(buffer, flight) -> arrived   once for each start, or left for the next layer

Python runs the nodes of a graph in their order, so what stands between a start and its wait runs during the flight.
"""

from __future__ import annotations

from torch import fx

from fxskip.collectives.border import arrived_value, leave_pending
from fxskip.errors import ScheduleError
from fxskip.ir import mutated_base, op_name, storage
from fxskip.passes.split_collectives import is_start, is_wait

_WHO = "verify_flights"


def verify_flights(graph: fx.Graph) -> fx.Graph:
    """Return `graph` if each of its collectives is started once, waited for once, and left alone in between.

    Needs    the final order of the nodes
    Raises   ScheduleError that names the nodes: a buffer that something else reads; a start without a wait or with two;
             a wait before its start; memory that a collective reads or fills and that is written during the flight
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if is_start(node):
            _check_start(node, position)
        if is_wait(node):
            _check_wait(node)
    return graph


def _check_start(start: fx.Node, position: dict[fx.Node, int]) -> None:
    waits = [user for user in start.users if is_wait(user)]
    leaves = [user for user in start.users if user.target is leave_pending]
    others = [user for user in start.users if user not in (*waits, *leaves)]
    if others:
        raise _fault(
            f"{others[0].name!r} ({op_name(others[0])}) reads {start.name!r}, a buffer in flight", start
        )
    if len(waits) + len(leaves) != 1:
        raise _fault(f"{start.name!r} is started and waited for {len(waits) + len(leaves)} times", start)
    end = (waits or leaves)[0]
    if position[end] < position[start]:
        raise _fault(f"{end.name!r} waits before {start.name!r} has started", start)
    if waits and end.args[1] is not start.args[1]:
        raise _fault(f"{end.name!r} waits for another flight than {start.name!r} started", start)
    rows = start.args[0]
    assert isinstance(rows, fx.Node)
    in_use = {storage(rows), storage(start)} - {None}
    last = position[end] if waits else len(position)
    for node, at in position.items():
        base = mutated_base(node)
        if position[start] < at < last and base is not None and storage(base) in in_use:
            raise _fault(
                f"{node.name!r} ({op_name(node)}) writes into memory that {start.name!r} uses", start
            )


def _check_wait(wait: fx.Node) -> None:
    buffer = wait.args[0]
    assert isinstance(buffer, fx.Node)
    if not (is_start(buffer) or buffer.target is arrived_value):
        raise _fault(f"{wait.name!r} waits for {buffer.name!r}, which is no buffer in flight", wait)
    if buffer.target is arrived_value and len(buffer.users) > 1:
        raise _fault(f"{buffer.name!r} arrives in flight and is read by {len(buffer.users)} nodes", wait)


def _fault(found: str, node: fx.Node) -> ScheduleError:
    return ScheduleError(
        _WHO,
        found,
        where=f"node {node.name!r}",
        hint="this is a defect in a pass: please report it with the model type",
    )
