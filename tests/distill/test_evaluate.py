import pytest
import torch

from fxskip.distill import evaluate
from fxskip.errors import FxskipError
from tests.distill.tiny import perturbed_copy, teacher_model, windows


def expected_metrics(student, teacher, rows):
    """One window at a time, without padding: dense logits in float64."""
    sums = torch.zeros(4, dtype=torch.float64)
    for row in rows:
        ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
        with torch.no_grad():
            q, p = (m(ids[None]).logits[0, :-1].double().softmax(-1) for m in (student, teacher))
        for t, target in enumerate(labels[1:].tolist()):
            if target != -100:
                kl = (p[t] * (p[t].log() - q[t].log())).sum()
                sums += torch.stack([torch.ones(()), -q[t, target].log(), kl, q[t].argmax() == p[t].argmax()])
    return sums[0].item(), *(sums[1:] / sums[0]).tolist()


@pytest.mark.parametrize(("batch_size", "chunk_tokens"), [(1, 1000), (3, 5)])
def test_equals_the_formula_on_padded_and_partly_labelled_windows(batch_size, chunk_tokens):
    teacher = teacher_model()
    student = perturbed_copy(teacher).train()
    rows = [{"input_ids": row[: 16 - 3 * index]} for index, row in enumerate(windows(4))]
    rows[0]["labels"] = rows[0]["input_ids"].masked_fill(torch.arange(16) < 9, -100)
    metrics = evaluate(student, rows, teacher=teacher, batch_size=batch_size, chunk_tokens=chunk_tokens)
    assert student.training
    expected = expected_metrics(student.eval(), teacher, rows)
    got = metrics.tokens, metrics.cross_entropy, metrics.kl, metrics.agreement
    assert got == pytest.approx(expected, rel=1e-5)


def test_of_a_model_with_itself():
    teacher = teacher_model()
    metrics = evaluate(teacher, windows(), teacher=perturbed_copy(teacher, noise=0.0))
    assert metrics.kl == pytest.approx(0.0, abs=1e-7)
    assert metrics.agreement == 1.0
    alone = evaluate(teacher, windows())
    assert (alone.kl, alone.agreement) == (None, None)
    assert alone.cross_entropy == metrics.cross_entropy


def test_a_bad_size_is_named():
    with pytest.raises(FxskipError, match="batch_size is 0"):
        evaluate(teacher_model(), windows(), batch_size=0)
