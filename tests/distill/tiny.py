"""A tiny DeepSeek-V3 as teacher, a perturbed copy of it as student, and random text."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

VOCABULARY = 61


def teacher_model(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,  # wide enough that the model has an opinion, and a perturbed copy another
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DeepseekV3ForCausalLM(DeepseekV3Config(**fields | overrides)).eval()


def perturbed_copy(teacher: PreTrainedModel, *, noise: float = 0.03, seed: int = 1) -> PreTrainedModel:
    student = copy.deepcopy(teacher)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return student


def windows(count: int = 12, length: int = 16, *, seed: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names whose values are not bitwise equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
