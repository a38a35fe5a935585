"""What must work, and what is right to refuse and why: read from the models' source, not from fxskip's errors."""

import re
from dataclasses import dataclass

MUST_WORK = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "llama4",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "mixtral", "olmoe", "dots1", "ernie4_5_moe",
    "hunyuan_v1_moe", "minimax_m2", "granitemoe", "granitemoeshared", "granitemoehybrid", "phimoe", "jamba",
    "lfm2_moe", "nemotron_h", "kimi_linear", "bailing_hybrid", "exaone_moe", "longcat_flash", "flex_olmo",
)  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """Why something is refused, in words for the page, and what the error must therefore speak of."""

    why: str
    error: str
    """A regular expression."""

    def fits(self, message: str) -> bool:
        return re.search(self.error, message) is not None


_MIXED_STREAMS = Expected(
    "several streams, and a learned matrix mixes them at every block (hyper-connections)",
    "is not the stream plus the output of one sub-block",
)
_DEPTH = Expected(
    "blocks read a stack of the outputs of earlier layers (attention over depth), not one stream",
    "is not the stream plus the output of one sub-block",
)
_ENCODER = Expected("an encoder and a decoder: two streams", "has an encoder and a decoder")
_OWN_MASK = Expected(
    "its sparse attention joins the mask with one of its own, which is not made without values",
    "cannot be captured as one graph",
)

REFUSED: dict[str, Expected] = {
    "deepseek_v4": _MIXED_STREAMS,
    "diffusion_gemma": Expected(
        "an encoder and a decoder that shares its layers' cache", "missing 1 required .*decoder_input_ids"
    ),
    "glm5_next": _MIXED_STREAMS,
    "inkling2": _DEPTH,
    "inkling2_loop": _DEPTH,
    "inkling2_loop_text": _DEPTH,
    "inkling2_text": _DEPTH,
    "minimax": Expected(
        "the residual is taken after the norm: n(x) a + f(n(x)) b",
        "is not the stream plus the output of one sub-block",
    ),
    "nllb-moe": _ENCODER,
    "qwen3_omni_moe": Expected(
        "a container of three models without a forward; rewire its `qwen3_omni_moe_thinker`",
        "is no causal language model",
    ),
    "qwen4_exp": _OWN_MASK,
    "qwen4_exp_text": _OWN_MASK,
    "switch_transformers": _ENCODER,
}

_NORM_OF_THE_SUM = Expected("a norm is taken of the sum of shared and routed experts", "cannot be told apart")
_CONVOLUTION = Expected("a convolution over the sum of shared and routed experts", "cannot be told apart")

WHOLE_WRITES: dict[str, Expected] = {
    "afmoe": _NORM_OF_THE_SUM,
    "axk1": _NORM_OF_THE_SUM,
    "gemma4": _NORM_OF_THE_SUM,
    "gemma4_text": _NORM_OF_THE_SUM,
    "inkling_mm_model": _CONVOLUTION,
    "inkling_text": _CONVOLUTION,
    "kolibri1": _NORM_OF_THE_SUM,
}
"""Where farskip is refused because the routed addend cannot be taken out of the sum, and all@n works."""
