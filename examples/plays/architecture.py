"""The shape of the bundled model: DeepSeek-V3 in small, 6.5 million parameters, 13 MB in bf16."""

from __future__ import annotations

from transformers import DeepseekV3Config, PreTrainedTokenizerBase


def plays_config(tokenizer: PreTrainedTokenizerBase) -> DeepseekV3Config:
    """One dense and five MoE layers, 16 routed experts of which a token takes 4, one shared expert, MLA."""
    return DeepseekV3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        num_hidden_layers=6,
        first_k_dense_replace=1,
        intermediate_size=512,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        moe_intermediate_size=96,
        # One group: limiting a token to some groups only matters when groups are machines.
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.0,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # No extra layers that predict the token after next: this model is not for speculative decoding.
        num_mtp_layers=0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
