"""The loops that others wrote: transformers' Trainer, TRL's SFTTrainer, accelerate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import fxskip
from tests.training_loop.loops import assert_same_weights
from tests.transform.compare import assert_same_logits
from tests.transform.wirings import FARSKIP
from tests.zoo import VOCAB, batch, tiny

accelerate = pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("qwen2_moe", layers=2, attention_dropout=0.2, use_cache=False).train()


def rows() -> list[dict[str, torch.Tensor]]:
    """Sixteen examples of one length."""
    given = batch(16, 9)
    return [{name: tensor[row] for name, tensor in given.items()} for row in range(16)]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    } | more


def trainer(model: PreTrainedModel, folder: Path, **more: Any) -> Trainer:
    return Trainer(model=model, args=TrainingArguments(**settings(folder, **more)), train_dataset=rows())


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.parametrize("spec", [pytest.param("identity", marks=pytest.mark.slow), "farskip"])
def test_trainer(model: PreTrainedModel, tmp_path: Path, spec: str) -> None:
    reference = model if spec == "identity" else FARSKIP.reference(model)
    student = fxskip.transform(model, spec)
    runs = []
    for name, one in (("ours", student), ("theirs", reference)):
        runs.append(trainer(one, tmp_path / name, save_strategy="no"))
        runs[-1].train()
    assert losses(runs[0]) == losses(runs[1])
    assert len(losses(runs[0])) == 4
    assert_same_weights(student, reference)


@pytest.mark.slow
def test_trainer_saves_and_resumes(model: PreTrainedModel, tmp_path: Path) -> None:
    """Four steps are two, a checkpoint, and two in a run that begins from other weights."""
    student = fxskip.transform(model, FARSKIP.spec)
    trainer(student, tmp_path).train()
    folder = tmp_path / "checkpoint-2"
    assert fxskip.is_transformed(AutoModelForCausalLM.from_pretrained(folder))

    resumed = fxskip.transform(
        tiny("qwen2_moe", layers=2, seed=5, attention_dropout=0.2, use_cache=False), FARSKIP.spec
    )
    again = trainer(resumed, tmp_path / "again", save_strategy="no")
    again.train(resume_from_checkpoint=str(folder))
    assert again.state.global_step == 4
    assert_same_weights(resumed, student)


@pytest.mark.slow
def test_trainer_with_its_own_switches(model: PreTrainedModel, tmp_path: Path) -> None:
    """Gradient checkpointing of the kind that crosses a tuple, and bfloat16 autocast."""
    reference, student = FARSKIP.reference(model), fxskip.transform(model, FARSKIP.spec)
    switches = {"bf16": True, "save_strategy": "no"}
    checkpointing = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    trainer(student, tmp_path / "ours", **switches, **checkpointing).train()
    trainer(reference, tmp_path / "theirs", **switches).train()
    assert_same_weights(student, reference)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCAB - 3)}
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {word: number + 3 for word, number in words.items()}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sft_trainer(model: PreTrainedModel, tmp_path: Path, lora: bool) -> None:
    """TRL's trainer on texts of several lengths, with and without LoRA."""
    generator = torch.Generator().manual_seed(0)
    texts = [
        " ".join(f"w{int(w)}" for w in torch.randint(0, 100, (4 + k % 5,), generator=generator))
        for k in range(16)
    ]
    reference, student = FARSKIP.reference(model), fxskip.transform(model, FARSKIP.spec)
    options: dict[str, Any] = {}
    if lora:
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    runs = []
    for name, one in (("ours", student), ("theirs", reference)):
        arguments = trl.SFTConfig(
            **settings(tmp_path / name, save_strategy="no"),
            max_length=16,
            gradient_checkpointing=False,
            bf16=False,
        )
        runs.append(
            trl.SFTTrainer(
                model=one,
                args=arguments,
                train_dataset=datasets.Dataset.from_dict({"text": texts}),
                processing_class=tokenizer(),
                **options,
            )
        )
        runs[-1].train()
    assert losses(runs[0]) == losses(runs[1])
    assert_same_weights(runs[0].model, runs[1].model)
    assert fxskip.is_transformed(runs[0].model)


@pytest.mark.slow
def test_accelerate(model: PreTrainedModel, tmp_path: Path) -> None:
    """prepare, accumulate, clip; save_state and load_state give the weights back."""
    reference, student = FARSKIP.reference(model), fxskip.transform(model, FARSKIP.spec)
    for name, one in (("ours", student), ("theirs", reference)):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        prepared, optimizer, data = accelerator.prepare(one, optimizer, DataLoader(rows(), batch_size=4))
        torch.manual_seed(2)
        for given in data:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**given).loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(tmp_path / name))
    assert_same_weights(student, reference)

    fresh = fxskip.transform(tiny("qwen2_moe", layers=2, seed=5), FARSKIP.spec)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(fresh)
    accelerator.load_state(str(tmp_path / "ours"), load_kwargs={"strict": True})
    assert_same_weights(accelerator.unwrap_model(prepared), student)
    assert_same_logits(fresh.eval(), student.eval(), batch())
