"""What happens to a captured region, in order. Read this first.

    model -> capture -> ANALYSIS -> connect(spec) -> REWIRING -> (parallel) -> FINISHING -> region that runs

A pass takes a graph and returns a copy; the input is left alone. `ANALYSIS` finds out what the region
does, `REWIRING` changes it as the spec's wiring says, `parallel` spreads it over ranks and overlaps its
collectives, `FINISHING` makes it what runs, and `EAGER` is for graphs that no compiler lowers.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxskip.collectives.border import Tail
from fxskip.errors import PassError
from fxskip.ir import remove_markers
from fxskip.parallel import RegionParallel
from fxskip.passes.classify import classify
from fxskip.passes.defer import arrive, defer
from fxskip.passes.find_stream import find_stream
from fxskip.passes.functionalise import functionalise
from fxskip.passes.merge_collectives import merge_collectives
from fxskip.passes.order_gradients import order_gradients
from fxskip.passes.partial_values import require_reduced
from fxskip.passes.place import place
from fxskip.passes.reroute import reroute
from fxskip.passes.scattered_adds import join_scattered_adds, separate_scattered_adds
from fxskip.passes.shard import shard
from fxskip.passes.shard_tensors import shard_tensors
from fxskip.passes.split_collectives import split_collectives
from fxskip.passes.split_contributions import split_contributions
from fxskip.passes.sub_blocks import sub_blocks
from fxskip.passes.unshare import unshare
from fxskip.passes.use_eager_kernels import use_eager_kernels
from fxskip.passes.verify import verify
from fxskip.passes.verify_flights import verify_flights
from fxskip.schedule.order_region import order_region
from fxskip.wiring import BlockWiring, RegionWiring, SubBlock

ANALYSIS: tuple[Callable[[fx.Graph], fx.Graph], ...] = (
    functionalise,
    separate_scattered_adds,
    find_stream,
    classify,
    split_contributions,
)
REWIRING: tuple[Callable[[fx.Graph, RegionWiring], fx.Graph], ...] = (unshare, reroute, verify)
FINISHING: tuple[Callable[[fx.Graph], fx.Graph], ...] = (join_scattered_adds, remove_markers)
EAGER: tuple[Callable[[fx.Graph], fx.Graph], ...] = (use_eager_kernels,)


def analyse(graph: fx.Graph) -> fx.Graph:
    """The graph with its stream, sub-blocks and addends annotated."""
    for step in ANALYSIS:
        graph = step(graph)
    return graph


def rewire(graph: fx.Graph, wiring: RegionWiring, *, eager: bool = True) -> fx.Graph:
    """The graph that runs: analysed again, for each capture may differ, then wired, verified and freed of markers.

    eager   it runs node by node; False where a compiler lowers it
    """
    return _finished(wired(graph, wiring), eager=eager)


def parallelise(
    graph: fx.Graph, wiring: RegionWiring, parallel: RegionParallel, arriving: Tail | None, name: str
) -> fx.Graph:
    """The graph that runs on one rank of several: rewired, its experts spread, its exchanges under other work.

    arriving   what the layer before leaves unfinished
    name       of the region, under which its schedule is noted
    """
    graph = shard(wired(graph, wiring), parallel)
    graph = require_reduced(merge_collectives(shard_tensors(graph, parallel.tensor_size)))
    graph = order_gradients(split_collectives(graph, parallel.mode))
    if parallel.defers:
        graph = defer(graph)
    if arriving is not None:
        graph = arrive(graph, arriving)
    if parallel.mode != "reference":
        graph = place(graph, order_region(parallel, arriving.digest if arriving is not None else None, name))
    return verify_flights(_finished(graph, eager=True))


def wired(graph: fx.Graph, wiring: RegionWiring) -> fx.Graph:
    """The graph analysed again, for each capture may differ, then wired and verified; its streams are still marked."""
    graph = analyse(graph)
    _require_planned_blocks(graph, wiring)
    for step in REWIRING:
        graph = step(graph, wiring)
    return graph


def _finished(graph: fx.Graph, *, eager: bool) -> fx.Graph:
    for finish in (*FINISHING, *(EAGER if eager else ())):
        graph = finish(graph)
    return graph


def _require_planned_blocks(graph: fx.Graph, wiring: RegionWiring) -> None:
    """A capture in another mode must show the sub-blocks that the wiring was made for."""
    found = [_in_words(b) for b in sub_blocks(graph, layer=0, layer_path="")]
    planned = [_in_words(b) for b in wiring.blocks]
    if found != planned:
        raise PassError(
            "rewire",
            f"this capture of the layer has the sub-blocks {found}, but the transform planned for {planned}",
            hint="transform the model again with the configuration (experts and attention implementation, "
            "adapters) that it runs with",
        )


def _in_words(block: SubBlock | BlockWiring) -> tuple[object, ...]:
    return (block.kind, block.addends) + ((f"{block.behind} writes behind",) if block.behind else ())
