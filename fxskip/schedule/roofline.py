"""Estimated times on one rank: of compute by the roofline, of collectives by volume over bandwidth.

    part of a sub-block   max(FLOPs / reachable FLOP/s, bytes / reachable bytes/s) + kernels x time of a start
    collective            max over both kinds of link of (bytes sent / reachable bytes/s) + time of a start

One forward pass, all sequences from their start (training, prefill), tokens routed to all experts alike. Not
modelled: contention between the two, skew between ranks, and the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fxskip.schedule.costs import Costs, Part
from fxskip.schedule.hardware import BYTES, Hardware, MatrixType
from fxskip.schedule.sizes import total

Exchange = Literal["all_to_all", "all_reduce"]
CopiesPer = Literal["expert", "domain"]


@dataclass(frozen=True)
class Deployment:
    """What the estimates are for.

    An expert group and a tensor group are neighbouring ranks each, so that they lie in as few domains as they can.
    The ranks of a tensor group hold the same tokens.
    """

    hardware: Hardware
    dtype: MatrixType
    """Of weights, activations and what travels."""
    tokens: int
    """On each rank, in one forward pass."""
    context: int
    """Tokens of one sequence."""
    expert: int
    """Ranks that the routed experts are spread over."""
    exchange: Exchange
    """all_to_all: each rank of the expert group has tokens of its own; all_reduce: all have the same."""
    tensor: int
    """Ranks that attention, dense MLPs and shared experts are cut over."""
    copies_per: CopiesPer = "expert"
    """What a token crosses the network for in an all_to_all: each of its experts on another domain (a plain
    all-to-all), or each other domain that holds some of them, whose GPUs pass it on (as DeepEP does)."""
    assumed: bool = False
    """Nobody gave the expert size: it is that of one domain."""
    instead_of: str = ""
    """The model's type, where the hardware has no figure for it and nobody named another."""

    @property
    def own_tokens(self) -> float:
        """Tokens that this rank routes: in an all_to_all the ranks of a tensor group share theirs out."""
        return self.tokens / self.tensor if self.exchange == "all_to_all" else self.tokens

    @property
    def bytes(self) -> int:
        """Of one element."""
        return BYTES[self.dtype]


@dataclass(frozen=True)
class Work:
    """What one part of a sub-block does on one rank in one forward pass; None where the graph does not show it."""

    name: str
    flops: float | None
    weight_bytes: float | None
    """Each weight once. Of routed experts those that get a token, on average."""
    activation_bytes: float | None
    est_us: float | None
    bound: Literal["compute", "memory"] | None


@dataclass(frozen=True)
class Transfer:
    """A collective, as one rank sees it: the bytes that it sends to other ranks; None where they are not known."""

    name: Literal["dispatch", "combine", "all-reduce"]
    domain_bytes: float | None
    """Over the links inside a domain."""
    network_bytes: float | None
    est_us: float | None

    @property
    def bytes(self) -> float | None:
        """Over links of both kinds."""
        return total((self.domain_bytes, self.network_bytes))


def work(costs: Costs, deployment: Deployment) -> tuple[Work, ...]:
    """The parts of a sub-block on one rank."""
    return tuple(_work(part, costs, deployment) for part in costs.parts)


def _work(part: Part, costs: Costs, deployment: Deployment) -> Work:
    spread = _spread(part, costs, deployment)
    if spread is None:
        return Work(part.name, None, None, None, None, None)
    tokens, share = spread
    weights = part.parameters * share * deployment.bytes
    if part.flops_per_token is None or part.activations_per_token is None:
        return Work(part.name, None, weights, None, None, None)
    hardware = deployment.hardware
    flops = tokens * part.flops_per_token
    activations = tokens * part.activations_per_token * deployment.bytes
    compute_s = flops / hardware.matrix_flop_per_s[deployment.dtype].per_s
    memory_s = (weights + activations) / hardware.hbm_bytes_per_s.per_s
    est_us = 1e6 * (max(compute_s, memory_s) + part.kernels * hardware.kernel_start_s.value)
    bound: Literal["compute", "memory"] = "compute" if compute_s >= memory_s else "memory"
    return Work(part.name, flops, weights, activations, est_us, bound)


