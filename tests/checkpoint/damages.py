"""Ways in which a saved student can be damaged, and the doctor's check that must find each."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROUTER = "model.layers.0.block_sparse_moe.gate.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


@dataclass(frozen=True)
class Damage:
    do: Callable[[Path], object]
    check: str
    """Name of the first check of `examine` that fails."""
    found: str
    """What it says, as a regular expression."""
    load: str | None
    """What AutoModelForCausalLM.from_pretrained says; None where the model loads all the same."""


def config(edit):
    def do(folder):
        file = folder / "config.json"
        values = json.loads(file.read_text())
        edit(values)
        file.write_text(json.dumps(values))

    return do


def record(edit):
    return config(lambda values: edit(values["fxskip"]))


def weights(edit):
    def do(folder):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return do


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {
    "hash": Damage(
        record(lambda r: r.update(wiring_hash="0" * 64)), "wiring", "give the wiring .* but 0000", "0000"
    ),
    "layers_of_the_spec": Damage(
        record(lambda r: r["spec"]["connect"][1].update(layers=[1])),
        "wiring",
        "give the wiring",
        "give the wiring",
    ),
    "unknown_key_in_the_spec": Damage(
        record(lambda r: r["spec"].update(conect=[])), "spec", "did you mean 'connect'", "does not fit|conect"
    ),
    "kind_of_a_block": Damage(
        record(lambda r: r["blocks"][1].update(kind="dense")), "wiring", "give the wiring", "give the wiring"
    ),
    "fewer_blocks": Damage(
        record(lambda r: r["blocks"].pop()), "wiring", "give the wiring", "give the wiring"
    ),
    "no_blocks": Damage(record(lambda r: r["blocks"].clear()), "record", "damaged", "damaged"),
    "no_record": Damage(
        config(lambda c: c.pop("fxskip")), "record", "damaged or missing", "damaged or missing"
    ),
    "record_is_text": Damage(config(lambda c: c.update(fxskip="x")), "record", "damaged", "damaged"),
    "number_of_layers": Damage(
        config(lambda c: c.update(num_hidden_layers=1)), "structure", "layers", "layers"
    ),
    "width": Damage(
        config(lambda c: c.update(intermediate_size=32)),
        "keys and shapes",
        "where the model has",
        "mismatched",
    ),
    "unknown_model_type": Damage(
        config(lambda c: c.update(model_type="fxskip_nonsense")),
        "model type",
        "fxskip_nonsense",
        "trust_remote_code",
    ),
    "stock_model_type": Damage(
        config(lambda c: c.update(model_type="mixtral")), "model type", "was edited", "pip install fxskip"
    ),
    "architectures": Damage(
        config(lambda c: c.update(architectures=["MixtralForCausalLM"])), "model type", "was edited", None
    ),
    "no_remote_code_entry": Damage(config(lambda c: c.pop("auto_map")), "refusal", "auto_map is None", None),
    "no_refusal": Damage(config(lambda c: c.pop("id2label")), "refusal", "id2label is None", None),
    "remote_code_missing": Damage(
        lambda folder: (folder / "modeling_fxskip.py").unlink(), "remote code", "is missing", None
    ),
    "remote_code_changed": Damage(
        lambda folder: (folder / "modeling_fxskip.py").write_text("pass\n"),
        "remote code",
        "is not the file",
        None,
    ),
    "config_is_no_json": Damage(
        lambda folder: (folder / "config.json").write_text("{"),
        "config",
        "cannot be read",
        "not a valid JSON",
    ),
    "weights_missing": Damage(
        lambda folder: (folder / "model.safetensors").unlink(),
        "weight files",
        "has neither",
        "model.safetensors",
    ),
    "weights_cut_short": Damage(cut_short, "weight files", "damaged or cut short", "incomplete"),
    "tensor_missing": Damage(
        weights(lambda t: t.pop(ROUTER)), "keys and shapes", f"{ROUTER} is missing", "missing"
    ),
    "expert_missing": Damage(
        weights(lambda t: t.pop(EXPERT)), "keys and shapes", f"{EXPERT} is missing", "conversion"
    ),
    "tensor_left_over": Damage(
        weights(lambda t: t.update(extra=torch.zeros(1))),
        "keys and shapes",
        "extra is unexpected",
        "unexpected",
    ),
    "shape": Damage(
        weights(lambda t: t.update({ROUTER: torch.zeros(5, 64)})),
        "keys and shapes",
        r"is \[5, 64\] where",
        "mismatched",
    ),
    "shard_of_another_save": Damage(
        lambda f: shutil.copy(f / "model.safetensors", f / "model-00001-of-00002.safetensors"),
        "weight files",
        "of another save",
        None,
    ),
}
