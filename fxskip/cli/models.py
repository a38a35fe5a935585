"""Loading models and tokenizers from folders, and nothing from a network."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from fxskip.checkpoint.auto_classes import loader
from fxskip.checkpoint.stored_weights import read_headers
from fxskip.cli.arguments import Dtype
from fxskip.cli.output import note
from fxskip.errors import CaptureError, CheckpointError, FxskipError, first_line

# Code that came with a model is never run; False also keeps transformers from asking on the terminal.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_STORED = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


def read_config(folder: Path) -> PreTrainedConfig:
    """The config of a saved model, or in a file; CheckpointError where there is none that transformers can read."""
    if not folder.is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(str(folder), "holds no config.json", hint="name the folder of a saved model")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError) as error:
        raise _unreadable(folder, "config.json", error) from error
    return config


def checked_device(name: str) -> torch.device:
    """A device that this machine has."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FxskipError("--device", f"{name!r}: {first_line(error)}", hint="write cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"this PyTorch sees {torch.cuda.device_count()} CUDA devices"
        raise FxskipError("--device", f"{name!r}: {found}", hint="write cpu, or install PyTorch for CUDA")
    return device


def load_model(
    folder: Path, dtype: Dtype = Dtype.auto, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a language model; `auto` is the type in which its weights are stored.

    Raises CheckpointError where weights are missing or do not fit: transformers would go on with random ones.
    """
    config = read_config(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise CaptureError(
            str(folder),
            "holds quantized weights, and only models in floating point can be rewired and trained",
            hint="start from the weights before quantization",
        )
    wanted = _stored_dtype(folder) if dtype is Dtype.auto else getattr(torch, dtype)
    try:
        loaded: Any = loader(str(folder), config).from_pretrained(
            folder, config=config, dtype=wanted, output_loading_info=True, **_LOCAL
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(folder, "the model", error) from error
    model, info = loaded
    _require_all_weights(folder, info)
    placed: PreTrainedModel = model.to(device)
    return placed


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer beside a model; CheckpointError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            str(folder),
            f"has no tokenizer that can be read: {first_line(error)}",
            hint="copy the tokenizer's files there, or give data as .safetensors files of token ids",
        ) from error


def _stored_dtype(folder: Path) -> Any:
    """The type that all stored weights have. Where they have several, what transformers chooses, and a note."""
    if not list(folder.glob("*.safetensors")):
        return "auto"  # the older format has no header to look at
    found = {tensor.dtype for tensor in read_headers(folder).tensors.values()} & _STORED.keys()
    if len(found) == 1:
        return _STORED[found.pop()]
    note(f"{folder}: the weights are stored as {', '.join(sorted(found))}; the type in config.json is used")
    return "auto"


def _require_all_weights(folder: Path, info: dict[str, Any]) -> None:
    # A note for left-over tensors: some models have tensors that their class does not use.
    if unexpected := sorted(info["unexpected_keys"]):
        note(f"{folder}: not used: {', '.join(unexpected[:5])}{' and more' if len(unexpected) > 5 else ''}")
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            str(folder),
            f"{len(missing)} weights are missing: {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}",
            hint="restore the weights from a copy; a model with random weights would be of no use",
        )


def _unreadable(folder: Path, what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        str(folder),
        f"{what} cannot be loaded: {type(error).__name__}: {first_line(error)}",
        hint="fxskip doctor looks at the folder in detail",
    )
