"""Saved models for these tests, and processes that load them."""

import json
import os
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import fxskip
from tests.zoo import tiny

ROOT = Path(__file__).parents[2]


def save_stock(folder: Path, model_type: str, *, layers: int = 2, **overrides: Any) -> Path:
    """A tiny original as it would come from a hub: with the names of its files, not of its memory."""
    model = tiny(model_type, layers=layers, **overrides)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def rewired(stock: Path, spec: str = "farskip", **options: Any) -> PreTrainedModel:
    """The student of a saved original: loaded first, as a user would, because that is another path than building it."""
    model = AutoModelForCausalLM.from_pretrained(stock, **options)
    return fxskip.transform(model, spec, inplace=True).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each printable character."""
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *string.printable[:96]]
    ids = {token: i for i, token in enumerate(tokens)}
    chars = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    chars.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=chars, **special)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path, with its bytes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def edited(folder: Path, target: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a saved model whose config.json was edited."""
    shutil.copytree(folder, target)
    file = target / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))
    return target


def run_module(name: str, *arguments: object, cache: Path) -> str:
    """Run a module of the tests in a new process, and return what it prints. `cache` is for code of models."""
    settings = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", name, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
