"""Train the bundled model from scratch: a small DeepSeek-V3 on plays and scripture.

    python examples/plays/train.py --device cuda --out out/plays     # 22 epochs, about 8 minutes on one GPU
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
from corpus import token_stream, token_windows
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
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder for the model")
    parser.add_argument("--results", type=Path, help="default: results.json in --out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=float, default=22, help="sets the number of steps")
    parser.add_argument("--steps", type=int, help="instead of --epochs; the schedule fits itself to it")
    parser.add_argument("--batch", type=int, default=32, help="windows in a step")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of matrices; norms have none")
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--balance-speed", type=float, default=1e-3, help="step of the routers' biases")
    parser.add_argument("--eval-windows", type=int, help="windows of each evaluation; default: all of val")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def batches(
    stream: torch.Tensor, batch: int, length: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """[batch, length] for ever: each epoch cuts the stream at a new offset and shuffles the windows.

    The new offset gives every token new neighbours at the window's edges. An epoch's last partial batch is
    dropped.
    """
    while True:
        offset = int(torch.randint(length, (), generator=generator))
        count = (len(stream) - offset) // length
        windows = stream[offset : offset + count * length].view(count, length)
        order = torch.randperm(count, generator=generator).to(stream.device)
        for start in range(0, count - batch + 1, batch):
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


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, save the best checkpoint to options.out, return the curve and the totals."""
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    model = DeepseekV3ForCausalLM(plays_config(tokenizer)).to(options.device)
    model.generation_config = sampling_for(tokenizer)
    weights = MasterWeights(model, torch.bfloat16)
    optimizer = optimizer_for(weights, options.weight_decay)
    add_dropout(model, options.dropout)
    balance = LoadBalance(model, options.balance_speed)

    stream = token_stream(tokenizer, "train").to(options.device)
    val = spread(token_windows(tokenizer, "val", options.length), options.eval_windows).to(options.device)
    steps_an_epoch = len(stream) // options.length // options.batch
    steps = options.steps or round(options.epochs * steps_an_epoch)
    data = batches(stream, options.batch, options.length, torch.Generator().manual_seed(options.seed))

    curve: list[dict[str, float]] = []
    best, loads, recent = math.inf, {}, torch.zeros((), device=options.device)
    start, since = time.perf_counter(), 0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, options.lr)
        ids = next(data)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        weights.take_gradients()
        torch.nn.utils.clip_grad_norm_(weights.masters, 1.0)
        optimizer.step()
        weights.publish()
        balance.step()
        recent, since = recent + loss.detach(), since + 1
        if (step + 1) % steps_an_epoch and step + 1 != steps:
            continue
        val_loss = cross_entropy(model, val, batch=options.batch)
        if val_loss < best:
            best, loads = val_loss, balance.loads()
            model.save_pretrained(options.out)
            tokenizer.save_pretrained(options.out)
        balance.forget()  # evaluation counted too
        curve.append(
            {
                "step": step + 1,
                "epoch": round((step + 1) / steps_an_epoch, 3),
                "train_loss_with_dropout": round(recent.item() / since, 4),
                "val_loss": round(val_loss, 4),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        recent, since = torch.zeros_like(recent), 0
        print("  ".join(f"{key} {value}" for key, value in curve[-1].items()), flush=True)
    kept = min(curve, key=lambda point: point["val_loss"])["step"]
    return {
        "steps": steps,
        "tokens": steps * options.batch * options.length,
        "parameters": sum(weight.numel() for weight in weights.masters),
        "kept_step": kept,
        "curve": curve,
        "expert_load_on_val": loads,
    }


def final_losses(options: argparse.Namespace) -> dict[str, float]:
    """Loss of the written files, in float32, without dropout; train on as many windows as held_out has."""
    tokenizer = AutoTokenizer.from_pretrained(options.out)
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
    record = surroundings(options) | train(options)
    record["loss_of_saved_weights"] = final_losses(options)
    results = options.results or options.out / "results.json"
    results.write_text(json.dumps(record, indent=1) + "\n")
    print(f"kept step {record['kept_step']} of {record['steps']}: {record['loss_of_saved_weights']}")


if __name__ == "__main__":
    main()
