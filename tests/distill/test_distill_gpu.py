import pytest
import torch

from fxskip.distill import distill
from tests.distill.tiny import differing, perturbed_copy, teacher_model, weights, windows

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_random_state_is_left_alone_and_a_finished_run_is_read(tmp_path):
    teacher = teacher_model(attention_dropout=0.3).cuda()
    config = {"steps": 4, "save_every": 2, "learning_rate": 2e-3}
    state = torch.cuda.get_rng_state()
    results = []
    for out in (None, tmp_path):
        student = perturbed_copy(teacher_model(attention_dropout=0.3)).cuda()
        results.append(distill(student, windows(), teacher=teacher, config=config, out=out, progress=False))
    assert torch.equal(state, torch.cuda.get_rng_state())
    losses = [[point.loss for point in result.curve] for result in results]
    torch.testing.assert_close(*losses)
    again = perturbed_copy(teacher_model(attention_dropout=0.3)).cuda()
    distill(again, windows(), teacher=teacher, config=config, out=tmp_path, progress=False)
    assert not differing(weights(again), weights(student))
