"""What the index work of routed experts costs, forward and backward, on one device.

    python benchmarks/routing.py --out benchmarks/results/routing.json [--tokens 8192] [--width 2048] [--experts 64]
        [--choices 6] [--inner 1408] [--repeats 30]

Three forms of the same layer of experts, on the same weights, with the numbers of rows that a rank of several has:

    balanced   no index work: each expert gets the same number of rows, which lie in its order already
    kernels    top-k routing of random tokens: `fxskip.collectives.routing` as it runs on CUDA, products called directly
    torch      the same by PyTorch, and the experts as a module that sorts its rows itself

A sample is one forward and backward; forms take turns, so that a device that slows down slows all. `device_ms` is by
events on the device, `host_ms` how long the host was busy with a sample that it began with an idle device: where it is
near `device_ms`, the host is what limits. `parts` has each operation alone, forward. On a CPU there are no kernels, and
both figures are those of the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import ROOT, provenance
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

sys.path.insert(0, str(ROOT))

from fxskip.collectives.expert_parallel import Routing, run_own_experts
from fxskip.collectives.grouped_experts import grouped_experts
from fxskip.collectives.routing import expert_of_each_row, implementation, permute, sort_pairs, unpermute
from fxskip.leaves import running

Form = Callable[[], Any]


class Layer(nn.Module):
    """A decoder layer as far as experts need one."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        config = AutoConfig.for_model(
            "deepseek_v2",
            hidden_size=sizes.width,
            moe_intermediate_size=sizes.inner,
            n_routed_experts=sizes.experts,
        )
        config.num_experts = sizes.experts
        config._experts_implementation = "grouped_mm"
        self.experts = DeepseekV2Experts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.02)


class Sample:
    """Tokens with their routing, and the three forms."""

    def __init__(self, sizes: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16
        self.sizes, self.layer = sizes, Layer(sizes).to(device, dtype)
        with torch.device(device):
            self.hidden = torch.randn(sizes.tokens, sizes.width, dtype=dtype, requires_grad=True)
            scores = torch.randn(sizes.tokens, sizes.experts).softmax(-1)
            weights, self.index = scores.topk(sizes.choices)
            self.weights = weights.requires_grad_()
            self.gradient = torch.randn_like(self.hidden)
            each = sizes.tokens * sizes.choices // sizes.experts
            self.ends = torch.arange(1, sizes.experts + 1, dtype=torch.int32) * each
        self.inputs = [self.hidden, self.weights, *self.layer.parameters()]

    def balanced(self) -> Tensor:
        tokens, choices = self.index.shape
        rows = self.hidden.unsqueeze(1).expand(-1, choices, -1).flatten(0, 1)
        made = grouped_experts(
            self.layer.experts, dict(self.layer.experts.named_parameters()), rows, self.ends
        )
        weighed = made.view(tokens, choices, -1) * self.weights.unsqueeze(-1)
        return weighed.sum(1).to(self.hidden.dtype)

    def by_kernels(self) -> Tensor:
        with implementation("triton" if self.hidden.is_cuda else "auto"), running(self.layer):
            found = sort_pairs(self.index, self.sizes.experts)
            rows = permute(self.hidden, found.order)
            made = run_own_experts("experts", rows, self.routing(found.counts))
            return unpermute(made, found.order, self.weights, self.hidden.dtype)

    def by_torch(self) -> Tensor:
        with implementation("torch"):
            found = sort_pairs(self.index, self.sizes.experts)
            rows = permute(self.hidden, found.order)
            experts = expert_of_each_row(found.counts.unsqueeze(0), len(rows))
            made = self.layer.experts(rows, experts.unsqueeze(-1), rows.new_ones(len(rows), 1))
            return unpermute(made, found.order, self.weights, self.hidden.dtype)

    def routing(self, counts: Tensor) -> Routing:
        """As if one rank had sent it all: the host knows the number of rows, the device their experts."""
        rows = (self.index.numel(),)
        return Routing(rows, rows, counts.unsqueeze(0), None)

    def forms(self) -> dict[str, Form]:
        return {"balanced": self.balanced, "kernels": self.by_kernels, "torch": self.by_torch}

    def parts(self) -> dict[str, Form]:
        """Operations alone, forward, as the device has them."""
        with torch.no_grad():
            found = sort_pairs(self.index, self.sizes.experts)
            rows = permute(self.hidden, found.order)
        routing = self.routing(found.counts)
        return {
            "sort_pairs": lambda: sort_pairs(self.index, self.sizes.experts),
            "permute": lambda: permute(self.hidden, found.order),
            "by_own_expert": lambda: routing.by_own_expert(self.sizes.experts),
            "run_own_experts": lambda: run_own_experts("experts", rows, routing),
            "unpermute": lambda: unpermute(rows, found.order, self.weights, self.hidden.dtype),
        }


def step(form: Form, sample: Sample) -> None:
    torch.autograd.grad(form(), sample.inputs, sample.gradient)


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Milliseconds of the device and of the host."""
    if device.type != "cuda":
        begun = time.perf_counter()
        work()
        return (1e3 * (time.perf_counter() - begun),) * 2
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    begin.record()
    work()
    end.record()
    host = 1e3 * (time.perf_counter() - begun)
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host


def measured(works: dict[str, Form], repeats: int, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Raw samples of each work; two rounds before the first are not kept, for they compile."""
    found: dict[str, dict[str, list[float]]] = {name: {"device_ms": [], "host_ms": []} for name in works}
    for round_ in range(-2, repeats):
        for name, work in works.items():
            times = timed(work, device)
            if round_ >= 0:
                for kind, ms in zip(found[name], times, strict=True):
                    found[name][kind].append(ms)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    defaults = {"tokens": 8192, "width": 2048, "experts": 64, "choices": 6, "inner": 1408, "repeats": 30}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = parser.parse_args()
    if sizes.tokens * sizes.choices % sizes.experts:
        parser.error("balanced rows need tokens x choices to be a multiple of experts")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sample = Sample(sizes, device)
    steps: dict[str, Form] = {
        name: lambda form=form: step(form, sample)  # type: ignore[misc]
        for name, form in sample.forms().items()
    }
    with torch.no_grad(), running(sample.layer):
        parts = measured(sample.parts(), sizes.repeats, device)
    found = {
        "about": provenance(),
        "sizes": {name: getattr(sizes, name) for name in defaults},
        "steps": measured(steps, sizes.repeats, device),
        "parts": parts,
    }
    sizes.out.parent.mkdir(parents=True, exist_ok=True)
    sizes.out.write_text(json.dumps(found, indent=1) + "\n")
    for kind in ("steps", "parts"):
        for name, samples in found[kind].items():
            print(name, *(f"{k} {statistics.median(v):.3f}" for k, v in samples.items()), sep="  ")


if __name__ == "__main__":
    main()
