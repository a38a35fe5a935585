"""Estimates of one rank: work and volumes by hand, and routing by drawing it."""

import random
from dataclasses import replace

import pytest

from fxskip.schedule.costs import Costs, Part
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.roofline import Deployment, domains_of_a_token, transfers, work

H200 = load_hardware("h200")
FLOP_PER_S, BYTES_PER_S = 989.5e12 * 0.70, 4.8e12 * 0.88
KERNEL_S, COLLECTIVE_S = 2.1e-6, 30e-6
LINK, NETWORK = 450e9 * 0.60, 50e9 * 0.86

D, TOKENS, EXPERTS, CHOSEN = 1024, 4096, 64, 4
GATE = Part("gate", D * EXPERTS, 2.0 * D * EXPERTS, D + EXPERTS, 1)
ROUTED = Part("routed", 3 * EXPERTS * D * 512, 6.0 * CHOSEN * D * 512, CHOSEN * 3.0 * (D + 512), 2)
SHARED = Part("shared", 3 * D * 512, 6.0 * D * 512, 3.0 * (D + 512), 3)
MOE = Costs((GATE, SHARED, ROUTED), D, EXPERTS, CHOSEN)
ATTENTION = Costs((Part("attention", 4 * D * D, 8.0 * D * D, 10.0 * D, 5),), D)


def deployment(**fields):
    made = Deployment(H200, "bfloat16", TOKENS, 4096, 8, "all_to_all", 1)
    return replace(made, **fields)


def by_name(things):
    return {thing.name: thing for thing in things}


def test_work_without_parallelism():
    found = by_name(work(MOE, deployment(expert=1)))
    for part in MOE.parts:
        assert found[part.name].flops == TOKENS * part.flops_per_token
        assert found[part.name].activation_bytes == 2 * TOKENS * part.activations_per_token
        assert found[part.name].weight_bytes == pytest.approx(2 * part.parameters)


def test_a_rank_holds_its_share_of_the_experts_and_computes_as_many_rows():
    one, eight = by_name(work(MOE, deployment(expert=1))), by_name(work(MOE, deployment()))
    assert eight["routed"].flops == one["routed"].flops
    assert eight["routed"].weight_bytes == pytest.approx(one["routed"].weight_bytes / 8)
    assert (eight["gate"], eight["shared"]) == (one["gate"], one["shared"])


def test_experts_that_no_token_is_sent_to_are_not_read():
    tokens, rng = 3, random.Random(0)
    drawn = [
        len({e for _ in range(tokens) for e in rng.sample(range(EXPERTS), CHOSEN)}) for _ in range(20_000)
    ]
    expected = sum(drawn) / len(drawn) / EXPERTS
    found = by_name(work(MOE, deployment(expert=1, tokens=tokens)))["routed"]
    assert found.weight_bytes / (2 * ROUTED.parameters) == pytest.approx(expected, rel=0.01)


def test_the_roofline_takes_the_longer_of_compute_and_memory():
    found = by_name(work(MOE, deployment(expert=1)))
    for part in MOE.parts:
        w = found[part.name]
        compute, memory = w.flops / FLOP_PER_S, (w.weight_bytes + w.activation_bytes) / BYTES_PER_S
        assert w.est_us == pytest.approx(1e6 * (max(compute, memory) + part.kernels * KERNEL_S))
        assert w.bound == ("compute" if compute > memory else "memory")
    assert {w.bound for w in found.values()} == {"compute", "memory"}


def test_a_tensor_group_cuts_what_is_not_routed():
    one, four = work(ATTENTION, deployment())[0], work(ATTENTION, deployment(tensor=4))[0]
    assert (four.flops, four.weight_bytes, four.activation_bytes) == (
        one.flops / 4,
        one.weight_bytes / 4,
        one.activation_bytes / 4,
    )


def test_an_all_to_all_inside_a_domain():
    dispatch, combine = transfers("moe", MOE, deployment())
    sent = TOKENS * CHOSEN * D * 2 * 7 / 8  # one eighth stays
    assert (dispatch.name, combine.name) == ("dispatch", "combine")
    for move in (dispatch, combine):
        assert (move.domain_bytes, move.network_bytes) == (sent, 0)
        assert move.est_us == pytest.approx(1e6 * (sent / LINK + COLLECTIVE_S))


