"""What `fxskip bench overlap` measures: a decoder of DeepSeek-V2-Lite's shapes, stock and FarSkip, on two ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

import fxskip
from fxskip.bench.mirror import HOST_COPIES
from fxskip.collectives.expert_parallel import local
from fxskip.tracing.runs import Stepper
from fxskip.transport import Asked

RANKS = 2
Wiring = Literal["stock", "stock, split weights", "farskip"]
Link = Literal["default", "NCCL_P2P_DISABLE=1", "host memory, one GPU"]
DEFAULT: Link = "default"
"""Between the ranks: that of the machine."""
SLOW: Link = "NCCL_P2P_DISABLE=1"
"""Through the host's memory, a stand-in for a link between hosts."""
MIRROR: Link = "host memory, one GPU"
"""One process and its mirror image (`fxskip.bench.mirror`)."""
WIRINGS: dict[Wiring, dict[str, Any]] = {
    "stock": {"preset": "identity"},
    "stock, split weights": {"preset": "identity", "schedule": {"backward": "explicit"}},
    "farskip": {"preset": "farskip"},
}
"""The original's connections as they are, the same with weight gradients under the reverse exchanges, and FarSkip's."""

# huggingface.co/deepseek-ai/DeepSeek-V2-Lite, config.json; but the vocabulary, for there is no head.
LITE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    "norm_topk_prob": False, "vocab_size": 256, "max_position_embeddings": 163840,
}  # fmt: skip
TINY: dict[str, Any] = LITE | {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What is measured in one set of processes."""

    layers: int
    micro_batch: int
    """Sequences of each rank in a step."""
    tokens: int
    """Of a sequence."""
    rounds: int
    traced_steps: int
    """Under the profiler, of each variant; on a CPU those that are watched."""
    link: Link
    measured_costs: bool
    """Orders are chosen by costs that are measured first, not by the roofline."""
    is_tiny: bool
    transport: Asked = "auto"
    """What moves rows between experts, as a spec says it."""
    choices: int | None = None
    """Experts of a token, None for the model's: rows that travel, and what is computed of them, are in proportion."""

    @property
    def environment(self) -> dict[str, str]:
        return {"NCCL_P2P_DISABLE": "1"} if self.link == SLOW else {}

    @property
    def is_mirrored(self) -> bool:
        """One process, whose other ranks are its mirror images."""
        return self.link == MIRROR

    def mesh(self) -> DeviceMesh:
        """Of the default process group."""
        return init_device_mesh(device_here().type, (RANKS,), mesh_dim_names=("expert",))

    def config(self) -> PreTrainedConfig:
        """Of the model."""
        shapes = TINY if self.is_tiny else LITE
        if self.choices is not None:
            shapes = shapes | {"num_experts_per_tok": self.choices}
        return AutoConfig.for_model("deepseek_v2", num_hidden_layers=self.layers, **shapes)


def ways_to_send(
    *, mirror: bool, slow_link: bool, copy_engine: bool, measured_transport: bool
) -> list[tuple[Link, Asked]]:
    """The links and transports that are asked for: a mirror image by itself, or what `auto` is and more beside it."""
    if mirror:  # copies, which a CPU does not have
        return [(MIRROR, "copy_engine" if torch.cuda.device_count() else "auto")]
    more: list[tuple[bool, Link, Asked]] = [
        (slow_link, SLOW, "auto"),
        (copy_engine, DEFAULT, "copy_engine"),
        (measured_transport, DEFAULT, "measured"),
    ]
    return [(DEFAULT, "auto"), *((link, transport) for asked, link, transport in more if asked)]


def device_here() -> torch.device:
    """The GPU of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def original(setting: Setting) -> Any:
    """The model with random weights, the same on every rank: bfloat16 on a GPU, float32 elsewhere."""
    device = device_here()
    torch.manual_seed(0)
    with device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return AutoModelForCausalLM.from_config(setting.config(), dtype=dtype).train()


def student(setting: Setting, wiring: Wiring, costs: Path | None = None) -> Any:
    """Rewired, and spread over two ranks.

    costs   a table of measured costs; by default those of the roofline
    """
    how = WIRINGS[wiring]
    spec: dict[str, Any] = {
        "fxskip": 1,
        **how,
        "parallel": {"expert": {"size": RANKS}},
        "schedule": how.get("schedule", {}) | {"costs": "roofline" if costs is None else str(costs)},
        "runtime": {"transport": setting.transport},
    }
    return fxskip.transform(original(setting), spec, inplace=True, mesh=setting.mesh())


def stepper(setting: Setting, model: Any, *, rank: int, together: bool) -> Stepper:
    """Steps of the decoder without its head, on random tokens, with a random gradient of what it returns."""
    device = device_here()
    generator = torch.Generator().manual_seed(1 + rank)
    size = (setting.micro_batch, setting.tokens)
    ids = torch.randint(model.config.vocab_size, size, generator=generator).to(device)
    dtype = next(model.parameters()).dtype
    gradient = torch.randn(*size, model.config.hidden_size, generator=generator).to(device, dtype)
    batch = {"input_ids": ids, "use_cache": False}
    exchanges = HOST_COPIES if setting.is_mirrored else ()
    return Stepper(model.model, batch, device, True, together, gradient / gradient.numel(), exchanges)


def zero(steppers: Iterable[Stepper]) -> None:
    """Make all data zero, in place: power and clock then do not depend on what is computed."""
    with torch.no_grad():
        for one in steppers:
            for parameter in one.model.parameters():
                local(parameter).zero_()
            if one.gradient is not None:
                one.gradient.zero_()


def share_weights(one: nn.Module, other: nn.Module) -> None:
    """Have two models of one structure lie in the same memory."""
    for (name, mine), (theirs, given) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert name == theirs
        held: Tensor = given.data
        mine.data = held
