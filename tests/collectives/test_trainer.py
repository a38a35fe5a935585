"""transformers' Trainer on two processes, which wraps the student in DDP."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import fxskip
from tests.collectives.spreads import in_mode, model, spread, whole
from tests.training_loop.ranks import RANKS, run_on_ranks
from tests.zoo import batch

pytest.importorskip("accelerate")

STEPS = 3


class MeanOfExperts(TrainerCallback):
    """What docs/overlap.md says to add: DDP has averaged the rest."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        fxskip.average_gradients(model, dense=False)
        fxskip.clip_grad_norm_(model.parameters(), 1.0)


def rows() -> list[dict[str, torch.Tensor]]:
    given = batch(12, 9)
    return [{name: tensor[row] for name, tensor in given.items()} for row in range(12)]


def three_steps(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{RANKS}"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    student = spread(model("mixtral", layers=2, use_cache=False))
    before = whole(student.lm_head.weight.detach()).clone()  # type: ignore[union-attr]
    trained = []
    for mode in ("reference", "scheduled"):
        twin = in_mode(student, mode)
        arguments = TrainingArguments(
            output_dir=str(folder / mode), use_cpu=True, per_device_train_batch_size=2, max_steps=STEPS,
            optim="adamw_torch", max_grad_norm=0, learning_rate=1e-2, save_strategy="no", report_to=[],
            disable_tqdm=True, seed=3, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = Trainer(model=twin, args=arguments, train_dataset=rows(), callbacks=[MeanOfExperts()])
        trainer.train()
        assert trainer.state.global_step == STEPS
        trained.append({name: whole(p.detach()).clone() for name, p in twin.named_parameters()})
    assert not torch.equal(trained[0]["lm_head.weight"], before)
    for name, weight in trained[0].items():
        assert torch.equal(weight, trained[1][name]), name
        others = [torch.empty_like(weight) for _ in range(RANKS)]
        dist.all_gather(others, weight.contiguous())
        assert torch.equal(*others), name


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trainer(tmp_path: Path) -> None:
    run_on_ranks((three_steps,), tmp_path, limit_s=300)
