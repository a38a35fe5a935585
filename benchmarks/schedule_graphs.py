"""Task graphs of DeepSeek-V2-Lite's decoder for the scheduler's benchmark, with stock and with FarSkip wiring.

One dense layer, then Mixture-of-Experts layers, as many as asked for; expert parallelism with an all-to-all before and
after the routed experts. The final `x' = (r + shared) + routed` is written in that order, as with `sum: split`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxskip.schedule.costs import Costs, Part
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.roofline import Deployment, transfers, work
from fxskip.schedule.tasks import COMPUTE, Crossing, Task, TaskGraph, WorkKind

# Hidden width; heads, their q/k and v widths; kv latent with its rotary part; MLP widths.
D, HEADS, QK, V, LATENT, DENSE, EXPERT, EXPERTS, CHOSEN, SHARED = (
    2048,
    16,
    192,
    128,
    576,
    10944,
    1408,
    64,
    6,
    2,
)
TOKENS, CONTEXT, RANKS = 8192, 4096, 8

COLLECTIVES = ("dispatch", "combine")
SHORT = (
    "attn_norm",
    "attn_add",
    "moe_norm",
    "permute",
    "shared_act",
    "shared_add",
    "unpermute",
    "routed_add",
    "mlp_add",
)
WEIGHTS = ("qkv", "o_proj", "gate", "experts", "shared_up", "shared_down", "mlp")


def roofline_costs() -> dict[str, float]:
    """Microseconds of each role on one of `RANKS` H200s, by the estimates that `fxskip plan` makes.

    Elementwise work, which a plan takes as fused, is the memory that it moves.
    """
    deployment = Deployment(load_hardware("h200"), "bfloat16", TOKENS, CONTEXT, RANKS, "all_to_all", 1)

    def product(
        rows: int, columns: int, times: float = 1.0, kernels: int = 1
    ) -> tuple[int, float, float, int]:
        return rows * columns, 2.0 * rows * columns * times, times * (rows + columns), kernels

    def moved(elements: float) -> tuple[int, float, float, int]:
        return 0, 0.0, elements, 1

    sizes = {
        "attn_norm": moved(2 * D),
        "qkv": product(D, HEADS * QK + LATENT + 512 * HEADS * (QK - 64 + V) // D, kernels=4),
        "core": (0, 2.0 * HEADS * (QK + V) * CONTEXT / 2, HEADS * (2.0 * QK + 2 * V), 1),
        "o_proj": product(HEADS * V, D),
        "attn_add": moved(3 * D),
        "moe_norm": moved(2 * D),
        "gate": product(D, EXPERTS),
        "permute": moved(CHOSEN * 2 * D),
        "shared_up": product(D, 2 * SHARED * EXPERT),
        "shared_act": moved(3 * SHARED * EXPERT),
        "shared_down": product(SHARED * EXPERT, D),
        "shared_add": moved(3 * D),
        "unpermute": moved(CHOSEN * D + D),
        "routed_add": moved(3 * D),
        "mlp": product(D, 3 * DENSE, kernels=3),
        "mlp_add": moved(3 * D),
    }
    routed = Part(
        "routed", 3 * EXPERTS * D * EXPERT, 6.0 * CHOSEN * D * EXPERT, CHOSEN * 3.0 * (D + EXPERT), 3
    )
    moe = Costs((routed,), D, EXPERTS, CHOSEN)
    costs = {role: _us(Costs((Part(role, *size),), D), deployment) for role, size in sizes.items()}
    costs |= {one.name: one.est_us or 0.0 for one in transfers("moe", moe, deployment)}
    return costs | {"experts": _us(moe, deployment)}


def _us(costs: Costs, deployment: Deployment) -> float:
    us = work(costs, deployment)[0].est_us
    assert us is not None
    return us


INVENTED = {
    "attn_norm": 10.0, "qkv": 90.0, "core": 170.0, "o_proj": 30.0, "attn_add": 5.0, "moe_norm": 5.0, "gate": 10.0,
    "permute": 5.0, "dispatch": 150.0, "experts": 300.0, "combine": 150.0, "shared_up": 50.0, "shared_act": 5.0,
    "shared_down": 25.0, "shared_add": 5.0, "unpermute": 5.0, "routed_add": 5.0, "mlp": 300.0, "mlp_add": 5.0,
}  # fmt: skip
"""Made up, near the proportions of the first study of overlap: attention 3, experts 3, shared 0.8, exchanges 1.5."""


@dataclass
class _Builder:
    costs: Mapping[str, float]
    tasks: list[Task] = field(default_factory=list)
    needs: dict[str, list[str]] = field(default_factory=dict)

    def add(self, layer: int, role: str, *reads: str | None, may_cross: Crossing = "") -> str:
        """One task; a read of None is the embedding. Returns the task's name."""
        name = f"layers.{layer}.{role}"
        is_collective = role in COLLECTIVES
        kind: WorkKind = "elementwise" if role in SHORT else "attention" if role == "core" else "matrix"
        self.tasks.append(
            Task(
                name,
                "expert" if is_collective else COMPUTE,
                self.costs[role],
                layer=layer,
                role=role,
                phase="forward",
                bytes_in_flight=TOKENS * CHOSEN * D * 2 if is_collective else 0,
                kernel="short" if role in SHORT else "long",
                work=kind,
                has_weights=role in WEIGHTS,
                may_cross=may_cross,
            )
        )
        self.needs[name] = [read for read in dict.fromkeys(reads) if read is not None]
        return name


def decoder(costs: Mapping[str, float], *, layers: int, farskip: bool) -> TaskGraph:
    """The forward of `layers` decoder layers, the first of them dense."""
    build = _Builder(costs)
    full: str | None = None
    partial: str | None = None  # the stream without the last routed output; attention reads it under FarSkip
    for layer in range(layers):
        # Under FarSkip an MLP reads the stream as it was before its layer's attention.
        before = full
        norm = build.add(layer, "attn_norm", partial if farskip else full)
        core = build.add(layer, "core", build.add(layer, "qkv", norm))
        after = build.add(layer, "attn_add", full, build.add(layer, "o_proj", core))
        seen = before if farskip else after
        if layer == 0:
            mlp = build.add(layer, "mlp", seen)
            full = partial = build.add(layer, "mlp_add", mlp, after)
        else:
            partial, full = _experts(build, layer, seen, after)
    return TaskGraph(build.tasks, build.needs)


def _experts(build: _Builder, layer: int, seen: str | None, after: str) -> tuple[str, str]:
    """A Mixture-of-Experts sub-block; the stream without and with its routed output."""
    norm = build.add(layer, "moe_norm", seen)
    gate = build.add(layer, "gate", norm)
    rows = build.add(layer, "permute", gate, norm)
    dispatch = build.add(layer, "dispatch", rows)
    hidden = build.add(layer, "shared_act", build.add(layer, "shared_up", norm))
    partial = build.add(layer, "shared_add", after, build.add(layer, "shared_down", hidden))
    combine = build.add(layer, "combine", build.add(layer, "experts", dispatch))
    routed = build.add(layer, "unpermute", combine, gate, may_cross="next")
    return partial, build.add(layer, "routed_add", partial, routed, may_cross="next")
