"""Every Mixture-of-Experts architecture of the installed transformers, found by program, and a tiny model of each.

One set of field names and small values serves all configs: each takes the fields that it has. `OWN` holds
what an architecture needs beyond that.
"""

import importlib
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.zoo import VOCAB, randomise

HEADS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
"""The kinds of language models of transformers' Auto classes, the first that an architecture has is taken."""

_EXPERTS = re.compile(r"use_experts_implementation|class \w*(Experts|SparseM|MoE|Moe|Router|CDMoE)\w*\(")


def language_model_classes() -> dict[str, str]:
    """Class name of the language model of every model type, of experts or not."""
    found: dict[str, str] = {}
    for head in HEADS:
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return found


def moe_types() -> tuple[str, ...]:
    """The model types whose language model's source has routed experts, in alphabetical order."""
    return tuple(sorted(t for t, name in language_model_classes().items() if _has_experts(name)))


def _has_experts(class_name: str) -> bool:
    module = getattr(transformers, class_name).__module__
    source = importlib.import_module(module).__file__
    assert source is not None
    return _EXPERTS.search(Path(source).read_text()) is not None


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "intermediate_size_mlp": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_num_heads": 4, "mamba_head_dim": 32,
    "ssm_state_size": 16, "mamba_n_groups": 1, "n_groups": 1,
    "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""Field values for a tiny model, under every name that some config has for them."""

LATENT: dict[str, Any] = {"num_key_value_heads": 4}
SLIDING: dict[str, Any] = {"sliding_window": 16}
LINEAR_THEN_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}

OWN: dict[str, dict[str, Any]] = {
    "afmoe": SLIDING | {"num_dense_layers": 1},
    "axk1": LATENT | {"head_dim": 8},
    "axk2": LATENT,
    "cohere2_moe": SLIDING,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"head_dim": 8},
    "deepseek_v32": LATENT,
    "dots3_note_text": LATENT,
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    "exaone_moe": SLIDING,
    "gemma4_text": SLIDING | {
        "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB, "global_head_dim": 16,
    },
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_oss": SLIDING,
    "granitemoe_swa": SLIDING,
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {
        "mamba_d_state": 16, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "laguna": SLIDING,
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "full_attention"]},
    "llama4_text": {"num_experts_per_tok": 1, "moe_layers": None, "interleave_moe_layer_step": 1},
    "longcat_flash": LATENT | {"num_layers": 2, "zero_expert_num": 2, "head_dim": 8},
    "mellum": SLIDING,
    "mimo_v2_flash": SLIDING,
    "minimax_m2": {"rotary_dim": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "qwen3_5_moe_text": LINEAR_THEN_FULL,
    "qwen3_next": LINEAR_THEN_FULL,
    "sarvam_mla": LATENT | {"head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

LAYERS = 3
_LISTS_LAYERS_OTHERWISE = ("longcat_flash", "nemotron_h")
"""Architectures whose number of layers follows from another field."""


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A config of `model_type` with three layers of width 64; `overrides` are fields of its (text) config."""
    default = AutoConfig.for_model(model_type)
    parts = {
        name: _fields_for(part()) for name, part in default.sub_configs.items() if isinstance(part, type)
    }
    fields = _fields_for(default) | parts
    target = parts.get("text_config", fields)
    target.update(overrides)
    return AutoConfig.for_model(model_type, **fields)


def _fields_for(default: PreTrainedConfig) -> dict[str, Any]:
    known = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    fields = {name: value for name, value in COMMON.items() if name in known}
    if "num_hidden_layers" in known and default.model_type not in _LISTS_LAYERS_OTHERWISE:
        fields["num_hidden_layers"] = LAYERS
    return fields | OWN.get(default.model_type, {})


def tiny(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of `model_type` in fp32 and eval mode."""
    cls = getattr(transformers, language_model_classes()[model_type])
    torch.manual_seed(seed)
    model: PreTrainedModel = cls._from_config(tiny_config(model_type, **overrides))
    randomise(model, seed)
    model.generation_config.eos_token_id = None
    return model.float().eval()
