"""A step with fewer layers: what repeats is cut out, for searches whose answer repeats as well."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import groupby

from fxskip.schedule.tasks import TaskGraph


def shortened(graph: TaskGraph, kinds: Sequence[Hashable], *, most: int) -> TaskGraph:
    """The graph with at most `most` layers of each run of equal ones.

    kinds  of the layers, in the order in which they run; layers of one kind have the same roles and the same needs

    What the first layer behind a cut needed of the layer before it, it needs of the last layer before the cut.
    """
    kept: list[int] = []
    position = 0
    for _, run in groupby(kinds):
        length = sum(1 for _ in run)
        first = min(length, most) // 2
        last = min(length, most) - first
        kept += range(position, position + first)
        kept += range(position + length - last, position + length)
        position += length
    layers = graph.layers
    if len(kept) == len(layers):
        return graph
    # New indices keep the direction in which layers run.
    new = {layers[old]: (len(kept) - 1 - i if graph.backward else i) for i, old in enumerate(kept)}
    rank = {layer: i for i, layer in enumerate(layers)}
    role = {(task.layer, task.role): task for task in graph}
    names = {task.name: f"{new[task.layer]}.{task.role}" for task in graph if task.layer in new}
    tasks = [
        replace(task, name=names[task.name], layer=new[task.layer]) for task in graph if task.layer in new
    ]
    needs = {}
    for name, own in names.items():
        reads = []
        for producer in graph.producers(name):
            source = graph[producer]
            if source.layer not in new:  # it was cut out: its like, as many layers before the reader
                back = rank[graph[name].layer] - rank[source.layer]
                at = kept.index(rank[graph[name].layer]) - back
                source = role[layers[kept[at]], source.role]
            reads.append(names[source.name])
        needs[own] = reads
    return TaskGraph(tasks, needs, backward=graph.backward)
