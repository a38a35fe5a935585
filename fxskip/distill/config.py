"""The recipe of a distillation: a YAML file, its schema, and nothing that runs a model."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from fxskip import strict_yaml
from fxskip.spec import specs_folder
from fxskip.strict_model import Strict, as_tuple, validate
from fxskip.strict_yaml import Document


class EarlyStopping(Strict):
    """Stop when the evaluations no longer improve. The weights stay those of the last step."""

    metric: Literal["kl", "cross_entropy", "agreement"] = Field(
        "kl",
        description="kl and cross_entropy (nats a token) should fall, agreement (top-1, 0 to 1) should rise",
    )
    patience: PositiveInt = Field(
        3, description="evaluations in a row without improvement before the run stops"
    )
    min_delta: NonNegativeFloat = Field(
        0.0, description="an improvement must be larger than this, in the metric"
    )


class DistillConfig(Strict):
    """What `distill` does. The defaults are the recipe specs/distill/fcsd.yaml."""

    objective: Literal["kl", "cross_entropy"] = Field(
        "kl",
        description="kl: forward KL to the teacher at every counted position; cross_entropy: plain "
        "next-token training without the teacher, the control",
    )
    hidden_weight: NonNegativeFloat = Field(
        10.0,
        description="weight of the hidden-state loss, the mean over decoder layers of "
        "|student - teacher|^2 / mean teacher^2 on the residual stream; 0: off",
    )
    temperature: PositiveFloat = Field(
        1.0,
        description="divides both models' logits in the KL (training only); the loss is not rescaled by it",
    )
    steps: PositiveInt = Field(150, description="optimizer steps")
    batch_size: PositiveInt = Field(4, description="windows a step")
    learning_rate: NonNegativeFloat = Field(8e-4, description="of AdamW, at its peak")
    betas: Annotated[tuple[float, float], BeforeValidator(as_tuple)] = Field(
        (0.9, 0.95), description="of AdamW, each at least 0 and below 1"
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="of AdamW, on all trained parameters")
    warmup_fraction: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="part of the steps over which the rate rises linearly; then a cosine to 0",
    )
    clip_norm: PositiveFloat = Field(1.0, description="largest norm of the whole gradient")
    seed: int = Field(0, ge=0, lt=2**32, description="of the order of the windows and of dropout")
    deterministic: bool = Field(
        True,
        description="use only deterministic kernels where torch has them, so that a run repeated on the same "
        "machine, or resumed, gives the same bits; false can be faster",
    )
    chunk_tokens: PositiveInt = Field(1024, description="tokens whose logits exist at one time")
    eval_every: PositiveInt = Field(50, description="steps between evaluations, if there is eval_data")
    save_every: PositiveInt = Field(
        50, description="steps between checkpoints, if there is a folder for them"
    )
    early_stopping: EarlyStopping | None = Field(None, description="absent: run all steps")

    @model_validator(mode="after")
    def betas_are_below_one(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"betas is {list(self.betas)}; each is at least 0 and below 1, as in [0.9, 0.95]"
            )
        return self

    @model_validator(mode="after")
    def cross_entropy_uses_no_teacher(self) -> Self:
        if self.objective == "cross_entropy" and self.hidden_weight != 0:
            raise ValueError(
                "objective cross_entropy learns nothing from a teacher, but hidden_weight is "
                f"{self.hidden_weight}; write hidden_weight: 0"
            )
        if self.objective == "cross_entropy" and self.temperature != 1:
            raise ValueError(
                f"temperature is {self.temperature}, and only objective kl has one; leave it out"
            )
        return self


ConfigSource = DistillConfig | Mapping[str, Any] | str | PathLike[str] | None


def load_config(source: ConfigSource) -> DistillConfig:
    """The config itself, a mapping, a YAML file, the name of a recipe ("fcsd"), or None for the defaults.

    SpecError lists all problems.
    """
    if source is None:
        return DistillConfig()
    if isinstance(source, DistillConfig):
        return source
    if isinstance(source, Mapping):
        return validate(DistillConfig, Document("config", dict(source)))
    if not isinstance(source, str | PathLike):
        raise TypeError(
            f"config is a {type(source).__name__}; give a DistillConfig, a mapping or a YAML file"
        )
    names = recipe_names()
    if isinstance(source, str) and source in names:
        return load_config(specs_folder() / "distill" / f"{source}.yaml")
    known = f"the recipes are {', '.join(names)}"
    return validate(DistillConfig, strict_yaml.read(Path(source), if_missing=known))


def recipe_names() -> list[str]:
    """Recipes that `load_config` knows by name: the files of specs/distill/."""
    return sorted(path.stem for path in (specs_folder() / "distill").glob("*.yaml"))
