"""The demo: its controls, its verdict, its report, and the check of the reloaded student.

The controls run small here (a few steps, a part of the held-out text) and in full among the slow tests.
"""

import json
import sys
from dataclasses import replace
from functools import cache

import demo
import pytest
import torch
from demo import MODEL_DIR, SPEC, Settings, distilled, run, shortfalls
from evaluate import spread
from reload_check import difference, write_down
from report import Outcome
from transformers import AutoModelForCausalLM, AutoTokenizer
from yardstick import Figures, Yardstick

import fxskip
from fxskip.distill import DistillConfig, Result, evaluate
from tests.strict_html import StrictHtml

LEAST_LEAD = 0.10
"""By how much of the KL the distillation must beat plain training on the same tokens."""


@pytest.fixture(scope="module", autouse=True)
def text_is_tokenized_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "token_windows", cache(demo.token_windows))
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def original():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def student(original):
    return fxskip.transform(original, SPEC)


@pytest.fixture(scope="module")
def held_out(tokenizer):
    """Every 24th window: a part of each document."""
    return spread(demo.token_windows(tokenizer, "held_out"), 24)


@pytest.fixture(scope="module")
def yardstick(original, held_out):
    return Yardstick(original, held_out)


@pytest.fixture(scope="module")
def kl_closed(student, original, tokenizer, yardstick, tmp_path_factory):
    """Part of the KL that a short run closes, by its settings. The student starts from the same weights each time."""
    start = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    rewired = yardstick.measure(student, "rewired").kl

    def closed(steps, **settings):
        student.load_state_dict(start)
        out = tmp_path_factory.mktemp("demo")
        result = distilled(student, original, tokenizer, Settings(out=out, steps=steps, **settings))
        assert result.tokens == steps * 4 * 256
        now = yardstick.measure(student, "distilled").kl
        student.load_state_dict(start)
        return (rewired - now) / rewired

    return closed


def test_figures_are_those_of_the_packages_evaluation(student, original, held_out):
    windows = held_out[:5]
    figures = Yardstick(original, windows, batch=2).measure(student, "rewired")
    metrics = evaluate(student, windows, teacher=original)
    for ours, theirs in (
        (figures.cross_entropy, metrics.cross_entropy),
        (figures.kl, metrics.kl),
        (figures.agreement, metrics.agreement),
    ):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_original_is_at_no_distance_from_itself_and_the_rewired_model_is(student, original, yardstick):
    own = yardstick.measure(original, "original")
    assert (own.kl, own.agreement) == (0.0, 1.0)
    rewired = yardstick.measure(student, "rewired")
    assert rewired.kl > 0.1
    assert rewired.cross_entropy > own.cross_entropy + 0.1


def test_without_a_learning_rate_nothing_is_closed(kl_closed):
    assert kl_closed(2, learning_rate=0.0) == 0.0


def test_distillation_beats_plain_training_on_the_same_tokens(kl_closed):
    ours, plain = kl_closed(8), kl_closed(8, objective="cross_entropy")
    assert ours > 0.2
    assert plain <= ours - LEAST_LEAD


def test_the_saved_student_is_compared_bit_by_bit(student, original, held_out, tmp_path):
    folder, kept = tmp_path / "student", tmp_path / "logits.safetensors"
    student.save_pretrained(folder)
    write_down(student, held_out[:1, :32], kept)
    assert difference(folder, kept) is None

    changed = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        changed.model.norm.weight[0] += 1e-4
    changed.save_pretrained(tmp_path / "changed")
    assert "gives other logits" in difference(tmp_path / "changed", kept)

    original.save_pretrained(tmp_path / "original")
    assert "original wiring" in difference(tmp_path / "original", kept)


ORIGINAL, REWIRED = Figures(3.8, 0.0, 1.0), Figures(4.0, 0.4, 0.6)


@cache
def plan():
    return fxskip.plan(AutoModelForCausalLM.from_pretrained(MODEL_DIR), SPEC)


