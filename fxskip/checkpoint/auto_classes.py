"""Which class of transformers is the language model of a config, and which Auto classes load it."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from fxskip.errors import CheckpointError

_AUTO_CLASSES: dict[str, Any] = {
    "CAUSAL_LM": AutoModelForCausalLM,
    "IMAGE_TEXT_TO_TEXT": AutoModelForImageTextToText,
    "MULTIMODAL_LM": AutoModelForMultimodalLM,
}
"""Auto classes whose models have a decoder with a language-model head, by transformers' name of their mapping."""


def known_types() -> frozenset[str]:
    """The model types that some of the Auto classes load."""
    names = (getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in _AUTO_CLASSES)
    return frozenset(model_type for mapping in names for model_type in mapping)


def language_model(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """The language model of a config class: of several the first that takes this very config.

    A config of text and images can have two, a model of text alone (which takes the text part of the config) and
    one of all. Raises KeyError for a config class that has none.
    """
    found = [mapping[config_class] for mapping in _mappings().values() if config_class in mapping]
    models: list[type[PreTrainedModel]] = [m[0] if isinstance(m, tuple) else m for m in found]
    if not models:
        raise KeyError(config_class.__name__)
    return next((m for m in models if m.config_class is config_class), models[0])


def auto_classes(config_class: type[PreTrainedConfig]) -> tuple[Any, ...]:
    """The Auto classes that make `language_model(config_class)`; none for a class that they do not know."""
    if all(config_class not in mapping for mapping in _mappings().values()):
        return ()
    model = language_model(config_class)
    return tuple(
        _AUTO_CLASSES[head]
        for head, mapping in _mappings().items()
        if config_class in mapping and mapping[config_class] in (model, (model,))
    )


def loader(who: str, config: PreTrainedConfig) -> Any:
    """The Auto class that a user would load a model of this config with; one of text alone comes first.

    Raises CheckpointError, in the name of `who`, for a config that none of them knows.
    """
    for head, mapping in _mappings().items():
        if type(config) in mapping:
            return _AUTO_CLASSES[head]
    raise CheckpointError(
        who,
        f"{type(config).__name__} is the config of no decoder-only language model of transformers",
        hint=f"one of {', '.join(each.__name__ for each in _AUTO_CLASSES.values())} must know it",
    )


def _mappings() -> dict[str, Any]:
    return {head: getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING") for head in _AUTO_CLASSES}
