import pytest
import torch
from torch import nn

from fxskip.distill import distill
from fxskip.distill.hidden_mse import hidden_mse, recorded_streams
from fxskip.errors import FxskipError
from tests.distill.tiny import perturbed_copy, teacher_model, windows


class TwoStreams(nn.Module):
    """Returns like a rewired layer: the full stream first, then another one."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y, x


def test_the_full_stream_is_taken_from_a_tuple_and_from_a_tensor():
    layers = nn.ModuleList([TwoStreams(nn.Linear(3, 3)), nn.Linear(3, 3)])
    x = torch.randn(1, 2, 3)
    with recorded_streams(layers) as streams:
        full, _ = layers[0](x)
        last = layers[1](full)
    layers[1](full)  # the hooks are gone: not recorded
    assert [stream is expected for stream, expected in zip(streams, [full, last], strict=True)] == [
        True,
        True,
    ]


def test_equals_the_formula_and_skips_padding():
    generator = torch.Generator().manual_seed(0)
    student = [torch.randn(2, 3, 4, generator=generator).requires_grad_() for _ in range(2)]
    teacher = [torch.randn(2, 3, 4, generator=generator) for _ in range(2)]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    kept = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    with torch.no_grad():
        student[0][1, 2] = torch.nan

    got = hidden_mse(student, teacher, mask)

    expected = 0.0
    for ours, theirs in zip(student, teacher, strict=True):
        squares = sum(((ours[at] - theirs[at]) ** 2).sum() for at in kept)
        expected += squares / sum((theirs[at] ** 2).sum() for at in kept) / 2
    torch.testing.assert_close(got, expected)
    got.backward()
    assert student[0].grad.isfinite().all()


def test_distill_reports_it_on_the_stream_after_every_layer():
    teacher = teacher_model()
    student = perturbed_copy(teacher)
    data = windows(4)
    streams = {}
    for name, model in (("student", student), ("teacher", teacher)):
        outputs = []
        handles = [
            layer.register_forward_hook(lambda m, a, out, to=outputs: to.append(out))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(data)
        streams[name] = outputs
        for handle in handles:
            handle.remove()
    expected = sum(
        ((s - t) ** 2).mean() / (t**2).mean()
        for s, t in zip(streams["student"], streams["teacher"], strict=True)
    ) / len(streams["teacher"])

    result = distill(student, data, teacher=teacher, config={"steps": 1}, progress=False)

    point = result.curve[0]
    assert point.hidden_mse == pytest.approx(float(expected), rel=1e-5)
    assert point.loss == pytest.approx(point.objective + 10.0 * point.hidden_mse, rel=1e-6)


def test_streams_that_cannot_be_compared_are_named():
    x = torch.randn(1, 2, 3, requires_grad=True)
    with pytest.raises(FxskipError, match="the student ran 1 layers, the teacher 2"):
        hidden_mse([x], [x, x], None)
    with pytest.raises(FxskipError, match=r"stream is \[1, 2, 3\], the teacher's \[1, 2, 4\]"):
        hidden_mse([x], [torch.randn(1, 2, 4)], None)
    with pytest.raises(FxskipError, match="no gradient reaches the student's last layer"):
        hidden_mse([x.detach()], [x.detach()], None)
