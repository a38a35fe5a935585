"""placeholder until the solver lands"""

from fxskip.collectives.expert_parallel import run_own_experts, wait_counts
from fxskip.ir import is_matrix_product, op_name
from fxskip.passes.dependencies import Unit
from fxskip.passes.split_collectives import is_start, is_wait


def greedy(units: list[Unit]) -> list[Unit]:
    cost = {
        u: sum(
            10.0
            if (is_matrix_product(n) or "attention" in op_name(n) or n.target is run_own_experts)
            else 0.2
            for n in u.nodes
        )
        for u in units
    }
    after: dict[Unit, set[Unit]] = {u: set() for u in units}
    for u in units:
        for b in u.before:
            after[b].add(u)
    tail: dict[Unit, float] = {}
    for u in reversed(units):
        comm = 30.0 if any(is_start(n) for n in u.nodes) else 0.0
        tail[u] = cost[u] + comm + max([tail[a] for a in after[u]], default=0.0)
    left = {u: len(u.before) for u in units}
    ready = [u for u in units if not left[u]]
    end: dict[Unit, float] = {}
    now = 0.0
    order = []
    index = {u: i for i, u in enumerate(units)}
    arrival: dict[object, float] = {}
    while ready:

        def key(u):
            at = now
            for n in u.nodes:
                if is_wait(n):
                    at = max(at, arrival.get(n.args[0], 20.0))
                if n.target is wait_counts:
                    at = max(at, arrival.get(n.args[0], 0.0))
            return (at, -tail[u], index[u])

        u = min(ready, key=key)
        now = key(u)[0] + cost[u]
        for n in u.nodes:
            if is_start(n):
                arrival[n] = now + 30.0
        order.append(u)
        ready.remove(u)
        for a in after[u]:
            left[a] -= 1
            if not left[a]:
                ready.append(a)
    return order
