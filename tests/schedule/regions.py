"""Regions of tiny models as `parallelise` orders them, in one process and without running them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import fx

from fxskip import leaves
from fxskip.analysis import Analysis
from fxskip.collectives.border import _TAILS, Tail, leave_pending
from fxskip.ir import with_streams
from fxskip.parallel import Exchange, ExpertStack, RegionParallel
from fxskip.passes.defer import arrive, defer
from fxskip.passes.dependencies import Unit, units
from fxskip.passes.order_gradients import order_gradients
from fxskip.passes.shard import shard
from fxskip.passes.split_collectives import split_collectives
from fxskip.pipeline import wired
from fxskip.runtime.parallelize import expert_paths
from fxskip.spec import Schedule, load_spec
from tests.zoo import tiny


@dataclass(frozen=True)
class Drawn:
    """A region before its nodes are ordered."""

    graph: fx.Graph
    parallel: RegionParallel
    arriving: Tail | None

    @property
    def units(self) -> list[Unit]:
        return units(self.graph)


def region(
    model_type: str,
    spec: str,
    layer: int = 2,
    *,
    transport: str = "gloo",
    scale: int = 1,
    exchange: Exchange = "all_to_all",
) -> Drawn:
    """The region of one layer of a model of four, between layers of its kind. `scale`: of the experts' size."""
    model = tiny(model_type, layers=4)
    decoder_layer = model.model.layers[layer]
    (path,) = expert_paths(decoder_layer)
    experts = decoder_layer.get_submodule(path)
    stack = next(experts.parameters())
    with declared(type(experts)):
        analysis = Analysis.of_original("test", model, None)
    wiring = analysis.connect(load_spec(spec)).regions[layer]
    number = len(stack)
    each = scale * sum(p.numel() for p in experts.parameters()) // number
    parallel = RegionParallel(
        (ExpertStack(path, number, each),), 2, "scheduled", True, Schedule(), "h200", transport, exchange
    )  # type: ignore[arg-type]
    graph = with_streams(analysis.layers[layer].graph, len(wiring.inputs), len(wiring.outputs))
    graph = split_collectives(shard(wired(graph, wiring), parallel), "scheduled")
    graph = defer(order_gradients(graph))
    left = next((n for n in graph.nodes if n.target is leave_pending), None)
    if left is None:
        return Drawn(graph, replace(parallel, defers=False), None)
    tail = _TAILS[str(left.args[0])]
    return Drawn(arrive(graph, tail), parallel, tail)


@contextmanager
def declared(kind: type) -> Iterator[None]:
    """While it is open, modules of the class are leaves, as experts of a parallel student are."""
    before = dict(leaves._DECLARED)
    leaves.leaf(kind)
    try:
        yield
    finally:
        leaves._DECLARED.clear()
        leaves._DECLARED.update(before)
