"""The rewired twin of a transformers architecture: a config class and a model class with a model_type of its own.

They are made from the original classes when first needed: `fxskip_deepseek_v3` beside `deepseek_v3`. What
is saved cannot be loaded as the original: the model_type is unknown to a stock transformers, and a stock
config class refuses the file (see `REFUSAL`).
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fxskip.capture.hf import layers_by_path
from fxskip.checkpoint.atomic import replaced_directory
from fxskip.checkpoint.auto_classes import auto_classes, known_types, language_model
from fxskip.checkpoint.plain import keep_record, plain_record
from fxskip.checkpoint.program import program_record
from fxskip.checkpoint.record import WiringRecord
from fxskip.checkpoint.spread import is_spread, own_parts, whole_state_dict
from fxskip.errors import CheckpointError, PassError
from fxskip.runtime.decoder import keep_eager
from fxskip.runtime.regions import install
from fxskip.sharding import own_class, refuse_to_pickle, set_own_class
from fxskip.spec import Spec, load_spec

PREFIX = "fxskip_"
REMOTE_CODE = "modeling_fxskip.py"

REFUSAL = "rewired by fxskip: run 'pip install fxskip' and 'import fxskip' before loading this model"
"""Saved as a key of `id2label`, which language models do not use and whose keys every stock config makes numbers.

`DeepseekV3ForCausalLM.from_pretrained` only warns about a foreign model_type and would go on to load the
stock wiring. This key is no number, so it fails, and its message shows the key, that is, what to do.
The text part of a config of text and images has it too: a model of text alone reads that part only.
"""


class FxSkipConfigMixin:
    """What the config of a rewired model adds to the original's: the wiring record, as attribute `fxskip`."""

    fxskip: dict[str, Any]
    fxskip_base: ClassVar[type[PreTrainedConfig]]

    def to_json_string(self, use_diff: bool = True) -> str:
        """The config as saved: with remote-code references, and with the value that a stock loader refuses."""
        values = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        values |= {"auto_map": _auto_map(self.fxskip_base), "id2label": {REFUSAL: ""}}
        if (part := text_part(cast(PreTrainedConfig, self))) is not None:
            values.setdefault(part, {})["id2label"] = {REFUSAL: ""}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from saved values."""
        ours = {k: v for k, v in config_dict.items() if k not in ("auto_map", "id2label", "model_type")}
        for name in cls.fxskip_base.sub_configs:
            if isinstance(part := ours.get(name), dict):
                ours[name] = {k: v for k, v in part.items() if k != "id2label" or v != {REFUSAL: ""}}
        WiringRecord.from_dict(ours.get("fxskip"))
        return super().from_dict(ours, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _bare_config, (self.fxskip_base,), self.__dict__


class FxSkipModelMixin:
    """What the class of a rewired model adds to the original's: wiring on construction, and safe saving."""

    config: Any
    config_class: ClassVar[Any]
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
        """Save model, spec and wiring hash. What the folder held is whole until everything new is written.

        Of a model that is spread over processes all must call it, for all take part in gathering; not so where the
        whole weights are given as `state_dict`: then those that call with `is_main_process` write, as ever.
        """
        if kwargs.pop("push_to_hub", False):
            raise CheckpointError(
                "save_pretrained", "push_to_hub=True", hint="save first, then model.push_to_hub(repo_id)"
            )
        self._require_loadable()
        if kwargs.get("state_dict") is None and is_spread(cast(nn.Module, self)):
            kwargs["state_dict"] = whole_state_dict(cast(nn.Module, self))
            # One writes, and none goes on before the folder is complete.
            if dist.get_rank() == 0:
                self._save(Path(save_directory), **kwargs)
            dist.barrier()
            return
        if not is_main_process:
            super().save_pretrained(save_directory, is_main_process=False, **kwargs)  # type: ignore[misc]
            return
        self._save(Path(save_directory), **kwargs)

    def _save(self, save_directory: Path, **kwargs: Any) -> None:
        with replaced_directory(save_directory) as folder:
            super().save_pretrained(folder, is_main_process=True, **kwargs)  # type: ignore[misc]
            (folder / REMOTE_CODE).write_text(_remote_code())

    def _require_loadable(self) -> None:
        """Refuse to save a class of one's own: the saved model would load as an instance of another class."""
        if self.config.fxskip_base.model_type not in known_types():
            raise CheckpointError(
                "save_pretrained",
                f"{self.fxskip_base.__name__} is no architecture of transformers: nothing could load it again",
                hint="save the state_dict alone with safetensors; later build the model, transform it with the same "
                "spec, and call load_state_dict",
            )
        loaded = language_model(self.config.fxskip_base)
        if loaded is not self.fxskip_base:
            raise CheckpointError(
                "save_pretrained",
                f"{self.fxskip_base.__name__} is not what {self.config.fxskip_base.__name__} loads, which is "
                f"{loaded.__name__}",
                hint=f"transform a {loaded.__name__}, or save the state_dict alone with safetensors",
            )

    def get_compiled_call(self, compile_config: Any) -> Any:
        """What `generate` calls with a static cache: the model as it is, where transformers would compile it.

        The layers are captured already, and CUDA graphs, its default, cannot go around them.
        """
        if compile_config is not None:
            warnings.warn(
                "generate: compile_config has no effect on a model rewired by fxskip, whose layers run as captured",
                stacklevel=2,
            )
        return self.__call__  # type: ignore[operator]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights; with `strict=False`, also in the form that files have, one tensor an expert.

        Of a model that is spread over processes, each takes its part of whole tensors.

        A Trainer that resumes hands over what is in its checkpoint's file. transformers converts that form only in
        `from_pretrained`, and would keep the experts as they are.
        """
        load = super().load_state_dict  # type: ignore[misc]
        unknown = set(state_dict) - set(self.state_dict())  # type: ignore[attr-defined]
        if not strict and any(_ONE_EXPERT.search(name) for name in unknown):
            loaded = type(self).from_pretrained(None, config=self.config, state_dict=dict(state_dict))
            state_dict = loaded.state_dict()
        if is_spread(cast(nn.Module, self)):
            state_dict = own_parts(state_dict, cast(nn.Module, self))
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
        return _bare_model, (self.fxskip_base, self.config_class.fxskip_base), vars(self).copy()


_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of a tensor that holds one expert alone: how files of all supported types have them."""

