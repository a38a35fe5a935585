"""Check a rewired region against its wiring, from the graph alone.

Every value of the stream is taken apart again into what was added to make it: an addend that is lost,
scaled otherwise, added twice, or seen by a block that must not see it is found here. What is an addend is
taken from `split_contributions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import fx

from fxskip.errors import PassError
from fxskip.ir import (
    STREAM_ROLES,
    block_nodes,
    info,
    is_add,
    is_stream,
    op_name,
    stream_inputs,
    stream_outputs,
    stream_values,
)
from fxskip.linear import carried_operand
from fxskip.wiring import RegionWiring, Variant

Chain = tuple[str, ...]
Terms = Counter[tuple[str, Chain]]
"""How often each addend or incoming stream was added, by its node's name and the linear operations applied to it."""


def verify(graph: fx.Graph, wiring: RegionWiring) -> fx.Graph:
    """Return `graph` itself if every block and every outgoing stream sees exactly what `wiring` says.

    Needs    the graph that `reroute` returned, its annotations and markers still in place
    Raises   PassError that names the block, what it sees and what it should see
    """
    graph.lint()
    _require_markers(graph, wiring)
    for number, block in enumerate(wiring.blocks, start=1):
        # Between two writes there is more than one value where the code scales the stream: a block may read any.
        after = [v for v in stream_values(graph) if _number(v) == number - 1 - block.behind]
        expected = [_expected(graph, wiring, block.reads, value) for value in after]
        for source in _streams_read_by(graph, number):
            _compare(f"sub-block {number} ({block.kind})", source, expected)
    for index, marker in stream_outputs(graph).items():
        expected = [_expected(graph, wiring, wiring.outputs[index], stream_values(graph)[-1])]
        _compare(f"outgoing stream {index}", marker.all_input_nodes[0], expected)
    return graph


_PARTS = STREAM_ROLES | {"sum", "addend"}


def summands(stream: fx.Node, applied: Chain = ()) -> Terms:
    """What was added to make `stream`, taken apart down to incoming streams and addends."""
    about = info(stream)
    if about is not None and about.role in ("input", "addend"):
        return Counter({(stream.name, applied): 1})
    parts = [a for a in stream.all_input_nodes if (part := info(a)) is not None and part.role in _PARTS]
    if about is not None and is_add(stream) and len(parts) == 2:
        return summands(parts[0], applied) + summands(parts[1], applied)
    if about is None or len(parts) != 1 or carried_operand(stream, parts) is None:
        raise _defect(f"{stream.name!r} is part of a stream but is no sum of addends")
    return summands(parts[0], (_operation(stream, parts[0]), *applied))


def _number(stream: fx.Node) -> int:
    about = info(stream)
    assert about is not None
    return about.write


def _operation(node: fx.Node, operand: fx.Node) -> str:
    """An operation without its operand: two that read alike do the same."""
    arguments = ["_" if a is operand else str(a) for a in node.args]
    arguments += [f"{name}={a}" for name, a in node.kwargs.items()]
    return f"{op_name(node)}({', '.join(arguments)})"


def _expected(graph: fx.Graph, wiring: RegionWiring, lacks: Variant, end: fx.Node) -> Terms:
    """What `end`, a value of the full stream, would consist of without `lacks`."""
    earlier = frozenset(pair for pair in lacks if pair[0] <= 0)
    if earlier not in wiring.inputs:
        raise _defect(f"the wiring reads a stream without {sorted(earlier)}, and none such enters the region")
    incoming = stream_inputs(graph)[wiring.inputs.index(earlier)]
    expected: Terms = Counter({(incoming.name, ()): 1})
    values = stream_values(graph)
    for before, node in pairwise(values[: values.index(end) + 1]):
        about = info(node)
        assert about is not None
        if about.role == "carry":
            step = _operation(node, before)
            expected = Counter({(name, (*chain, step)): n for (name, chain), n in expected.items()})
            continue
        for addend in block_nodes(graph, about.write):
            part = info(addend)
            if part is not None and part.role == "addend" and (part.write, part.addend) not in lacks:
                expected[addend.name, _original_chain(addend)] += 1
    return expected


def _original_chain(addend: fx.Node) -> Chain:
    """The linear operations between an addend and its write in the original code, the first applied first.

    Copies of them for variants stand later in the graph, so the first user is the original one.
    """
    chain: list[str] = []
    node = addend
    while True:
        inside = [u for u in node.users if (a := info(u)) is not None and a.role == "sum"]
        if not inside:
            return tuple(chain)
        first = next(n for n in node.graph.nodes if n in inside)
        if not is_add(first):
            chain.append(_operation(first, node))
        node = first


def _streams_read_by(graph: fx.Graph, number: int) -> Iterable[fx.Node]:
    """The values of the stream that a sub-block reads; it must read nothing else of what depends on the stream."""
    wrapped = {marker.args[0] for marker in stream_inputs(graph).values()}
    read: dict[fx.Node, None] = {}
    for node in block_nodes(graph, number):
        for operand in node.all_input_nodes:
            about = info(operand)
            if is_stream(operand):
                read[operand] = None
            elif operand in wrapped or (about is not None and number not in (about.write, *about.also)):
                raise _defect(f"sub-block {number} reads {operand.name!r}, which is no value of the stream")
    if not read:
        raise _defect(f"sub-block {number} does not read the stream")
    return read


def _require_markers(graph: fx.Graph, wiring: RegionWiring) -> None:
    """Each stream of the wiring enters once, and leaves once among the values that the graph returns.

    A captured program goes on after its one stream has left the region: norm and head follow.
    """
    output = next(n for n in graph.nodes if n.op == "output")
    markers = stream_outputs(graph)
    numbers = {marker: index for index, marker in markers.items()}
    returned: list[int] = []
    fx.map_arg(output.args, lambda n: returned.append(numbers[n]) if n in numbers else None)
    goes_on = not returned and len(wiring.outputs) == 1 and 0 in markers and bool(markers[0].users)
    if returned != list(range(len(wiring.outputs))) and not goes_on:
        raise _defect(f"the streams {returned} leave the region, where the wiring has {len(wiring.outputs)}")
    entered = stream_inputs(graph)
    sources = {marker.args[0] for marker in entered.values()}
    if sorted(entered) != list(range(len(wiring.inputs))) or len(sources) != len(entered):
        raise _defect(
            f"the streams {sorted(entered)} enter the region, where the wiring has {len(wiring.inputs)}"
        )


def _compare(reader: str, stream: fx.Node, expected: Sequence[Terms]) -> None:
    found = summands(stream)
    if found not in expected:
        raise _defect(
            f"{reader} reads {stream.name!r} = {_sum(found)}, but the spec gives it "
            + " or ".join(map(_sum, expected))
        )


def _sum(terms: Terms) -> str:
    texts = []
    for (name, chain), count in sorted(terms.items()):
        text = " -> ".join((name, *chain))
        texts.append(text if count == 1 else f"{count} times {text}")
    return " + ".join(texts)


def _defect(found: str) -> PassError:
    return PassError(
        "verify", found, hint="this is a defect in fxskip: please report it with the model type and the spec"
    )
