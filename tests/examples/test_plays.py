"""The bundled model: its text, its tokenizer, its training script, and the weights that are committed."""

import json
import math
import sys
from pathlib import Path

import corpus
import pytest
import torch
import train
from architecture import plays_config
from corpus import Document, all_documents, cut, load_split, plain_play, token_stream, token_windows
from evaluate import MODEL_DIR, cross_entropy, spread
from torch import nn
from train_tokenizer import train_tokenizer
from training_aids import LoadBalance, MasterWeights, add_dropout
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "plays-training.json"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def small_model(tokenizer) -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    config = plays_config(tokenizer)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 2, 32, 32
    return DeepseekV3ForCausalLM(config)


# The text


def test_every_document_is_in_exactly_one_split():
    splits = {
        name: {document.title for document in load_split(name)} for name in ("train", "val", "held_out")
    }

    assert splits["held_out"] == {"macbeth", "twelfth-night", "the-tempest", "Acts"}
    assert splits["val"] == {"king-john", "Job"}
    assert sum(len(titles) for titles in splits.values()) == len(set().union(*splits.values()))
    assert len(splits["train"]) == 38 + 66 - 4 - 2  # plays, books of the Bible, held out, val


def test_reading_again_gives_the_same_text():
    before = all_documents()
    all_documents.cache_clear()
    assert all_documents() == before


def test_held_out_text_is_not_in_training_under_another_title():
    training = "".join(document.text for document in load_split("train"))
    for document in load_split("held_out"):
        for start in range(0, len(document.text) - 200, 5000):
            assert document.text[start : start + 200] not in training, (document.title, start)


def test_documents_are_plain_text():
    for document in all_documents():
        assert not set(document.text) & set("_*#\\\u2019\u2014"), document.title
        assert document.text.endswith("\n") and not document.text.endswith("\n\n"), document.title


def test_a_play_loses_its_mark_up_and_keeps_its_words():
    markdown = (
        "# A Play\n\n### SCENE I.\n\n_Enter ANN\nand BOB_\n\n\n\n"
        "**ANN**  \n__\\[Aside]_  \nSo, \u2019tis,\\--yes.  \n"
    )
    assert plain_play(markdown) == (
        "A Play\n\nSCENE I.\n\n[Enter ANN\nand BOB]\n\nANN:\n[Aside]\nSo, 'tis,--yes.\n"
    )


def test_an_unknown_split_names_the_splits():
    with pytest.raises(ValueError, match="no split 'test'; the splits are train, val, held_out"):
        load_split("test")


def test_a_title_that_no_document_has_is_an_error(monkeypatch):
    monkeypatch.setattr(corpus, "VAL", ("king-jon",))
    with pytest.raises(ValueError, match="king-jon"):
        all_documents.__wrapped__()


# The tokenizer


def test_any_text_comes_back(tokenizer):
    strange = "\u00c6geon \u2603\n\n\t  two  spaces , and 'tis \U0001f600"
    for text in [strange, *(document.text for document in load_split("held_out"))]:
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        assert tokenizer.decode(ids) == text


