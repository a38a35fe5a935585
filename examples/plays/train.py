"""Train the bundled model from scratch: a small DeepSeek-V3 on plays and scripture.

    python examples/plays/train.py --device cuda                     # 22 epochs, about 8 minutes on one GPU
    python examples/plays/train.py --device cpu --steps 3 --batch 2 --eval-windows 4 --out out/smoke

Writes the checkpoint with the lowest validation loss to --out, rounded to bf16, and the record to --results.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from architecture import plays_config
from corpus import cut, token_stream, token_windows
from evaluate import MODEL_DIR, cross_entropy, spread
from training_aids import LoadBalance, MasterWeights, add_dropout
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, default=MODEL_DIR, help="from train_tokenizer.py")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "plays", help="folder for the model")
    parser.add_argument("--results", type=Path, help="default: results.json in --out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=float, default=22, help="sets the number of steps")
    parser.add_argument("--steps", type=positive, help="instead of --epochs; the schedule fits itself to it")
    parser.add_argument("--batch", type=positive, default=32, help="windows in a step")
    parser.add_argument("--length", type=positive, default=256, help="tokens in a window")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of matrices; norms have none")
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--balance-speed", type=float, default=1e-3, help="step of the routers' biases")
    parser.add_argument(
        "--eval-windows", type=positive, help="windows of each evaluation; default: all of val"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def positive(text: str) -> int:
    """An argument that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def batches(
    stream: torch.Tensor, batch: int, length: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """[batch, length] for ever: each epoch cuts the stream at a new offset and shuffles the windows.

    The new offset gives every token new neighbours at the window's edges. An epoch's last partial batch is
    dropped.
    """
    if batch * length > len(stream) - length:
        raise ValueError(
            f"batches: {batch} windows of {length} tokens are more than an epoch of a stream of {len(stream)} "
            f"surely has; at most {len(stream) // length - 1} windows fit in a batch"
        )
    while True:
        offset = int(torch.randint(length, (), generator=generator))
        windows = cut(stream, length, offset)
        order = torch.randperm(len(windows), generator=generator).to(stream.device)
        for start in range(0, len(windows) - batch + 1, batch):
            yield windows[order[start : start + batch]]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 5% of the steps, then a cosine that ends at 2% of the peak."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer_for(weights: MasterWeights, weight_decay: float) -> torch.optim.AdamW:
    matrices = [weight for weight in weights.masters if weight.ndim >= 2]
    norms = [weight for weight in weights.masters if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def sampling_for(tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """How the saved model writes text when it is not told otherwise."""
    return GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        max_new_tokens=200,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


class Training:
    """A model, and all that a step changes."""

    def __init__(self, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
        torch.manual_seed(options.seed)
        self.model = DeepseekV3ForCausalLM(plays_config(tokenizer)).to(options.device)
        self.model.generation_config = sampling_for(tokenizer)
        self.weights = MasterWeights(self.model, torch.bfloat16)
        self.optimizer = optimizer_for(self.weights, options.weight_decay)
        add_dropout(self.model, options.dropout)
        self.balance = LoadBalance(self.model, options.balance_speed)

    def step(self, ids: torch.Tensor, rate: float) -> torch.Tensor:
        """One update on a batch; the loss before it. Does not wait for the GPU."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.weights.take_gradients()
        torch.nn.utils.clip_grad_norm_(self.weights.masters, 1.0)
        self.optimizer.step()
        self.weights.publish()
        self.balance.step()
        return loss.detach()

    def evaluate(self, windows: torch.Tensor, batch: int) -> tuple[float, dict[str, list[float]]]:
        """Loss of the rounded weights on `windows`, and the load of each router's experts there."""
        loss = cross_entropy(self.model, windows, batch=batch)
        loads = self.balance.loads()
        self.balance.forget()  # these tokens must not move the biases
        return loss, loads


def train(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Train, save the best checkpoint to options.out, return the curve and the totals."""
    training = Training(options, tokenizer)
    stream = token_stream(tokenizer, "train").to(options.device)
    val = spread(token_windows(tokenizer, "val", options.length), options.eval_windows).to(options.device)
    data = batches(stream, options.batch, options.length, torch.Generator().manual_seed(options.seed))
    steps_an_epoch = len(stream) // options.length // options.batch
    steps = options.steps or round(options.epochs * steps_an_epoch)

    curve: list[dict[str, float]] = []
    kept: dict[str, Any] = {}
    losses: list[torch.Tensor] = []
    start = time.perf_counter()
    for step in range(1, steps + 1):
        losses.append(training.step(next(data), learning_rate(step - 1, steps, options.lr)))
        if step % steps_an_epoch and step != steps:
            continue
        val_loss, loads = training.evaluate(val, options.batch)
        if not math.isfinite(val_loss):
            raise FloatingPointError(f"train: validation loss {val_loss} at step {step}; lower --lr")
        if not curve or val_loss < min(point["val_loss"] for point in curve):
            kept = {"kept_step": step, "expert_load_on_val": loads}
            training.model.save_pretrained(options.out)
            tokenizer.save_pretrained(options.out)
        point = {
            "step": step,
            "epoch": round(step / steps_an_epoch, 3),
            "train_loss_with_dropout": round(torch.stack(losses).mean().item(), 4),
            "val_loss": round(val_loss, 4),
            "seconds": round(time.perf_counter() - start, 1),
        }
        print("  ".join(f"{key} {value}" for key, value in point.items()), flush=True)
        curve.append(point)
        losses.clear()
    tokens = steps * options.batch * options.length
    parameters = sum(weight.numel() for weight in training.weights.masters)
    return {"steps": steps, "tokens": tokens, "parameters": parameters, "curve": curve, **kept}


def final_losses(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Loss of the written files, in float32, without dropout; train on as many windows as held_out has."""
    model = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32).to(options.device)
    held_out = token_windows(tokenizer, "held_out", options.length)
    windows = {
        "train": spread(token_windows(tokenizer, "train", options.length), len(held_out)),
        "val": token_windows(tokenizer, "val", options.length),
        "held_out": held_out,
    }
    return {
        split: round(cross_entropy(model, spread(some, options.eval_windows)), 4)
        for split, some in windows.items()
    }


def surroundings(options: argparse.Namespace) -> dict[str, Any]:
    """Where and how this ran: enough to run it again."""
    head = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]  # prints nothing before the first commit
    git = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else None
    return {
        "command": " ".join(["python", "examples/plays/train.py", *sys.argv[1:]]),
        "commit": git.stdout.strip() or None,
        "hardware": gpu or platform.processor() or platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "options": {key: shown(value) for key, value in vars(options).items()},
    }


def shown(value: Any) -> Any:
    """A path as seen from the repository's root, so that results do not name the machine's folders."""
    if not isinstance(value, Path):
        return value
    path = value.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def main() -> None:
    options = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    record = surroundings(options) | train(options, tokenizer)
    record["loss_of_saved_weights"] = final_losses(options, tokenizer)
    results = options.results or options.out / "results.json"
    results.write_text(json.dumps(record, indent=1) + "\n")
    print(f"kept step {record['kept_step']} of {record['steps']}: {record['loss_of_saved_weights']}")


if __name__ == "__main__":
    main()