Model = TypeVar("Model", bound=nn.Module)
Family = tuple[type[PreTrainedConfig], type[PreTrainedModel]]
_CONFIGS: dict[type[PreTrainedConfig], Any] = {}
_FAMILIES: dict[tuple[type[PreTrainedModel], type[PreTrainedConfig]], Family] = {}


def family(base: type[PreTrainedModel], base_config: type[PreTrainedConfig] | None = None) -> Family:
    """Config class and model class of the rewired twin of `base`, registered with the Auto classes.

    Args:
        base: the original model class.
        base_config: the class of its config, by default the one that `base` is made for. Several model types share
            a model class: `sarvam_moe` is `Glm4MoeForCausalLM` with a config class of its own.
    """
    key: tuple[type[PreTrainedModel], Any] = (base, base_config or base.config_class)
    if key not in _FAMILIES:
        _FAMILIES[key] = _make_family(*key)
    return _FAMILIES[key]


def _config_twin(base: Any) -> Any:
    if base not in _CONFIGS:
        own = {
            "model_type": PREFIX + base.model_type,
            "fxskip_base": base,
            "__module__": __name__,
            "__annotations__": {},
        }
        _CONFIGS[base] = type(f"FxSkip{base.__name__}", (FxSkipConfigMixin, base), own)
    return _CONFIGS[base]


