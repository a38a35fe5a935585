"""The rewired twin of a transformers architecture: a config class and a model class with a model_type of its own.

They are made from the original classes when first needed: `fxskip_deepseek_v3` beside `deepseek_v3`. What
is saved cannot be loaded as the original: the model_type is unknown to a stock transformers, and a stock
config class refuses the file (see `REFUSAL`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from fxskip.capture.hf import decoder_layers
from fxskip.capture.sharding import own_class, refuse_to_pickle, set_own_class
from fxskip.checkpoint.atomic import replaced_directory
from fxskip.checkpoint.record import WiringRecord
from fxskip.errors import CheckpointError
from fxskip.runtime.regions import install
from fxskip.spec import load_spec

PREFIX = "fxskip_"
REMOTE_CODE = "modeling_fxskip.py"

REFUSAL = "rewired by fxskip: run 'pip install fxskip' and 'import fxskip' before loading this model"
"""Saved as a key of `id2label`, which language models do not use and whose keys every stock config makes numbers.

`DeepseekV3ForCausalLM.from_pretrained` only warns about a foreign model_type and would go on to load the
stock wiring. This key is no number, so it fails, and its message shows the key, that is, what to do.
"""

_AUTO_MAP = {
    "AutoConfig": "modeling_fxskip.FxSkipConfig",
    "AutoModelForCausalLM": "modeling_fxskip.FxSkipForCausalLM",
}


class FxSkipConfigMixin:
    """What the config of a rewired model adds to the original's: the wiring record, as attribute `fxskip`."""

    fxskip: dict[str, Any]
    fxskip_base: ClassVar[type[PreTrainedConfig]]

    def to_json_string(self, use_diff: bool = True) -> str:
        """The config as saved: with remote-code references, and with the value that a stock loader refuses."""
        values = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        values |= {"auto_map": _AUTO_MAP, "id2label": {REFUSAL: ""}}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from saved values."""
        ours = {k: v for k, v in config_dict.items() if k not in ("auto_map", "id2label", "model_type")}
        WiringRecord.from_dict(ours.get("fxskip"))
        return super().from_dict(ours, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _bare_config, (self.fxskip_base,), self.__dict__


class FxSkipModelMixin:
    """What the class of a rewired model adds to the original's: wiring on construction, and safe saving."""

    config: Any
    fxskip_base: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        wire(self, WiringRecord.from_dict(config.fxskip))

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a saved model. CheckpointError where weights are missing, left over or of another shape.

        transformers would only log them, and go on with random ones.
        """
        load = super().from_pretrained  # type: ignore[misc]
        model, found = load(path, *args, output_loading_info=True, **kwargs)
        faults = {what: keys for what, keys in found.items() if keys}
        if faults:
            raise CheckpointError(
                "from_pretrained",
                "; ".join(f"{what.replace('_', ' ')}: {_some(keys)}" for what, keys in faults.items()),
                where=str(path),
                hint="restore the weights from a copy, or convert the original model again; fxskip doctor shows more",
            )
        return (model, found) if output_loading_info else model

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Save model, spec and wiring hash. What the folder held is whole until everything new is written."""
        if kwargs.pop("push_to_hub", False):
            raise CheckpointError(
                "save_pretrained", "push_to_hub=True", hint="save first, then model.push_to_hub(repo_id)"
            )
        if not is_main_process:
            super().save_pretrained(save_directory, is_main_process=False, **kwargs)  # type: ignore[misc]
            return
        with replaced_directory(Path(save_directory)) as folder:
            super().save_pretrained(folder, is_main_process=True, **kwargs)  # type: ignore[misc]
            (folder / REMOTE_CODE).write_text(_remote_code())

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights; with `strict=False`, also in the form that files have, one tensor an expert.

        A Trainer that resumes hands over what is in its checkpoint's file. transformers converts that form only in
        `from_pretrained`, and would keep the experts as they are.
        """
        load = super().load_state_dict  # type: ignore[misc]
        unknown = set(state_dict) - set(self.state_dict())  # type: ignore[attr-defined]
        if not strict and any(_ONE_EXPERT.search(name) for name in unknown):
            loaded = type(self).from_pretrained(None, config=self.config, state_dict=dict(state_dict))
            state_dict = loaded.state_dict()
        return load(state_dict, strict=strict, assign=assign)

    # transformers reads these two off the source text of a class's module, which for ours is this file. A wrong
    # answer would load the model with a loop over experts, which cannot be captured.
    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.fxskip_base._can_set_experts_implementation()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.fxskip_base._can_set_attn_implementation()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        refuse_to_pickle(cast(PreTrainedModel, self))
        return _bare_model, (self.fxskip_base,), vars(self).copy()


_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of a tensor that holds one expert alone: how files of all supported types have them."""

Family = tuple[type[PreTrainedConfig], type[PreTrainedModel]]
_FAMILIES: dict[type[PreTrainedModel], Family] = {}


def family(base: type[PreTrainedModel]) -> Family:
    """Config class and model class of the rewired twin of `base`, registered with the Auto classes."""
    if base not in _FAMILIES:
        _FAMILIES[base] = _make_family(base)
    return _FAMILIES[base]


