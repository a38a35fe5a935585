import copy
import math

import pytest
import torch
from transformers import Cohere2Config, Cohere2ForCausalLM, Gemma2Config, Gemma2ForCausalLM

from fxskip.distill import distill
from fxskip.errors import FxskipError
from tests.distill.tiny import differing, perturbed_copy, teacher_model, weights, windows

SHORT = {"steps": 30, "learning_rate": 5e-3, "eval_every": 10}
CONTROL = {"objective": "cross_entropy", "hidden_weight": 0}


@pytest.fixture(scope="module")
def teacher():
    return teacher_model()


def test_a_perturbed_copy_comes_back_and_nothing_else_changes(teacher):
    student = perturbed_copy(teacher)
    student.model.norm.train()  # a mode of one module alone must survive too
    teacher.model.layers[0].train()
    teacher.lm_head.weight.requires_grad_(False)
    before = weights(teacher)
    modes = [module.training for model in (student, teacher) for module in model.modules()]
    flags = [p.requires_grad for p in teacher.parameters()]
    random_state = torch.get_rng_state()

    config = {"steps": 40, "learning_rate": 2e-3, "eval_every": 10}
    options = {"config": config, "eval_data": windows(seed=3), "progress": False}
    result = distill(student, windows(160), teacher=teacher, **options)

    first, last = result.evaluations[0].metrics, result.evaluations[-1].metrics
    assert last.kl < 0.5 * first.kl
    assert last.agreement > first.agreement
    assert result.metrics == last
    assert [e.step for e in result.evaluations] == [0, 10, 20, 30, 40]
    assert (result.steps, result.tokens, len(result.curve)) == (40, 40 * 4 * 16, 40)
    assert not differing(before, weights(teacher))
    assert modes == [module.training for model in (student, teacher) for module in model.modules()]
    assert flags == [p.requires_grad for p in teacher.parameters()]
    assert all(p.grad is None for model in (student, teacher) for p in model.parameters())
    assert torch.equal(random_state, torch.get_rng_state())
    teacher.lm_head.weight.requires_grad_(True)
    teacher.eval()


def test_learning_rate_zero_changes_nothing(teacher):
    student = perturbed_copy(teacher)
    before = weights(student)
    options = {"config": SHORT | {"learning_rate": 0}, "eval_data": windows(seed=3), "progress": False}
    result = distill(student, windows(), teacher=teacher, **options)
    assert not differing(before, weights(student))
    assert len({evaluation.metrics for evaluation in result.evaluations}) == 1