def _spread(part: Part, costs: Costs, deployment: Deployment) -> tuple[float, float] | None:
    """Tokens that meet the part on this rank, and the share of its weights that is read here."""
    if part.name == "moe" or (part.name == "routed" and not costs.experts):
        return None
    if part.name == "routed":
        assert costs.experts is not None and costs.experts_per_token is not None
        group = deployment.own_tokens * (deployment.expert if deployment.exchange == "all_to_all" else 1)
        touched = 1 - (1 - costs.experts_per_token / costs.experts) ** group
        return group / deployment.expert, touched / deployment.expert
    if part.name == "gate":
        return deployment.own_tokens, 1.0
    return deployment.tokens / deployment.tensor, 1 / deployment.tensor


def transfers(kind: str, costs: Costs, deployment: Deployment) -> tuple[Transfer, ...]:
    """The collectives of a sub-block of that kind; none where all groups have one rank."""
    found = []
    if kind == "moe" and deployment.expert > 1:
        found += _exchange(costs, deployment)
    names = {part.name for part in costs.parts}
    if deployment.tensor > 1 and names - {"gate", "routed", "moe"}:
        found.append(_reduction("all-reduce", deployment.tensor, costs, deployment))
    elif deployment.tensor > 1 and "moe" in names:  # nobody knows whether it has shared experts
        found.append(Transfer("all-reduce", None, None, None))
    return tuple(found)


def _exchange(costs: Costs, deployment: Deployment) -> list[Transfer]:
    """What routed experts on several ranks cost."""
    if deployment.exchange == "all_reduce":
        return [_reduction("combine", deployment.expert, costs, deployment)]
    if costs.experts_per_token is None:
        return [Transfer("dispatch", None, None, None), Transfer("combine", None, None, None)]
    size, gpus = deployment.expert, deployment.hardware.domain.gpus
    row = costs.hidden_size * deployment.bytes
    sent = deployment.own_tokens * costs.experts_per_token * row
    near = min(size, gpus)  # ranks of the group in one domain, this one included
    domain, network = sent * (near - 1) / size, sent * (size - near) / size
    if deployment.copies_per == "domain" and near < size:
        reached = domains_of_a_token(costs, domains := size / near)
        network = deployment.own_tokens * row * reached * (1 - 1 / domains)
        domain = sent * (near - 1) / near  # what arrives in a domain is passed on there
    # Ranks of a tensor group routed a share of their tokens each, and all of them need all results.
    gathered = deployment.tokens * row * (1 - 1 / deployment.tensor)
    return [
        _transfer("dispatch", domain, network, near, deployment.hardware),
        _transfer("combine", domain + gathered, network, max(near, deployment.tensor), deployment.hardware),
    ]


def domains_of_a_token(costs: Costs, domains: float) -> float:
    """How many domains hold some of the experts that a token is sent to, on average, all choices being equally likely.

    Experts lie in order, so that groups of experts share domains, or a group fills some. Within the chosen groups
    the experts are taken as independent.
    """
    groups, chosen, experts = costs.groups, costs.groups_per_token, costs.experts_per_token
    assert experts is not None
    if groups <= domains:  # each group fills domains / groups domains
        return chosen * (domains / groups) * (1 - (1 - groups / (chosen * domains)) ** experts)
    own = round(groups / domains)  # groups in one domain
    hit = 0.0
    for number in range(1, min(own, chosen) + 1):
        ways = math.comb(own, number) * math.comb(groups - own, chosen - number)
        hit += ways / math.comb(groups, chosen) * (1 - (1 - number / chosen) ** experts)
    return domains * hit


def _reduction(
    name: Literal["combine", "all-reduce"], size: int, costs: Costs, deployment: Deployment
) -> Transfer:
    """A ring all-reduce of one output for each token: every rank sends 2 (size - 1) / size of it."""
    sent = 2 * (size - 1) / size * deployment.tokens * costs.hidden_size * deployment.bytes
    if size <= deployment.hardware.domain.gpus:
        return _transfer(name, sent, 0.0, size, deployment.hardware)
    return _transfer(name, 0.0, sent, 1, deployment.hardware)  # the ring is as fast as its slowest link


def _transfer(
    name: Literal["dispatch", "combine", "all-reduce"],
    domain_bytes: float,
    network_bytes: float,
    near: int,
    hardware: Hardware,
) -> Transfer:
    domain_s = domain_bytes / hardware.domain.bytes_per_s(near) if domain_bytes else 0.0
    network_s = network_bytes / hardware.network.link_bytes_per_s.per_s
    est_us = 1e6 * (max(domain_s, network_s) + hardware.collective_start_s.value)
    return Transfer(name, domain_bytes, network_bytes, est_us)
