"""Held-out cross-entropy of a saved model, over whole splits.

python examples/plays/evaluate.py                                # the bundled model, val and held_out
python examples/plays/evaluate.py --model out/plays --splits train held_out --sample 568
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import get_args

import torch
from corpus import Split, token_windows
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

MODEL_DIR = Path(__file__).resolve().parent / "model"


@torch.no_grad()
def cross_entropy(model: PreTrainedModel, windows: torch.Tensor, *, batch: int = 8) -> float:
    """Mean next-token loss in nats over every position of [N, length] windows but each window's first token.

    A window is predicted from its own tokens only. Leaves the model in the mode it was in.
    """
    if not len(windows):
        raise ValueError("cross_entropy: no windows; the split is shorter than one window")
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in windows.split(batch):
        ids = chunk.to(device)
        # All windows have the same length, so weighting by windows is weighting by tokens.
        total += model(input_ids=ids, labels=ids, use_cache=False).loss.double() * len(chunk)
    model.train(was_training)
    return total.item() / len(windows)


def spread(windows: torch.Tensor, count: int | None) -> torch.Tensor:
    """`count` windows at even distances through the split; all of them for None or a larger count."""
    if count is None or count >= len(windows):
        return windows
    return windows[torch.arange(count) * len(windows) // count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--splits", nargs="+", choices=get_args(Split), default=["val", "held_out"])
    parser.add_argument("--sample", type=int, help="this many windows of each split; default: all")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    for split in arguments.splits:
        windows = spread(token_windows(tokenizer, split, arguments.length), arguments.sample)
        start = time.perf_counter()
        loss = cross_entropy(model, windows)
        seconds = time.perf_counter() - start
        print(f"{split:9s} {loss:.4f} nats a token, {windows.numel()} tokens, {seconds:.1f} s")


if __name__ == "__main__":
    main()
