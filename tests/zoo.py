"""Tiny random models of the eight supported types, and batches for them.

Small enough that a test takes a second, and random enough that a wrong wire shows: every weight is drawn wide
(a sub-block writes about as much as the stream already holds) and norm weights, biases and the router's
correction bias are random too, so no two layers or addends are alike.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128
PAD = 0

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
LATENT_HEADS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
# One leading dense layer, then MoE layers with a shared expert that is added without a gate.
DENSE_THEN_MOE: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}
QWEN_MOE: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
LLAMA4: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 64,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 2,  # layers 1, 3, ... have no rotary embedding: two kinds of layer in one model
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT_HEADS | DENSE_THEN_MOE,
    "deepseek_v3": LATENT_HEADS | DENSE_THEN_MOE | {"head_dim": 8},
    "glm4_moe": GROUPED_HEADS | DENSE_THEN_MOE,
    "llama4_text": GROUPED_HEADS | LLAMA4,
    "mixtral": GROUPED_HEADS | {"num_local_experts": 4},
    "olmoe": GROUPED_HEADS | {"num_experts": 4},
    "qwen2_moe": GROUPED_HEADS | QWEN_MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": GROUPED_HEADS | QWEN_MOE,
}
MODEL_TYPES = tuple(FAMILIES)


def tiny(model_type: str, *, layers: int = 3, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of `model_type` in fp32 and eval mode; `overrides` are fields of its config."""
    fields = COMMON | FAMILIES.get(model_type, {}) | {"num_hidden_layers": layers} | overrides
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    randomise(model, seed)
    # A random model meets its end token by chance; the tests compare a fixed number of new tokens.
    model.generation_config.eos_token_id = None
    return model.float().eval()


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter, and the buffers that are saved with them, from one seeded stream.

    What starts as a constant (a norm's weight, a scale, a gate) stays near it, and all else is drawn wide.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = set(model.state_dict())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1.0 + 0.2 * noise)
            elif name.endswith("bias"):
                tensor.copy_(0.1 * noise)
            elif name.endswith("embed_tokens.weight"):
                tensor.copy_(noise)
            elif name in saved and tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(0.2 * noise)
            elif isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(0.15 * noise)


def batch(rows: int = 2, columns: int = 9, *, seed: int = 0, padded: bool = False) -> dict[str, torch.Tensor]:
    """Token ids, mask and labels; `padded` pads row r on the left by r + 1 tokens, with labels to ignore."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (rows, columns), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    if padded:
        padding = torch.arange(columns)[None, :] <= torch.arange(rows)[:, None]
        if bool(padding.all(dim=1).any()):
            raise ValueError(f"batch: row {rows - 1} would be all padding; give more than {columns} columns")
        input_ids[padding] = PAD
        attention_mask[padding] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
