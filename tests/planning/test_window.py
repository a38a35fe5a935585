"""What a wiring can hide: by hand for one layer after the other, and against a maximum flow."""

import random

import networkx as nx
import pytest

from fxskip.planning.window import exposed, layer_windows
from fxskip.schedule.roofline import Transfer, Work
from fxskip.spec import load_spec
from fxskip.wiring import SubBlock, connect

LAYERS = 5


def model(shared=True):
    adds = ("routed", "shared") if shared else ("routed",)
    blocks = []
    for layer in range(LAYERS):
        blocks.append(SubBlock(layer, "attention", f"{layer}.attn", ("attention",)))
        blocks.append(SubBlock(layer, "moe", f"{layer}.moe", adds))
    return blocks


def timed(name, us):
    return Work(name, 0.0, 0.0, 0.0, us, "compute")


def moved(name, us):
    return Transfer(name, 0.0, 0.0, us)


def times(blocks, attention=100.0, shared=30.0, exchange=60.0):
    works, moves = [], []
    for block in blocks:
        if block.kind == "attention":
            works.append([timed("attention", attention)])
            moves.append([])
        else:
            own = [timed("shared", shared)] if "shared" in block.addends else []
            works.append([timed("gate", 5.0), *own, timed("routed", 200.0)])
            moves.append([moved("dispatch", exchange), moved("combine", exchange)])
    return works, moves


def by_layer(spec, blocks, **us):
    works, moves = times(blocks, **us)
    found = exposed(connect(load_spec(spec), blocks).connections, works, moves)
    return [sum(found[2 * i + 1, name] for name in ("dispatch", "combine")) for i in range(LAYERS)]


def test_stock_layers_hide_under_their_shared_experts_alone():
    assert by_layer("identity", model()) == [120 - 30] * LAYERS
    assert by_layer("identity", model(shared=False)) == [120] * LAYERS


def test_farskip_hides_all_but_the_last_combine_where_equation_9_holds():
    # Room: attention 100 and shared 30 for an exchange of 120. After the last layer no attention follows.
    assert by_layer("farskip", model()) == [0, 0, 0, 0, 30]
    # Without shared experts 100 for 120: in the first layer the dispatch has an attention for itself.
    assert by_layer("farskip", model(shared=False))[1:] == [20, 20, 20, 20 + 60]


def test_half_of_farskip_hides_one_half():
    # The dispatch, under its own attention.
    assert by_layer("farskip-moe", model(shared=False)) == [60] * LAYERS
    assert by_layer("farskip-attention", model(shared=False)) == [60] * (LAYERS - 1) + [120]


def test_equation_9():
    blocks = model()
    works, moves = times(blocks)
    before, after = (
        exposed(connect(load_spec(spec), blocks).connections, works, moves)
        for spec in ("identity", "farskip")
    )
    rows = layer_windows(connect(load_spec("farskip"), blocks).connections, works, moves, before, after)
    assert [row.layer for row in rows] == list(range(LAYERS))
    row = rows[2]
    assert (row.layer_us, row.routed_us, row.gate_us) == (335, 200, 5)
    assert (row.exchange_us, row.room_us, row.margin_us) == (120, 130, 10)
    assert (row.exposed_before_us, row.exposed_after_us) == (90, 0)


def test_what_is_not_known_leaves_unknown_what_it_could_hide():
    blocks = model()
    works, moves = times(blocks)
    works[4] = [timed("attention", None)]  # of layer 2
    stock, farskip = (connect(load_spec(spec), blocks).connections for spec in ("identity", "farskip"))
    before, after = exposed(stock, works, moves), exposed(farskip, works, moves)
    # In the original wiring no exchange runs beside attention; under farskip all of them compete for what there is.
    assert None not in before.values()
    assert set(after.values()) == {None}
    rows = layer_windows(farskip, works, moves, before, after)
    assert [row.room_us for row in rows] == [130, 130, None, 130, 130]
    assert [row.margin_us for row in rows] == [10, 10, None, 10, 10]
    assert rows[0].exposed_before_us == 90 and rows[0].exposed_after_us is None


def test_an_exchange_of_unknown_length_is_unknown_alone_where_it_has_no_rival():
    blocks = model()
    works, moves = times(blocks)
    moves[5] = [moved("dispatch", None), moved("combine", None)]
    found = exposed(connect(load_spec("identity"), blocks).connections, works, moves)
    assert {i for (i, _), us in found.items() if us is None} == {5}


SPECS = {
    "ladder": "ladder",
    "farskip": "farskip",
    "identity": "identity",
    "attention": "farskip-attention",
    "far": {"fxskip": 1, "connect": [{"blocks": "moe", "without": ["all@1", "all@2", "all@3"]}]},
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shared", [True, False])
def test_no_assignment_of_compute_to_collectives_hides_more(spec, shared):
    """Against the maximum flow from compute to collectives, over random times."""
    rng, blocks = random.Random(0), model(shared)
    connections = connect(load_spec(SPECS[spec]), blocks).connections
    for _ in range(20):
        works = [[timed(w.name, rng.randrange(1, 100)) for w in block] for block in times(blocks)[0]]
        moves = [
            [moved("dispatch", rng.randrange(1, 100)), moved("combine", rng.randrange(1, 100))]
            if block.kind == "moe"
            else [moved("all-reduce", rng.randrange(1, 100))]
            for block in blocks
        ]
        total = sum(m.est_us for block in moves for m in block)
        hidden = total - sum(exposed(connections, works, moves).values())
        assert hidden == best(connections, works, moves)


def best(connections, works, moves):
    """The most that can be hidden: who may run beside what is read off the wiring, block by block."""
    graph = nx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for i, block in enumerate(works):
        for w in block:
            graph.add_edge("source", (i, w.name), capacity=w.est_us)
    for j, block in enumerate(moves):
        for move in block:
            graph.add_edge((j, move.name, "move"), "sink", capacity=move.est_us)
            for i, w in ((i, w) for i, block in enumerate(works) for w in block):
                if may_run_beside(connections, i, w.name, j, move.name):
                    graph.add_edge((i, w.name), (j, move.name, "move"))
    return nx.maximum_flow_value(graph, "source", "sink")


def may_run_beside(connections, i, part, j, name):
    """Block i neither feeds the start of the collective of block j nor waits for its end."""
    own = connections[j]
    if i == j:
        return part == "shared" and name != "all-reduce"
    if name == "dispatch":
        # All blocks from the first one that j does not see at all, up to j.
        between = range(i, j)
        return i < j and all(unseen(own, connections[k]) for k in between)
    # All blocks after j, as long as none of them needs what travels.
    travelling = ("routed",) if "routed" in own.block.addends else own.block.addends
    waited = [
        k for k in range(j + 1, i + 1) if any((j + 1, a) not in connections[k].reads for a in travelling)
    ]
    return i > j and not waited


def unseen(reader, source):
    return all((source.write, addend) in reader.reads for addend in source.block.addends)
