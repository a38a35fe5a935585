"""Examine a saved model without loading it: what it is, and whether it would load as it was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fxskip.checkpoint.diagnosis import Check, Diagnosis, Kind
from fxskip.checkpoint.family import PREFIX, REMOTE_CODE, FxSkipConfig, family_of, text_part
from fxskip.checkpoint.record import WiringRecord
from fxskip.checkpoint.stored_weights import StoredWeights, read_headers
from fxskip.errors import CheckpointError, FxskipError
from fxskip.spec import load_spec
from fxskip.version import __version__

_RESTORE = "restore config.json from a copy, or convert the original model again"


def examine(path: str | PathLike[str], *, values: bool = False) -> Diagnosis:
    """Look at everything that loading the folder `path` relies on. Nothing is changed, and no code of it is run.

    Weights stay on disk: names and shapes come from the headers of their files. `values` reads them too, tensor
    by tensor, and looks for infinities and NaNs. Raises CheckpointError only where `path` is no folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            "doctor", f"{folder} is no folder", hint="name the folder that holds config.json"
        )
    return _Examination(folder, values).run()


def kind_of(path: str | PathLike[str]) -> Kind:
    """What the config.json of a folder says that it holds. 'rewired' does not mean intact: see `examine`."""
    try:
        return _kind(_read_config(Path(path)))
    except CheckpointError:
        return "neither"


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            "config.json", f"cannot be read: {reason}", where=str(file), hint=_RESTORE
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError("config.json", "holds no JSON object", where=str(file), hint=_RESTORE)
    return config


def _kind(config: Mapping[str, Any]) -> Kind:
    """One trace of a rewired model is enough: a config from which the others were edited away is not stock."""
    model_type = str(config.get("model_type"))
    if model_type.startswith(PREFIX) or "fxskip" in config:
        return "rewired"
    return "stock" if model_type in CONFIG_MAPPING else "neither"