def outcome(distilled_to: Figures, *, reloads: bool = True) -> Outcome:
    figures = {"original": ORIGINAL, "rewired": REWIRED, "distilled": distilled_to}
    samples = dict.fromkeys(figures, "KING:\n<b>My lord</b> & all")
    result = Result(None, 150, 153_600, (), (), False, 100.0)
    return Outcome(plan(), DistillConfig(), figures, samples, result, reloads, 200.0)


def test_the_parts_closed_are_shares_of_what_the_rewiring_cost():
    good = outcome(Figures(3.85, 0.18, 0.7))
    assert good.cross_entropy_closed == pytest.approx(0.15 / 0.2)
    assert good.kl_closed == pytest.approx(0.22 / 0.4)
    assert shortfalls(good) == []


@pytest.mark.parametrize(
    ("figures", "reloads", "complaints"),
    [
        (REWIRED, True, ["closed 0.0% of the KL", "closed 0.0% of the cross-entropy"]),  # nothing was learned
        (Figures(3.85, 0.30, 0.65), True, ["closed 25.0% of the KL"]),  # as plain training does
        (Figures(3.95, 0.20, 0.65), True, ["closed 25.0% of the cross-entropy"]),
        (
            Figures(4.50, 0.90, 0.40),
            True,
            ["closed -125.0% of the KL", "closed -250.0% of the cross-entropy"],
        ),
        (Figures(float("nan"), float("nan"), 0.0), True, ["KL", "cross-entropy"]),
        (Figures(3.85, 0.18, 0.7), False, ["the same logits"]),
    ],
)
def test_a_run_that_falls_short_is_told_so(figures, reloads, complaints):
    found = shortfalls(outcome(figures, reloads=reloads))
    assert len(found) == len(complaints)
    assert all(expected in complaint for expected, complaint in zip(complaints, found, strict=True))


def test_a_model_that_was_not_rewired_is_no_success():
    stock = replace(outcome(ORIGINAL), figures=dict.fromkeys(("original", "rewired", "distilled"), ORIGINAL))
    assert ["was it rewired?" in complaint for complaint in shortfalls(stock)] == [True, True]


def test_report_and_exit_code(tmp_path, monkeypatch, capsys):
    """Nothing is trained: `run` is replaced, what comes after it is looked at."""
    (tmp_path / "distill").mkdir()
    (tmp_path / "distill" / "curves.png").write_bytes(b"picture")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path), "--tokens", "5000", "--lr", "1e-3"])
    asked = []
    monkeypatch.setattr(
        demo, "run", lambda settings: asked.append(settings) or outcome(Figures(3.85, 0.18, 0.7))
    )
    demo.main()
    assert asked == [Settings(out=tmp_path, steps=4, learning_rate=1e-3)]
    printed = capsys.readouterr().out
    assert "75.0 %" in printed and "55.0 %" in printed

    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    parsed = StrictHtml(html)
    assert {a.get("src") for tag, a in parsed.starts if tag == "img"} == {
        "data:image/png;base64,cGljdHVyZQ=="
    }
    assert "://" not in html and "<b>" not in html
    assert {"75.0 %", "55.0 %", "3.8500", "0.1800"} <= {text for tag, text in parsed.texts if tag == "td"}
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["passed"] and results["kl_closed"] == pytest.approx(0.55)

    monkeypatch.setattr(demo, "run", lambda settings: outcome(REWIRED))
    with pytest.raises(SystemExit) as stopped:
        demo.main()
    assert "closed 0.0% of the KL that the rewiring cost; 35% are needed" in str(stopped.value)
    assert not json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["passed"]


# --- the real thing: some five minutes a run on one thread ----------------------------------------


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    @cache
    def made(**settings) -> Outcome:
        return run(Settings(out=tmp_path_factory.mktemp("full"), **settings))

    return made


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_meets_its_gates(full_run):
    assert shortfalls(full_run()) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_control_learning_rate_zero(full_run):
    nothing = full_run(learning_rate=0.0)
    assert (nothing.kl_closed, nothing.cross_entropy_closed) == (0.0, 0.0)
    assert len(shortfalls(nothing)) == 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_control_plain_training(full_run):
    plain = full_run(objective="cross_entropy")
    assert plain.kl_closed <= full_run().kl_closed - LEAST_LEAD
    assert shortfalls(plain)