def test_an_all_to_all_over_eight_domains():
    dispatch, _ = transfers("moe", MOE, deployment(expert=64))
    copies = TOKENS * CHOSEN * D * 2
    assert dispatch.domain_bytes == copies * 7 / 64
    assert dispatch.network_bytes == copies * 56 / 64
    assert dispatch.est_us == pytest.approx(1e6 * (dispatch.network_bytes / NETWORK + COLLECTIVE_S))


def drawn_domains(experts, chosen, groups, chosen_groups, domains):
    """Domains with an expert of a token: groups drawn, then experts in them, 20,000 times."""
    rng, total = random.Random(0), 0
    for _ in range(20_000):
        allowed = rng.sample(range(groups), chosen_groups)
        within = [g * experts // groups + e for g in allowed for e in range(experts // groups)]
        total += len({e * domains // experts for e in rng.sample(within, chosen)})
    return total / 20_000


@pytest.mark.parametrize(
    ("groups", "chosen_groups", "domains"),
    [(1, 1, 8), (8, 4, 8), (8, 4, 4), (8, 4, 2), (8, 4, 16), (8, 3, 32)],
)
def test_domains_that_a_token_reaches(groups, chosen_groups, domains):
    costs = replace(MOE, experts=256, experts_per_token=8, groups=groups, groups_per_token=chosen_groups)
    expected = drawn_domains(256, 8, groups, chosen_groups, domains)
    assert domains_of_a_token(costs, domains) == pytest.approx(expected, rel=0.03)


def test_node_limited_routing_sends_a_token_over_the_network_once_a_domain():
    costs = replace(MOE, experts=256, experts_per_token=8, groups=8, groups_per_token=4)
    plain, _ = transfers("moe", costs, deployment(expert=64))
    once, _ = transfers("moe", costs, deployment(expert=64, copies_per="domain"))
    assert plain.network_bytes == TOKENS * 8 * D * 2 * 7 / 8
    expected = drawn_domains(256, 8, 8, 4, 8) * 7 / 8
    assert once.network_bytes / (TOKENS * D * 2) == pytest.approx(expected, rel=0.03)
    assert once.domain_bytes == TOKENS * 8 * D * 2 * 7 / 8  # seven of eight copies are for another GPU there
    inside = deployment(copies_per="domain")
    assert transfers("moe", costs, inside) == transfers("moe", costs, replace(inside, copies_per="expert"))


def test_an_all_reduce_of_the_routed_experts():
    alone = deployment(exchange="all_reduce", expert=4)
    (combine,) = transfers("moe", MOE, alone)
    assert (combine.name, combine.domain_bytes) == ("combine", 2 * 3 / 4 * TOKENS * D * 2)
    # The same tokens everywhere: a rank computes the rows of its own experts alone.
    assert by_name(work(MOE, alone))["routed"].flops == TOKENS * ROUTED.flops_per_token / 4


def test_tensor_parallelism_reduces_each_output_and_gathers_the_routed_one():
    both = deployment(tensor=4)
    (reduced,) = transfers("attention", ATTENTION, both)
    assert (reduced.name, reduced.domain_bytes) == ("all-reduce", 2 * 3 / 4 * TOKENS * D * 2)
    dispatch, combine, shared = transfers("moe", MOE, both)
    # Each rank sends its quarter of the tokens.
    assert dispatch.domain_bytes == TOKENS / 4 * CHOSEN * D * 2 * 7 / 8
    assert combine.domain_bytes == dispatch.domain_bytes + TOKENS * D * 2 * 3 / 4
    assert (shared.name, shared.domain_bytes) == (reduced.name, reduced.domain_bytes)
    assert by_name(work(MOE, both))["routed"].flops == TOKENS / 4 * ROUTED.flops_per_token
    without_shared = replace(MOE, parts=(GATE, ROUTED))
    assert [t.name for t in transfers("moe", without_shared, both)] == ["dispatch", "combine"]


def test_an_all_reduce_over_several_domains_goes_at_the_network_s_pace():
    (reduced,) = transfers("attention", ATTENTION, deployment(tensor=16))
    sent = 2 * 15 / 16 * TOKENS * D * 2
    assert (reduced.domain_bytes, reduced.network_bytes) == (0, sent)
    assert reduced.est_us == pytest.approx(1e6 * (sent / NETWORK + COLLECTIVE_S))


def test_one_process_sends_nothing():
    alone = deployment(expert=1)
    assert transfers("moe", MOE, alone) == transfers("attention", ATTENTION, alone) == ()