@dataclass
class _Examination:
    """The checks in their order. Each relies on what earlier ones found, and is skipped where that is missing."""

    folder: Path
    with_values: bool
    config: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    record: WiringRecord | None = None
    spec: Mapping[str, Any] | None = None
    model: PreTrainedModel | None = None
    weights: StoredWeights | None = None

    def run(self) -> Diagnosis:
        kind: Kind = "neither"
        known = False
        if self._try("config", self._config):
            kind = _kind(self.config)
            known = self._try("model type", self._model_type)
        if kind == "rewired":
            self._try("record", self._record)
            self._try("spec", self._spec, needs=self.record, lack="no record")
            self._try("wiring", self._wiring, needs=self.spec, lack="no spec")
            ready = self.record if known else None
            self._try("refusal", self._refusal, needs=ready, lack="no model type or no record")
            self._try("remote code", self._remote_code)
            self._try("structure", self._structure, needs=ready, lack="no model type or no record")
        if kind != "neither":
            self._try("weight files", self._weight_files)
        if kind == "rewired":
            both = self.model if self.weights is not None else None
            self._try("keys and shapes", self._keys, needs=both, lack="no structure or no weights to compare")
            self._try("tied weights", self._tied, needs=both, lack="no structure or no weights to compare")
        if kind != "neither":
            wanted = self.weights if self.with_values else None
            lack = (
                "no readable weights"
                if self.with_values
                else "not asked for; fxskip doctor --values reads them"
            )
            self._try("values", self._values, needs=wanted, lack=lack)
        return self._diagnosis(kind)

    def _try(self, name: str, check: Callable[[], str], *, needs: object = True, lack: str = "") -> bool:
        """Run one check, which returns what it found or raises, and note how it went."""
        if needs is None:
            self.checks.append(Check(name, "skipped", lack))
            return False
        try:
            self.checks.append(Check(name, "ok", check()))
        except FxskipError as error:
            found = error.found if error.hint else str(error)  # a list of problems carries its own remedies
            self.checks.append(Check(name, "FAIL", found, error.hint or _RESTORE))
            return False
        return True

    def _diagnosis(self, kind: Kind) -> Diagnosis:
        installed = {
            "fxskip": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        saved_with = {} if self.record is None else self.record.versions
        base = str(self.config["model_type"]).removeprefix(PREFIX) if "model_type" in self.config else None
        return Diagnosis(self.folder, kind, base, self.spec, saved_with, installed, tuple(self.checks))

    def _config(self) -> str:
        self.config = _read_config(self.folder)
        return "config.json parses"

    def _model_type(self) -> str:
        found = str(self.config.get("model_type"))
        if _kind(self.config) == "rewired":
            if not found.startswith(PREFIX):
                raise self._edited(f"model_type is {found!r} beside the entry 'fxskip' of a rewired model")
            expected = [family_of(self.config)[1].__name__]
            if (architectures := self.config.get("architectures")) != expected:
                raise self._edited(f"architectures is {architectures} where {expected} was saved")
        elif found not in CONFIG_MAPPING:
            raise CheckpointError(
                "doctor",
                f"model_type is {found!r}, which transformers {transformers.__version__} does not know",
                hint="name the folder of a language model, or install the transformers that saved it",
            )
        return found

    def _record(self) -> str:
        self.record = WiringRecord.from_dict(self.config.get("fxskip"))
        return f"{len(self.record.blocks)} sub-blocks"

    def _spec(self) -> str:
        assert self.record is not None
        spec = load_spec(self.record.spec)
        self.spec = spec.to_dict()
        return f"{spec.name or 'without a name'}, {len(spec.connect)} rules"

    def _wiring(self) -> str:
        assert self.record is not None
        self.record.wiring()
        return f"spec and sub-blocks give the saved hash {self.record.wiring_hash[:12]}"

    def _refusal(self) -> str:
        """What makes a loader without fxskip fail is as `to_json_string` writes it."""
        config = FxSkipConfig.from_dict(self.config)
        written = json.loads(config.to_json_string())
        places: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("", self.config, written)]
        if part := text_part(config):
            places.append((f"{part}.", self.config[part], written[part]))
        for place, found, saved in places:
            for key in ("auto_map", "id2label"):
                if found.get(key) != saved.get(key):
                    raise self._edited(f"{place}{key} is {found.get(key)} where {saved.get(key)} was saved")
        return "a loader without fxskip fails and says why"

    def _remote_code(self) -> str:
        file = self.folder / REMOTE_CODE
        packaged = (Path(__file__).parent / "remote_code.txt").read_bytes()
        if not file.is_file() or file.read_bytes() != packaged:
            state = "is not the file of this fxskip" if file.is_file() else "is missing"
            hint = "load the model with import fxskip and save it again: model.save_pretrained(dir)"
            raise CheckpointError("doctor", f"{REMOTE_CODE} {state}", hint=hint)
        return f"{REMOTE_CODE} is that of this fxskip"

    def _structure(self) -> str:
        try:
            with torch.device("meta"):
                config = FxSkipConfig.from_dict(self.config)
                self.model = family_of(self.config)[1]._from_config(config)
        except FxskipError:
            raise
        except Exception as error:  # whatever transformers raises for an edited value
            raise self._edited(f"no model can be built from it: {type(error).__name__}: {error}") from error
        return f"{type(self.model).__name__}, {self.model.num_parameters():,} parameters"

    def _weight_files(self) -> str:
        self.weights = read_headers(self.folder)
        return str(self.weights)

    def _keys(self) -> str:
        assert self.model is not None and self.weights is not None
        found = self.weights.shapes()
        # save_pretrained writes the names of the original's files, or on request those in memory.
        expected = [_without_absent_twins(e, self.model, found) for e in _expected_shapes(self.model)]
        faults = min((_differences(shapes, found) for shapes in expected), key=len)
        if faults:
            more = f"\nand {len(faults) - 5} more" if len(faults) > 5 else ""
            hint = (
                "restore weights and config.json of one save from a copy, or convert the original model again"
            )
            raise CheckpointError("doctor", "\n".join(faults[:5]) + more, hint=hint)
        return f"all {len(found)} are as the model needs them"

    def _tied(self) -> str:
        assert self.model is not None and self.weights is not None
        tied = self.model.all_tied_weights_keys
        for target, source in tied.items():
            stored = self.weights.tensors.keys() & {target, source}
            if len(stored) == 2 and not self.weights.are_equal(target, source):
                raise CheckpointError(
                    "doctor",
                    f"config.json ties {target} to {source}, but both are stored and differ",
                    hint="set tie_word_embeddings to false in config.json if they should differ, else save again",
                )
        return ", ".join(f"{target} is {source}" for target, source in tied.items()) or "none in this model"

    def _values(self) -> str:
        assert self.weights is not None
        if bad := self.weights.not_finite():
            raise CheckpointError(
                "doctor",
                f"infinite or NaN: {', '.join(bad[:5])}{f' and {len(bad) - 5} more' if len(bad) > 5 else ''}",
                hint="go back to a checkpoint before the training diverged, or convert the original model again",
            )
        return "all finite"

    def _edited(self, found: str) -> CheckpointError:
        return CheckpointError("doctor", f"config.json was edited: {found}", hint=_RESTORE)


def _expected_shapes(model: PreTrainedModel) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes that `save_pretrained` may write for a model on the meta device."""
    ignored = set(model._keys_to_ignore_on_save or ())
    in_memory = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    on_disk = revert_weight_conversion(model, dict(in_memory))
    return [{name: tuple(t.shape) for name, t in tensors.items()} for tensors in (on_disk, in_memory)]


def _without_absent_twins(
    expected: dict[str, tuple[int, ...]], model: PreTrainedModel, found: Mapping[str, object]
) -> dict[str, tuple[int, ...]]:
    """Of two tied tensors one is enough."""
    absent = {
        name
        for pair in model.all_tied_weights_keys.items()
        for name, twin in (pair, pair[::-1])
        if name not in found and twin in found
    }
    return {name: shape for name, shape in expected.items() if name not in absent}


def _differences(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    faults = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    faults += [f"{name} is unexpected" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        if expected[name] != found[name]:
            faults.append(f"{name} is {list(found[name])} where the model has {list(expected[name])}")
    return faults