def _make_family(base: type[PreTrainedModel], base_config: type[PreTrainedConfig]) -> Family:
    config, model_name = _config_twin(base_config), f"FxSkip{base.__name__}"
    model: Any = type(
        model_name,
        (FxSkipModelMixin, base),
        {"config_class": config, "fxskip_base": base, "__module__": __name__},
    )
    for auto_class in auto_classes(base_config):
        if base is language_model(base_config):
            auto_class.register(config, model, exist_ok=True)
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
    config_class, model_class = family(base_class(model), type(model.config))
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
    layers, regions = layers_by_path(model), record.wiring().regions
    if len(layers) != len(regions):
        raise CheckpointError(
            "checkpoint",
            f"the entry 'fxskip' wires {len(regions)} layers, and the model has {len(layers)}",
            where="config.json",
            hint="restore config.json from a copy, or convert the original model again",
        )
    install(layers, regions, record.leaves, load_spec(record.spec).runtime)
    # Not get_decoder(): some causal language models return themselves.
    keep_eager(model.get_submodule(next(iter(layers)).rsplit(".", 2)[0]))


def rewired_layers(model: Any) -> dict[str, nn.Module]:
    """The decoder layers of a rewired model, by path, in order."""
    if (record := plain_record(model)) is not None:
        return {path: model.get_submodule(path) for path in record.layers}
    return layers_by_path(model)


def base_class(model: Model) -> type[Model]:
    """The original class of a model, rewired or not."""
    found: type[Model] = getattr(type(model), "fxskip_base", None) or cast(Any, own_class(model))
    return found


def record_of(model: object) -> WiringRecord | None:
    """The wiring record of a rewired model; None for any other object."""
    if isinstance(model, FxSkipModelMixin):
        return WiringRecord.from_dict(model.config.fxskip)
    other = plain_record(model) or program_record(model)
    return other.wiring if other is not None else None


def require_record(who: str, student: nn.Module) -> WiringRecord:
    """The record of a rewired model. Raises PassError, from `who`, for any other."""
    record = record_of(student)
    if record is None:
        raise PassError(
            who,
            f"{type(student).__name__} was not rewired by fxskip",
            hint="student = fxskip.transform(model, spec), or load a saved one with AutoModelForCausalLM",
        )
    return record


def change_spec(student: nn.Module, spec: Spec) -> None:
    """Have the record of a rewired model say `spec`, which wires its layers as before.

    Raises PassError for any other model.
    """
    record = replace(require_record("change_spec", student), spec=spec.to_dict())
    if (plain := plain_record(student)) is not None:
        keep_record(student, replace(plain, wiring=record))
    else:
        student.config.fxskip = record.to_dict()  # type: ignore[union-attr]


def family_of(config_dict: Mapping[str, Any]) -> Family:
    """The classes that a saved config belongs to; raises CheckpointError where its base type is unknown."""
    model_type = str(config_dict.get("model_type", ""))
    base = model_type.removeprefix(PREFIX)
    if not model_type.startswith(PREFIX) or base not in known_types():
        raise CheckpointError(
            "checkpoint",
            f"model_type {model_type!r} is no rewired language model that this transformers knows",
            where="config.json",
            hint="install the transformers version named under 'fxskip.versions' in config.json",
        )
    base_config = CONFIG_MAPPING[base]
    return family(language_model(base_config), base_config)


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
    """Tell AutoConfig the rewired twins of all language models, without importing any of them."""
    for model_type in known_types():
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


def text_part(config: PreTrainedConfig) -> str | None:
    """The field that holds the config of the text model, where a config has parts."""
    text = config.get_text_config()
    return next((name for name in config.sub_configs if getattr(config, name) is text), None)


def _auto_map(base_config: type[PreTrainedConfig]) -> dict[str, str]:
    """What transformers runs for each Auto class where remote code is trusted."""
    models = {each.__name__: "modeling_fxskip.FxSkipForCausalLM" for each in auto_classes(base_config)}
    return {"AutoConfig": "modeling_fxskip.FxSkipConfig", **models}


def _some(keys: Any) -> str:
    names = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _model_class(config: Any) -> Any:
    return family_of({"model_type": config.model_type})[1]


def _bare_config(base: type[PreTrainedConfig]) -> Any:
    cls = _config_twin(base)
    return cls.__new__(cls)


def _bare_model(base: type[PreTrainedModel], base_config: type[PreTrainedConfig]) -> Any:
    cls = family(base, base_config)[1]
    return cls.__new__(cls)


def _remote_code() -> str:
    return (Path(__file__).parent / "remote_code.txt").read_text()
