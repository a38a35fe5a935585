"""fxskip eval"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.command import run

LENGTH = 40


def log_probs(folder, windows):
    """Of every position that predicts a token, a window at a time, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat(
            [model(input_ids=row[None]).logits[0, :-1].double().log_softmax(-1) for row in windows]
        )


@pytest.fixture(scope="module")
def by_hand(original, converted, text):
    """The figures from their formulas."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(original)(text.read_text())["input_ids"])
    windows = ids.split(LENGTH)
    assert len(windows[-1]) < LENGTH  # a short window, too, has to count
    targets = torch.cat([row[1:] for row in windows])
    logp, logq = log_probs(original, windows), log_probs(converted, windows)
    rows = torch.arange(len(targets))
    return {
        "tokens": len(targets),
        "cross_entropy": float(-logq[rows, targets].mean()),
        "kl": float((logp.exp() * (logp - logq)).sum(-1).mean()),
        "agreement": float((logp.argmax(-1) == logq.argmax(-1)).double().mean()),
        "teacher_cross_entropy": float(-logp[rows, targets].mean()),
    }


def test_figures_are_those_of_the_formulas(capsys, original, converted, text, by_hand):
    options = ["--data", text, "--length", LENGTH, "--batch-size", 3, "--json"]
    assert run("eval", converted, "--teacher", original, *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-5)
    assert (found["model"], found["teacher"], found["missed"]) == (str(converted), str(original), [])


def test_text_report(capsys, original, converted, text, by_hand):
    assert run("eval", converted, "--teacher", original, "--data", text, "--length", LENGTH) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["cross-entropy", f"{by_hand['cross_entropy']:.4f}", "nats"]
    assert lines[-1].split() == ["top-1", "agreement", f"{100 * by_hand['agreement']:.2f}", "%"]


def test_bounds(capsys, original, converted, text, by_hand):
    common = [converted, "--teacher", original, "--data", text, "--length", LENGTH]
    above = ["--max-kl", by_hand["kl"] + 1e-3, "--min-agreement", by_hand["agreement"]]
    assert run("eval", *common, *above) == 0
    capsys.readouterr()
    below = ["--max-kl", by_hand["kl"] - 1e-3, "--max-cross-entropy", by_hand["cross_entropy"] - 1e-3]
    assert run("eval", *common, *below) == 1
    assert capsys.readouterr().err.count("missed: ") == 2


def test_ids_from_a_file(capsys, original, tmp_path):
    ids = torch.randint(3, 100, (4, 9), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids.int()}, tmp_path / "ids.safetensors")
    assert run("eval", original, "--data", tmp_path / "ids.safetensors", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    targets = ids[:, 1:].flatten()
    logp = log_probs(original, ids)
    assert found["tokens"] == 32
    assert found["cross_entropy"] == pytest.approx(float(-logp[torch.arange(32), targets].mean()), abs=1e-5)
    assert (found["kl"], found["teacher"]) == (None, None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "no two tokens"),
        ("latin.txt", "é".encode("latin-1"), "not UTF-8 text"),
        ("ids.pt", b"PK", "safetensors"),
        ("bad.safetensors", b"abc", "cannot be read"),
    ],
)
def test_data_that_cannot_be_used(capsys, original, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert run("eval", original, "--data", tmp_path / name) == 2
    err = capsys.readouterr().err
    assert err.startswith(str(tmp_path / name)) and message in err


def test_ids_of_the_wrong_kind(capsys, original, tmp_path):
    save_file({"input_ids": torch.zeros(4, 9)}, tmp_path / "ids.safetensors")
    assert run("eval", original, "--data", tmp_path / "ids.safetensors") == 2
    assert "holds input_ids [4, 9] float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-kl", "1"], "give --teacher"),
        (["--device", "abacus"], "'abacus'"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--length", "1"], "--length"),
    ],
)
def test_options_that_cannot_be_met(capsys, original, text, options, message):
    assert run("eval", original, "--data", text, *options) == 2
    assert message in capsys.readouterr().err


def test_model_without_tokenizer(capsys, original, text, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((original / name).read_bytes())
    assert run("eval", tmp_path, "--data", text) == 4
    assert "has no tokenizer" in capsys.readouterr().err


def test_what_is_done_to_weights_is_said(capsys, original, text, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(original, model)
    tensors = load_file(model / "model.safetensors") | {"extra": torch.zeros(1)}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert run("eval", model, "--data", text) == 0
    err = capsys.readouterr().err
    assert "stored as BF16, F32; the type in config.json is used" in err
    assert "not used: extra" in err
