"""Every Mixture-of-Experts architecture of the installed transformers, found by program, and a tiny model of each.

One set of field names and small values serves all configs: each takes the fields that it has. `OWN` holds
what an architecture needs beyond that.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo import VOCAB, randomise

HEADS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "IMAGE_TEXT_TO_TEXT": "AutoModelForImageTextToText",
    "MULTIMODAL_LM": "AutoModelForMultimodalLM",
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
}
"""The mappings of transformers that hold language models, in order of preference, and the classes that read them."""

_NEVER_RUNS = ("Llama4ForConditionalGeneration",)
"""Classes whose forward raises whatever it is given: this one reads a field that its output does not have."""

_EXPERTS = re.compile(r"use_experts_implementation|class \w*(Experts|SparseM|MoE|Moe)\w*\(")


def model_class(model_type: str) -> type[PreTrainedModel]:
    """The language model of a type; of several classes the first that takes the type's own config.

    `qwen3_5_moe` has a class for text alone, whose config is `qwen3_5_moe_text`, and one that reads images.
    """
    mappings = (getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS)
    names = [mapping[model_type] for mapping in mappings if model_type in mapping]
    classes = [getattr(transformers, n if isinstance(n, str) else n[0]) for n in names]
    own = CONFIG_MAPPING[model_type]
    return next((c for c in classes if c.config_class is own and c.__name__ not in _NEVER_RUNS), classes[0])


def moe_types() -> tuple[str, ...]:
    """The model types whose language model's source has routed experts, in alphabetical order."""
    types = {t for head in HEADS for t in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")}
    return tuple(sorted(t for t in types if _has_experts(model_class(t))))


def _has_experts(cls: type[PreTrainedModel]) -> bool:
    source = importlib.import_module(cls.__module__).__file__
    assert source is not None
    return _EXPERTS.search(Path(source).read_text()) is not None


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "unpadded_vocab_size": VOCAB, "hidden_size": 64, "d_model": 64,
    "num_attention_heads": 4, "n_heads": 4, "num_key_value_heads": 2, "kv_n_heads": 2, "head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "intermediate_size_mlp": 64,
    "share_expert_dim": 32, "moe_hidden_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "moe_top_k": 2, "top_k_experts": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_heads": 4, "linear_head_dim": 16,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_num_heads": 4, "mamba_head_dim": 32,
    "ssm_state_size": 16, "mamba_n_groups": 1, "n_groups": 1,
    "chunk_size": 8, "mamba_chunk_size": 8, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16,
    "max_position_embeddings": 128, "max_seq_len": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""Field values for a tiny language model, under every name that some config has for them."""

TOWER: dict[str, Any] = {
    "num_hidden_layers": 2, "depth": 2, "encoder_layers": 2,
    "num_heads": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "mlp_dim": 64, "mlp_ratio": 1.0,
    "patch_size": 4, "image_size": 28, "position_embedding_size": 16, "num_position_embeddings": 16,
    "posemb_grid_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "deepstack_visual_indexes": [0],
    "out_hidden_size": 64, "text_hidden_size": 64, "output_dim": 64, "output_proj_dims": 64, "vision_output_dim": 64,
    "projector_input_dim": 64, "projector_output_dim": 64, "projection_hidden_dim": 64,
    "projection_intermediate_size": 64, "adapter_in_dim": 64, "adapter_out_dim": 64, "adapter_input_size": 64,
    "downsample_hidden_size": 8, "subsampling_conv_channels": [8, 8], "feature_size": 16, "num_mel_bins": 16,
    "output_channels": 16, "downsample_channels": [16, 64], "global_attn_indexes": [1],
}  # fmt: skip
"""The same for what reads images and sounds beside the language model. It is built, saved and loaded, never run."""

LATENT: dict[str, Any] = {"num_key_value_heads": 4}
SLIDING: dict[str, Any] = {"sliding_window": 16}
LINEAR_THEN_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LINEAR_THEN_INDEXED: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"]
}
DENSE_THEN_SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse"]}


def mrope(time: int, height: int, width: int) -> dict[str, Any]:
    """Rotary positions of three axes; the sections together are half of the rotated width of a head."""
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [time, height, width],
        }
    }


OWN: dict[str, dict[str, Any]] = {
    "afmoe": SLIDING | {"num_dense_layers": 1},
    "axk1": LATENT | {"head_dim": 8},
    "axk2": LATENT,
    "bailing_hybrid": LINEAR_THEN_FULL | LATENT,
    "beam": SLIDING | DENSE_THEN_SPARSE,
    "cohere2_moe": SLIDING,
    "dbrx": {"n_layers": 3, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": LATENT | DENSE_THEN_SPARSE,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"head_dim": 8},
    "deepseek_v32": LATENT,
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 16},
    "diffusion_gemma_text": SLIDING | {"global_head_dim": 16},
    "doge": {"is_moe": True},
    "dots3_note_text": LATENT | {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "head_dim": 16,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 16,
    },
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, 2]},
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    "ernie4_5_vl_moe_text": mrope(3, 3, 2) | {"moe_intermediate_size": [32, 32]},
    "exaone_moe": SLIDING,
    "flint": {"num_hidden_layers": 3, "mlp_only_layers": [0]},
    "gemma4_text": SLIDING | {
        "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB, "global_head_dim": 16,
    },
    "glm4_moe_lite": LATENT,
    "glm4v_moe_text": mrope(2, 1, 1),
    "glm5_next_text": LATENT | LINEAR_THEN_INDEXED | DENSE_THEN_SPARSE | {"qk_rope_head_dim": 0, "index_kpool": 2},
    "glm_moe_dsa": LATENT,
    "gpt_oss": SLIDING,
    "granitemoe_swa": SLIDING,
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "hy_v4_vl_text": mrope(2, 1, 1),
    "hy_v4_vl_vision": {"max_image_size": 16},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
    "inkling_audio": {"n_mel_bins": 8, "mel_vocab_size": 8},
    "inkling_vision": {"num_hidden_layers": 5},  # with fewer, its layout is computed by scipy
    "jamba": {
        "mamba_d_state": 16, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "kimi_linear": LATENT | LINEAR_THEN_FULL,
    "laguna": SLIDING,
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "full_attention"]},
    "llama4_text": {"num_experts_per_tok": 1, "moe_layers": None, "interleave_moe_layer_step": 1},
    "longcat_flash": LATENT | {"num_layers": 2, "zero_expert_num": 2, "head_dim": 8},
    "mellum": SLIDING,
    "mimo_v2_flash": SLIDING,
    "minimax_m2": {"rotary_dim": 16},
    "minimax_m3_vl": {"projector_hidden_size": 64, "merged_hidden_size": 64},
    "mistral4": LATENT,
    "mistral_large4_text": LATENT,
    "muse_spark": {"out_hidden_size": 64, "projector_hidden_size": 64},
    "muse_spark_audio": {"patch_sizes": [2, 2], "hidden_sizes": [16, 64], "depths": [1, 1]},
    "muse_spark_text": SLIDING,
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "qwen3_5_moe_text": LINEAR_THEN_FULL,
    "nllb-moe": {
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_sparse_step": 2, "decoder_sparse_step": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    },
    "qwen3_omni_moe": {"enable_audio_output": False},  # the default config of the speaking half builds no model
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 5},  # generate asks for it, and the default config has none
    "qwen3_next": LINEAR_THEN_FULL,
    "qwen4_exp_text": LINEAR_THEN_INDEXED | {
        "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "sarvam_mla": LATENT | {"head_dim": 8},
    "step3p5": SLIDING | DENSE_THEN_SPARSE,
    "switch_transformers": {
        "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

_LAYERS_DIFFER = {
    "first_k_dense_replace", "num_dense_layers", "mlp_layer_types", "moe_layer_start_index", "expert_layer_period",
    "layers_block_type",
}  # fmt: skip
"""Fields of configs with layers of several kinds. They get three layers, the others two: a MoE, and what follows."""
_LISTS_LAYERS_OTHERWISE = ("longcat_flash", "nemotron_h")
"""Architectures whose number of layers follows from another field."""


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A config of `model_type` with two or three layers of width 64; `overrides` are fields of its (text) config."""
    fields = _fields_for(AutoConfig.for_model(model_type))
    fields.get("text_config", fields).update(overrides)
    return AutoConfig.for_model(model_type, **fields)


def _fields_for(default: PreTrainedConfig, part: str = "") -> dict[str, Any]:
    """The tiny values for the fields that a config of this class has, those of its parts as nested mappings."""
    known = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    own = OWN.get(default.model_type, {})
    layers = 3 if _LAYERS_DIFFER & known or any(name.endswith("layer_types") for name in own) else 2
    table = COMMON | TOWER if part and part != "text_config" else COMMON | {"num_hidden_layers": layers}
    fields = {name: value for name, value in table.items() if name in known}
    if default.model_type in _LISTS_LAYERS_OTHERWISE:
        fields.pop("num_hidden_layers", None)
    for name, cls in default.sub_configs.items():
        config = getattr(default, name)
        if config is None:  # a default model lacks this tower
            config = cls()
        fields[name] = _fields_for(config, name)
        if cls is AutoConfig:
            fields[name]["model_type"] = config.model_type
    return fields | own


def tiny(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of `model_type` in fp32 and eval mode."""
    cls = model_class(model_type)
    _shorten_chunks(sys.modules[cls.__module__])
    torch.manual_seed(seed)
    config = tiny_config(model_type, **overrides)
    if cls.config_class is type(config.get_text_config()):  # as the Auto classes do
        config = config.get_text_config()
    model: PreTrainedModel = cls._from_config(config)
    randomise(model, seed)
    model.generation_config.eos_token_id = None
    return model.float().eval()


def _shorten_chunks(module: ModuleType) -> None:
    """Linear attention unrolls a loop over the positions of a chunk, 64 by default: with 8, capture takes seconds.

    The defaults of the module's functions are changed for good, so that saved models load as the same function.
    """
    for function in vars(module).values():
        plain = inspect.unwrap(function) if inspect.isfunction(function) else None
        if plain is not None and plain.__defaults__ and "chunk_size" in inspect.signature(plain).parameters:
            plain.__defaults__ = tuple(8 if value == 64 else value for value in plain.__defaults__)


def auto_class(model_type: str) -> Any:
    """The Auto class of transformers that makes the language model of a type."""
    name = model_class(model_type).__name__
    for head in HEADS:
        found = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").get(model_type, ())
        if name in ((found,) if isinstance(found, str) else found):
            return getattr(transformers, HEADS[head])
    raise LookupError(f"no Auto class makes {name}")
