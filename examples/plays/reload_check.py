"""Load a saved student in this process and compare its logits with those that another process wrote down.

    python examples/plays/reload_check.py out/plays/student out/plays/logits.safetensors

Exits with 1 and a message if a single bit differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import fxskip


@torch.no_grad()
def write_down(model: PreTrainedModel, ids_BL: torch.Tensor, path: Path) -> None:
    """Keep token ids, the logits that `model` gives for them, and the number of threads."""
    logits_BLV = model.eval()(input_ids=ids_BL, use_cache=False).logits
    threads = torch.tensor(torch.get_num_threads())
    save_file({"ids": ids_BL.contiguous(), "logits": logits_BLV, "threads": threads}, path)


@torch.no_grad()
def difference(folder: Path, path: Path) -> str | None:
    """What is wrong with the model in `folder`, or None if it gives the logits in `path`."""
    kept = load_file(path)
    torch.set_num_threads(int(kept["threads"]))  # sums are cut up by thread, which moves the last bit
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if not fxskip.is_transformed(model):
        return f"{folder} loads with the original wiring"
    logits_BLV = model(input_ids=kept["ids"], use_cache=False).logits
    if torch.equal(logits_BLV, kept["logits"]):
        return None
    gap = (logits_BLV - kept["logits"]).abs().max().item()
    return f"{folder} gives other logits than the model that was saved, by up to {gap:.2e}"


if __name__ == "__main__":
    sys.exit(difference(Path(sys.argv[1]), Path(sys.argv[2])))
