"""Load saved models in a process that has made none of them.

    python -m tests.checkpoint.reload import OUT FOLDER...      after `import fxskip`
    python -m tests.checkpoint.reload remote OUT FOLDER...      by trust_remote_code alone

Writes the logits of one batch to OUT/<name of the folder>.safetensors and prints, a line a model, what it is.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.zoo import batch


def main(mode: str, out: Path, folders: list[Path]) -> None:
    torch.set_num_threads(1)
    if mode == "import":
        import fxskip  # noqa: F401
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=mode == "remote").eval()
        realign(model)
        with torch.no_grad():
            logits = model(**batch(padded=True)).logits
        save_file({"logits": logits.contiguous()}, out / f"{folder.name}.safetensors")
        # Loading has imported fxskip, whatever the mode.
        print(type(model).__name__, sys.modules["fxskip"].spec_of(model).name, model.dtype)


def realign(model: torch.nn.Module) -> None:
    """Move mapped weights to addresses such as torch gives its own: matrix products add in another order elsewhere."""
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