def plain_loop(student, teacher, batches, *, rates, objective):
    """The recipe once more, from its definition: dense logits, autograd, torch's own optimizer."""
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    student.train()
    losses = []
    for batch, rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        ours = student(batch["input_ids"], attention_mask=batch["attention_mask"])
        counted = (batch["labels"][:, 1:] != -100) & (batch["attention_mask"][:, :-1] == 1)
        logq = ours.logits[:, :-1][counted].log_softmax(-1)
        loss = -logq.gather(1, batch["labels"][:, 1:][counted][:, None]).mean()
        if objective == "kl":
            with torch.no_grad():
                theirs = teacher(batch["input_ids"], attention_mask=batch["attention_mask"])
            logp = theirs.logits[:, :-1][counted].log_softmax(-1)
            loss = (logp.exp() * (logp - logq)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("objective", ["kl", "cross_entropy"])
def test_equals_a_loop_written_from_the_recipe(teacher, objective):
    rows = [{"input_ids": row[:-index] if index else row} for index, row in enumerate(windows(4))]
    rows[1]["labels"] = rows[1]["input_ids"].clone()
    rows[1]["labels"][:7] = -100
    student, twin = perturbed_copy(teacher), perturbed_copy(teacher)
    config = {
        "objective": objective,
        "hidden_weight": 0,
        "steps": 5,
        "learning_rate": 2e-3,
        "warmup_fraction": 0.4,
        "clip_norm": 0.5,
        "weight_decay": 0.01,
        "chunk_tokens": 7,
    }
    result = distill(student, rows, teacher=teacher, config=config, progress=False)

    # All four windows are in every batch, so that their order does not matter to the mean.
    pad = torch.nn.functional.pad
    batch = {
        "input_ids": torch.stack([pad(row["input_ids"], (0, 16 - len(row["input_ids"]))) for row in rows]),
        "attention_mask": torch.stack([(torch.arange(16) < len(row["input_ids"])).long() for row in rows]),
        "labels": torch.stack(
            [pad(r.get("labels", r["input_ids"]), (0, 16 - len(r["input_ids"])), value=-100) for r in rows]
        ),
    }
    # Two steps of warm-up, then three of the cosine that would be 0 at the sixth.
    rates = [1e-3, 2e-3] + [1e-3 * (1 + math.cos(math.pi * k / 3)) for k in range(3)]
    losses = plain_loop(twin, teacher, [batch] * 5, rates=rates, objective=objective)
    torch.testing.assert_close([point.loss for point in result.curve], losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close([point.learning_rate for point in result.curve], rates)
    for name, expected in weights(twin).items():
        torch.testing.assert_close(weights(student)[name], expected, rtol=1e-3, atol=2e-5)
    assert result.curve[0].tokens == sum(len(row["input_ids"]) for row in rows)


def test_the_cross_entropy_control_learns_text_and_needs_no_teacher(teacher):
    text = (torch.arange(16)[None, :] + torch.arange(12)[:, None]) % 7
    config = SHORT | CONTROL
    result = distill(
        perturbed_copy(teacher), text, teacher=None, config=config, eval_data=text, progress=False
    )
    first, last = result.evaluations[0].metrics, result.evaluations[-1].metrics
    assert last.cross_entropy < 0.5 * first.cross_entropy
    assert last.kl is None


@pytest.mark.parametrize("wanted", [True, False])
def test_kernels_are_deterministic_while_it_trains_if_the_recipe_says_so(teacher, wanted):
    # With several threads a run is otherwise not repeatable, let alone resumable: experts add up in any order.
    student = perturbed_copy(teacher)
    seen = set()
    student.model.register_forward_hook(lambda *_: seen.add(torch.are_deterministic_algorithms_enabled()))
    config = SHORT | {"steps": 1, "deterministic": wanted}
    distill(student, windows(), teacher=None, config=config | CONTROL, progress=False)
    assert seen == {False, wanted}  # False: the look at the model before the run
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_gradient_checkpointing_gives_the_same_weights(teacher):
    plain, checkpointed = perturbed_copy(teacher), perturbed_copy(teacher)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for student in (plain, checkpointed):
        distill(student, windows(), teacher=teacher, config=SHORT | {"steps": 3}, progress=False)
    for name, expected in weights(plain).items():
        torch.testing.assert_close(weights(checkpointed)[name], expected)


def test_early_stopping_counts_evaluations_without_improvement(teacher):
    stopping = {"metric": "agreement", "patience": 3, "min_delta": 0.0}
    config = SHORT | {"learning_rate": 0, "eval_every": 2, "early_stopping": stopping}
    options = {"teacher": teacher, "config": config, "progress": False}
    result = distill(perturbed_copy(teacher), windows(), eval_data=windows(seed=3), **options)
    assert result.stopped_early
    assert result.steps == 6  # the evaluation at step 0 is the best; those at 2, 4 and 6 are no better
    with pytest.raises(FxskipError, match="no eval_data"):
        distill(perturbed_copy(teacher), windows(), **options)


def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_checkpoint(teacher, tmp_path):
    student = perturbed_copy(teacher)
    config = SHORT | {"learning_rate": 1e30, "warmup_fraction": 0.0, "save_every": 1}
    with pytest.raises(FxskipError, match=r"step 2: the loss is (nan|inf)") as error:
        distill(student, windows(), teacher=teacher, config=config, out=tmp_path, progress=False)
    assert str(tmp_path / "checkpoint.pt") in str(error.value)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert kept["state"]["step"] == 1


def test_low_precision_weights_are_warned_about(teacher):
    student = perturbed_copy(teacher).bfloat16()
    with pytest.warns(UserWarning, match="trained parameters are torch.bfloat16"):
        distill(student, windows(), teacher=teacher, config=SHORT | {"steps": 1}, progress=False)


def gemma():
    size = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return Gemma2ForCausalLM(Gemma2Config(**size, num_attention_heads=2, num_key_value_heads=1, head_dim=8))


def cohere():
    size = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return Cohere2ForCausalLM(
        Cohere2Config(**size, num_attention_heads=2, num_key_value_heads=1, logit_scale=0.5)
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [(gemma, "student caps its logits"), (cohere, r"student gives logits that differ from head\(hidden\)")],
)
def test_logits_that_are_not_the_heads_are_refused(model, message):
    student = model()
    with pytest.raises(FxskipError, match=message):
        distill(student, windows(), teacher=copy.deepcopy(student), progress=False)


def test_unusable_arguments_are_named(teacher):
    student = perturbed_copy(teacher)
    with pytest.raises(TypeError, match="teacher is a str; only a model of transformers"):
        distill(student, windows(), teacher="cache/")
    with pytest.raises(TypeError, match="teacher is None, and objective kl needs one"):
        distill(student, windows(), teacher=None)
    with pytest.raises(TypeError, match="student is a Linear"):
        distill(torch.nn.Linear(2, 2), windows(), teacher=teacher)
    with pytest.raises(FxskipError, match=r"share \d+ parameters"):
        distill(teacher, windows(), teacher=teacher)
    with pytest.raises(FxskipError, match="vocabulary is 61, the teacher's 60"):
        distill(student, windows(), teacher=teacher_model(vocab_size=60))
    with pytest.raises(FxskipError, match="no parameter of the student requires a gradient"):
        distill(copy.deepcopy(student).requires_grad_(False), windows(), teacher=teacher)
    with pytest.raises(FxskipError, match="the student ran 2 layers, the teacher 3"):
        distill(student, windows(), teacher=teacher_model(num_hidden_layers=3), progress=False)