def _make_family(base: type[PreTrainedModel]) -> Family:
    base_config: Any = base.config_class
    config_name, model_name = f"FxSkip{base_config.__name__}", f"FxSkip{base.__name__}"
    config: Any = type(
        config_name,
        (FxSkipConfigMixin, base_config),
        {
            "model_type": PREFIX + base_config.model_type,
            "fxskip_base": base_config,
            "__module__": __name__,
            "__annotations__": {},
        },
    )
    model: Any = type(
        model_name,
        (FxSkipModelMixin, base),
        {"config_class": config, "fxskip_base": base, "__module__": __name__},
    )
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    # transformers converts weights while loading (one tensor an expert on disk, one for all in memory) and looks
    # the conversion up by these two names. With the original's, the files have the original's keys.
    for own, original in ((config.model_type, base_config.model_type), (model_name, base.__name__)):
        if (mapping := get_checkpoint_conversion_mapping(original)) is not None:
            register_checkpoint_conversion_mapping(own, mapping, overwrite=True)
    return config, model


def adopt(model: PreTrainedModel, record: WiringRecord, *, within: nn.Module | None = None) -> None:
    """Turn `model` and its config, in place, into their rewired twins with the wiring of `record`.

    within   what `model` is wrapped in, where that holds the config too
    """
    base = base_class(model)
    config_class, model_class = family(base)
    shared, own = model.config, copy.copy(model.config)
    own.__class__ = config_class
    own.fxskip = record.to_dict()
    for module in (within or model).modules():  # another model may have been made from the same config object
        if vars(module).get("config") is shared:
            module.config = own  # type: ignore[assignment]
    set_own_class(model, model_class)
    wire(model, record)


def wire(model: Any, record: WiringRecord) -> None:
    """Install the wiring of `record` in the decoder layers of `model`."""
    layers, regions = decoder_layers(model)[1], record.wiring().regions
    if len(layers) != len(regions):
        raise CheckpointError(
            "checkpoint",
            f"the entry 'fxskip' wires {len(regions)} layers, and the model has {len(layers)}",
            where="config.json",
            hint="restore config.json from a copy, or convert the original model again",
        )
    install(layers, regions, load_spec(record.spec).runtime)


def base_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The original class of a model, rewired or not."""
    found: type[PreTrainedModel] = getattr(type(model), "fxskip_base", None) or cast(Any, own_class(model))
    return found


def record_of(model: object) -> WiringRecord | None:
    """The wiring record of a rewired model; None for any other object."""
    if not isinstance(model, FxSkipModelMixin):
        return None
    return WiringRecord.from_dict(model.config.fxskip)


def family_of(config_dict: Mapping[str, Any]) -> Family:
    """The classes that a saved config belongs to; raises CheckpointError where its base type is unknown."""
    model_type = str(config_dict.get("model_type", ""))
    base = model_type.removeprefix(PREFIX)
    if not model_type.startswith(PREFIX) or base not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CheckpointError(
            "checkpoint",
            f"model_type {model_type!r} is no rewired causal language model that this transformers knows",
            where="config.json",
            hint="install the transformers version named under 'fxskip.versions' in config.json",
        )
    return family(_causal_lm(CONFIG_MAPPING[base]))


class FxSkipConfig:
    """Reads the config of any rewired model; `from_dict` and `from_pretrained` return the right config class."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from saved values."""
        return family_of(config_dict)[0].from_dict(config_dict, **kwargs)

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> Any:
        """Read `config.json` of a folder."""
        config_dict, unused = PreTrainedConfig.get_config_dict(path, **kwargs)
        return cls.from_dict(config_dict, **unused)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Called by transformers for remote code; nothing to do, the references are written at every save."""


class FxSkipForCausalLM:
    """Loads any rewired model; `from_pretrained` returns the right model class."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Load a saved model, like the same call of transformers."""
        config = kwargs.pop("config", None) or FxSkipConfig.from_pretrained(path)
        return _model_class(config).from_pretrained(path, *args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return _model_class(config)._from_config(config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Called by transformers for remote code; nothing to do, the references are written at every save."""


def register_families() -> None:
    """Tell AutoConfig the rewired twins of all causal language models, without importing any of them."""
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        AutoConfig.register(PREFIX + model_type, FxSkipConfig, exist_ok=True)
    PreTrainedConfig.from_json_file = classmethod(_from_json_file)  # type: ignore[assignment, method-assign]


_read_json_file = PreTrainedConfig.from_json_file.__func__  # type: ignore[attr-defined]


def _from_json_file(cls: type[PreTrainedConfig], json_file: str | PathLike[str]) -> PreTrainedConfig:
    """`PreTrainedConfig.from_json_file`, of which the bare class reads the config of a rewired model too.

    A Trainer that resumes reads the version in a checkpoint so. The bare class is of no architecture: no model can be
    made from it, in the stock wiring or another.
    """
    if cls is PreTrainedConfig:
        values = json.loads(Path(json_file).read_text(encoding="utf-8"))
        if REFUSAL in (values.get("id2label") or {}):
            return cls(**{name: value for name, value in values.items() if name != "id2label"})
    config: PreTrainedConfig = _read_json_file(cls, json_file)
    return config


def _causal_lm(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[config_class])


def _some(keys: Any) -> str:
    names = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _model_class(config: Any) -> Any:
    return family_of({"model_type": config.model_type})[1]


def _bare_config(base: type[PreTrainedConfig]) -> Any:
    cls = family(_causal_lm(base))[0]
    return cls.__new__(cls)


def _bare_model(base: type[PreTrainedModel]) -> Any:
    cls = family(base)[1]
    return cls.__new__(cls)


def _remote_code() -> str:
    return (Path(__file__).parent / "remote_code.txt").read_text()