def test_windows_are_the_documents_in_order_with_an_end_after_each(tokenizer):
    documents = load_split("val")
    stream = token_stream(tokenizer, "val")
    windows = token_windows(tokenizer, "val", 100)

    assert tokenizer.decode(stream) == "".join(document.text + "<|end|>" for document in documents)
    assert windows.shape == (len(stream) // 100, 100)
    assert torch.equal(windows.flatten(), stream[: len(stream) // 100 * 100])


def test_a_vocabulary_larger_than_the_text_can_fill_is_an_error():
    assert len(train_tokenizer(["to be or not to be"], 262)) == 262  # 256 bytes, 2 special, 4 merges
    with pytest.raises(ValueError, match=r"yields \d+ tokens, not 4096"):
        train_tokenizer(["to be or not to be"], 4096)


# The parts of training


def test_an_epoch_of_batches_is_a_shuffled_cut_of_the_stream():
    stream = torch.arange(1000)
    batches = train.batches(stream, 3, 10, torch.Generator().manual_seed(1))
    offset = int(torch.randint(10, (), generator=torch.Generator().manual_seed(1)))
    whole = (1000 - offset) // 10 // 3

    starts = torch.cat([next(batches)[:, 0] for _ in range(whole)])

    possible = cut(stream, 10, offset)[:, 0]
    assert len(starts.unique()) == len(starts) == whole * 3
    assert set(starts.tolist()) <= set(possible.tolist())
    with pytest.raises(ValueError, match="at most 99 windows"):
        next(train.batches(stream, 100, 10, torch.Generator()))


def test_learning_rate_climbs_to_its_peak_and_falls_to_a_fiftieth():
    rates = [train.learning_rate(step, 200, 1.0) for step in range(201)]
    assert rates[9] == max(rates) == 1.0  # 5% of 200 steps
    assert rates[0] == pytest.approx(0.1)
    assert rates[105] == pytest.approx(0.51)  # half way down the cosine
    assert rates[200] == pytest.approx(0.02)


def test_dropout_acts_in_training_only(tokenizer):
    model, ids = small_model(tokenizer), torch.arange(2, 34)[None]
    model.eval()
    plain = model(ids).logits
    handles = add_dropout(model, 0.5)

    assert len(handles) == 1 + 2 * 2  # embedding, and attention and MLP of two layers
    assert torch.equal(model(ids).logits, plain)
    assert not torch.allclose(model.train()(ids).logits, plain)


def test_biases_move_against_the_load(tokenizer):
    model = small_model(tokenizer).eval()
    balance = LoadBalance(model, speed=0.25)
    (name,) = balance.gates
    logits, _, chosen = balance.gates[name](torch.randn(40, 32, generator=torch.Generator().manual_seed(3)))
    counts = torch.bincount(chosen.flatten(), minlength=16)
    assert logits.shape == (40, 16) and counts.sum() == 40 * 4
    assert balance.loads()[name] == pytest.approx((counts / 10).tolist(), abs=1e-3)  # 160 choices, 16 experts

    balance.step()

    assert torch.equal(balance.gates[name].e_score_correction_bias, 0.25 * torch.sign(10.0 - counts))
    assert not balance.counts[name].any()


def test_master_weights_keep_what_bf16_would_lose():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    weights = MasterWeights(model, torch.bfloat16)
    optimizer = torch.optim.SGD(weights.masters, lr=1.0)
    for _ in range(8):
        (model(torch.ones(1, 1, dtype=torch.bfloat16)).sum() * 2**-10).backward()
        weights.take_gradients()
        optimizer.step()
        weights.publish()
    # Each step is a quarter of the distance between 1 and the next smaller bf16 number.
    assert weights.masters[0].item() == 1 - 8 * 2**-10
    assert model.weight.item() == 1 - 8 * 2**-10 and model.weight.dtype == torch.bfloat16


# The script, and what it once made


def test_the_training_script_on_a_cpu(tmp_path, monkeypatch, capsys):
    small = {
        name: [Document(d.title, d.text[:4000]) for d in load_split(name)[:2]]
        for name in ("train", "val", "held_out")
    }
    monkeypatch.setattr(corpus, "load_split", small.__getitem__)
    sizes = ["--steps", "3", "--batch", "2", "--length", "64", "--eval-windows", "4"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cpu", *sizes, "--out", str(tmp_path)])

    train.main()

    record = json.loads((tmp_path / "results.json").read_text())
    assert "kept step 3 of 3" in capsys.readouterr().out
    assert record["tokens"] == 3 * 2 * 64 and record["versions"]["torch"] == torch.__version__
    assert record["curve"][-1]["val_loss"] < math.log(4096)  # better than guessing: something was learned
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[5].mlp.experts.down_proj.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = spread(token_windows(tokenizer, "held_out", 64), 4)
    assert cross_entropy(model.float(), ids) == pytest.approx(
        record["loss_of_saved_weights"]["held_out"], abs=1e-3
    )


def test_the_committed_model_predicts_held_out_text_as_recorded(tokenizer):
    """Sixteen windows from all four held-out documents.

    Windows differ with a standard deviation of 0.38, so that the mean of sixteen lies within 0.29, three standard
    errors, of the recorded mean of all 569. The same sixteen gave 3.7521 when the weights were committed:
    float32 on another machine moves that by less than 0.005, another text or tokenizer by more.
    """
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    record = json.loads(RESULTS.read_text())
    windows = token_windows(tokenizer, "held_out")

    assert type(model) is DeepseekV3ForCausalLM
    assert sum(parameter.numel() for parameter in model.parameters()) == record["parameters"]
    assert 8e6 < (MODEL_DIR / "model.safetensors").stat().st_size < 16e6
    loss = cross_entropy(model, spread(windows, 16))
    assert loss == pytest.approx(record["loss_of_saved_weights"]["held_out"], abs=0.29)
    assert loss == pytest.approx(3.7521, abs=0.005)
