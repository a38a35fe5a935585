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


REFUSED: dict[str, Expected] = {}

WHOLE_WRITES: dict[str, Expected] = {}
