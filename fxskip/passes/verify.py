"""Check a rewired region against its wiring, from the graph alone.

Every value of the stream is taken apart again into what was added to make it. This shares no code with
`reroute`: an addend that is lost, added twice, or seen by a block that must not see it is found here.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from fxskip.errors import PassError
from fxskip.ir import NodeInfo, block_nodes, info, is_add, stream_inputs, stream_outputs
from fxskip.passes.split_contributions import linear_operand
from fxskip.wiring import RegionWiring, Variant


def verify(graph: fx.Graph, wiring: RegionWiring) -> fx.Graph:
    """Return `graph` itself if every block and every outgoing stream sees exactly what `wiring` says.

    Needs    the graph that `reroute` returned, its annotations and markers still in place
    Raises   PassError that names the block, what it sees and what it should see
    """
    graph.lint()
    for number, block in enumerate(wiring.blocks, start=1):
        expected = _expected(graph, wiring, block.reads, number - 1)
        for source in _streams_read_by(graph, number):
            _compare(f"sub-block {number} ({block.kind})", source, expected)
    for index, marker in stream_outputs(graph).items():
        expected = _expected(graph, wiring, wiring.outputs[index], len(wiring.blocks))
        _compare(f"outgoing stream {index}", marker.all_input_nodes[0], expected)
    return graph


def summands(stream: fx.Node) -> Counter[str]:
    """Names of the incoming stream and of the addends that were added to make `stream`, with their counts."""
    about = info(stream)
    if about is None:
        raise _not_a_sum(stream)
    if about.role in ("input", "addend"):
        return Counter({stream.name: 1})
    if is_add(stream):
        left, right = (a for a in stream.args if isinstance(a, fx.Node))
        return summands(left) + summands(right)
    source = linear_operand(stream) if about.role == "sum" else None
    if source is None:
        raise _not_a_sum(stream)
    return summands(source)


def _expected(graph: fx.Graph, wiring: RegionWiring, lacks: Variant, after: int) -> Counter[str]:
    """What the stream after write `after` consists of when it lacks `lacks`."""
    incoming = wiring.inputs.index(frozenset(pair for pair in lacks if pair[0] <= 0))
    expected = Counter({stream_inputs(graph)[incoming].name: 1})
    for node in graph.nodes:
        about = info(node)
        if about is not None and about.role == "addend" and about.write <= after:
            if (about.write, about.addend) not in lacks:
                expected[node.name] += 1
    return expected


def _streams_read_by(graph: fx.Graph, number: int) -> list[fx.Node]:
    """The values of the stream that the operations of a sub-block read."""
    read = (operand for node in block_nodes(graph, number) for operand in node.all_input_nodes)
    return list(dict.fromkeys(n for n in read if _is_stream(info(n))))


def _is_stream(about: NodeInfo | None) -> bool:
    return about is not None and about.role in ("input", "residual", "variant")


def _compare(reader: str, stream: fx.Node, expected: Counter[str]) -> None:
    found = summands(stream)
    if found != expected:
        raise PassError(
            "verify",
            f"{reader} reads {stream.name!r} = {_sum(found)}, but the spec gives it {_sum(expected)}",
            hint="this is a defect in fxskip: please report it with the model type and the spec",
        )


def _sum(terms: Counter[str]) -> str:
    return " + ".join(name if count == 1 else f"{count} {name}" for name, count in sorted(terms.items()))


def _not_a_sum(node: fx.Node) -> PassError:
    return PassError(
        "verify",
        f"{node.name!r} is part of a stream but is no sum of addends",
        hint="this is a defect in fxskip: please report it with the model type and the spec",
    )
