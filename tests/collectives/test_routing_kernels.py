"""Index work of routed experts: the kernels, on a GPU or in Triton's interpreter, and PyTorch in their place."""

import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fxskip.collectives.replicated_tokens import choices_of
from fxskip.collectives.routing import Order, implementation, order_by_expert, permute, sort_pairs, unpermute
from tests.collectives.device import DEVICE
from tests.compiled import lines_of

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
BOTH = pytest.mark.parametrize("chosen", [pytest.param("triton", marks=NEEDS_TRITON), "torch"])
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
]


@pytest.fixture(autouse=True)
def default_device():
    with torch.device(DEVICE):
        torch.manual_seed(0)
        yield


def routed(tokens, choices, experts):
    """[T, K], a token's experts all different."""
    return torch.rand(tokens, experts).argsort(1)[:, :choices].contiguous()


def partial_order(tokens, choices):
    """Every third pair has no row."""
    pairs = torch.arange(tokens * choices)
    return Order.of(pairs[pairs % 3 != 1], tokens * choices, choices)


# --- the sort ---

INDICES = {
    "blocks and a rest": lambda: routed(101, 6, 64),
    "one pair": lambda: routed(1, 1, 1),
    "no tokens": lambda: routed(0, 2, 4),
    "one expert gets all": lambda: torch.full((300, 1), 2),
    "the last of three experts gets none": lambda: torch.randint(2, (70, 3)),
    "exactly two blocks": lambda: routed(128, 4, 7),
    "a column of a larger tensor": lambda: torch.randint(5, (40, 6))[:, ::2],
    "many experts": lambda: routed(30, 8, 1000),
}


@BOTH
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", INDICES)
def test_sorts_as_a_stable_sort_does(case, dtype, chosen):
    index = INDICES[case]().to(dtype)
    experts = max(3, int(index.max()) + 1 if index.numel() else 0)
    with implementation(chosen):
        found = sort_pairs(index, experts)
    want = torch.sort(index.flatten().cpu(), stable=True).indices
    order = found.order
    assert order.pair_of_row.dtype == order.row_of_pair.dtype == found.counts.dtype == torch.int64
    assert torch.equal(order.pair_of_row.cpu(), want)
    assert torch.equal(order.row_of_pair.cpu()[want], torch.arange(len(want), device="cpu"))
    assert found.counts.tolist() == [(index == e).sum().item() for e in range(experts)]


@pytest.mark.skipif(DEVICE == "cuda", reason="an assertion that fails on a GPU ends the process's use of it")
@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_index_that_is_no_expert_is_refused(wrong):
    """By PyTorch; that the kernels check too is seen in what they are compiled to: the interpreter does not."""
    with pytest.raises(RuntimeError, match="out of bounds"):
        sort_pairs(torch.tensor([[0, 1], [wrong, 3]]), 4)


@BOTH
@pytest.mark.parametrize(
    "lengths",
    [[[3]], [[0, 0, 5]], [[2, 0, 1], [0, 0, 0], [1, 700, 4]], [[0, 0], [0, 0]]],
    ids=["one run", "empty experts", "an empty rank and a long run", "no rows"],
)
def test_runs_of_ranks_are_put_in_the_order_of_experts(lengths, chosen):
    # As the counts arrive: a column of something else stands beside them.
    told = torch.tensor([[*row, 10**12] for row in lengths])[:, :-1]
    rows = sum(map(sum, lengths))
    with implementation(chosen):
        order, ends = order_by_expert(told, rows)
    owner = [(e, r) for r, row in enumerate(lengths) for e, length in enumerate(row) for _ in range(length)]
    want = sorted(range(rows), key=owner.__getitem__)
    assert order.pair_of_row.tolist() == want
    assert order.back.pair_of_row[order.pair_of_row].tolist() == list(range(rows))
    assert ends.dtype == torch.int32
    assert ends.tolist() == [sum(e <= last for e, _ in owner) for last in range(len(lengths[0]))]


@BOTH
def test_own_choices_are_the_pairs_of_own_experts_in_their_order(chosen):
    index = routed(23, 3, 6)
    with implementation(chosen):
        found = choices_of(sort_pairs(index, 6), 2, 4)
    flat = index.flatten().tolist()
    want = [pair for expert in (2, 3) for pair, of in enumerate(flat) if of == expert]
    assert found.order.pair_of_row.tolist() == want
    assert found.order.row_of_pair.tolist() == [want.index(p) if p in want else -1 for p in range(69)]
    assert found.own_expert_of_each_row().tolist() == [flat[pair] - 2 for pair in want]
    assert found.by_own_expert(2)[1].tolist() == [flat.count(2), flat.count(2) + flat.count(3)]


# --- rows moved, weighed, added ---


class Case:
    """Tokens whose choices are multiplied by 3 on their way, in one type, with weights in another."""

    def __init__(self, order, width, dtype, weights_dtype):
        pairs = len(order.row_of_pair)
        self.order, self.dtype = order, dtype
        self.hidden = torch.randn(pairs // order.choices, width).to(dtype).requires_grad_()
        self.weights = torch.rand(pairs // order.choices, order.choices).to(weights_dtype).requires_grad_()
        self.gradient = torch.randn(pairs // order.choices, width).to(dtype)

    def outcome(self, chosen):
        with implementation(chosen):
            rows = permute(self.hidden, self.order)
            out = unpermute(rows * 3, self.order, self.weights, self.dtype)
        return (
            rows.detach(),
            out.detach(),
            *torch.autograd.grad(out, (self.hidden, self.weights), self.gradient),
        )

    def expected(self):
        """The formula in float64, and for each result the size of its terms, of which errors are shares."""
        x, w, g = (t.detach().double() for t in (self.hidden, self.weights, self.gradient))
        there = (self.order.row_of_pair >= 0).view_as(w).double()
        rows = x[self.order.pair_of_row // self.order.choices]
        dot = (g * 3 * x).sum(1, keepdim=True) * there
        values = rows, 3 * x * (w * there).sum(1, keepdim=True), 3 * g * (w * there).sum(1, keepdim=True), dot
        sizes = *(v.abs() for v in values[:3]), (g * 3 * x).abs().sum(1, keepdim=True) * there
        return zip(values, sizes, strict=True)


@BOTH
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("weights", ["float32", "like rows"])
@pytest.mark.parametrize(
    ("tokens", "choices", "width", "some"), [(7, 3, 40, False), (4, 2, 1100, True), (3, 1, 8, False)], ids=str
)
def test_equals_the_formula(tokens, choices, width, some, weights, dtype, chosen):
    order = partial_order(tokens, choices) if some else sort_pairs(routed(tokens, choices, 5), 5).order
    case = Case(order, width, dtype, torch.float32 if weights == "float32" else dtype)
    # Up to four roundings, of which the interpreter makes cuts, for bfloat16: twice the error.
    share = 8 * max(torch.finfo(dtype).eps, torch.finfo(case.weights.dtype).eps)
    for got, (want, size) in zip(case.outcome(chosen), case.expected(), strict=True):
        assert got.shape == want.shape
        assert bool(((got.double() - want).abs() <= share * size).all())


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", FLOATS if DEVICE == "cuda" else (torch.float16, torch.float32))
def test_choices_are_added_in_their_order_in_float32_and_rounded_once(dtype):
    case = Case(sort_pairs(routed(9, 6, 8), 8).order, 50, dtype, torch.float32)
    rows, out, d_hidden, d_weights = case.outcome("triton")
    by_choice = (case.hidden.detach() * 3).float().unsqueeze(1) * case.weights.detach().unsqueeze(-1)
    assert torch.equal(out, added(by_choice).to(dtype))
    d_rows = (case.gradient.float().unsqueeze(1) * case.weights.detach().unsqueeze(-1)).to(dtype)
    assert torch.equal(d_hidden, added((d_rows * 3).float()).to(dtype))
    assert torch.equal(rows, case.hidden.detach()[case.order.pair_of_row // 6])


def added(by_choice):
    total = torch.zeros_like(by_choice[:, 0])
    for choice in range(by_choice.shape[1]):
        total = total + by_choice[:, choice]
    return total


@BOTH
def test_no_tokens_and_no_rows(chosen):
    for order in (sort_pairs(routed(0, 2, 4), 4).order, Order.of(torch.arange(0), 6, 2)):
        rows, out, d_hidden, d_weights = Case(order, 12, torch.float32, torch.float32).outcome(chosen)
        assert rows.shape == (0, 12)
        assert out.shape == d_hidden.shape == (len(order.row_of_pair) // 2, 12)
        assert not (out.any() or d_hidden.any() or d_weights.any())


@NEEDS_TRITON
def test_keeps_no_rows_for_a_gradient_that_nobody_wants():
    order = sort_pairs(routed(7, 2, 4), 4).order
    hidden, rows, weights = torch.randn(7, 16), torch.randn(14, 16), torch.rand(7, 2)

    def kept(function):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.shape) or t, lambda t: t):
            out = function()
        out.sum().backward()
        return sorted(tuple(shape) for shape in found)

    with implementation("triton"):
        assert kept(lambda: permute(hidden.requires_grad_(), order)) == [(14,), (14,)]
        both = lambda: unpermute(rows.requires_grad_(), order, weights.requires_grad_(), torch.float32)  # noqa: E731
        assert kept(both) == [(7, 2), (14,), (14, 16)]
        assert kept(lambda: unpermute(rows, order, weights.detach(), torch.float32)) == [(7, 2), (14,)]
        assert kept(lambda: unpermute(rows.detach(), order, weights, torch.float32)) == [(14,), (14, 16)]


@BOTH
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_runs_without_gradients_and_under_autocast(context, chosen):
    case = Case(sort_pairs(routed(7, 3, 5), 5).order, 24, torch.float32, torch.float32)
    want = case.outcome(chosen)
    with context(), torch.autocast(DEVICE, torch.bfloat16), implementation(chosen):
        rows = permute(case.hidden, case.order)
        out = unpermute(rows * 3, case.order, case.weights, torch.float32)
    assert torch.equal(out, want[1])
    if context is nullcontext:
        got = torch.autograd.grad(out, (case.hidden, case.weights), case.gradient)
        assert all(map(torch.equal, got, want[2:]))
    else:
        assert not out.requires_grad


@BOTH
def test_recomputed_under_checkpointing_it_gives_the_same_bits(chosen):
    index = routed(33, 4, 6)
    case = Case(sort_pairs(index, 6).order, 24, torch.float32, torch.float32)

    def layer(hidden, weights):
        with implementation(chosen):
            order = sort_pairs(index, 6).order
            return unpermute(permute(hidden, order) * 3, order, weights, torch.float32)

    out = checkpoint(layer, case.hidden, case.weights, use_reentrant=False)
    got = torch.autograd.grad(out, (case.hidden, case.weights), case.gradient)
    assert all(map(torch.equal, got, case.outcome(chosen)[2:]))


# --- the host ---


class Operations(TorchDispatchMode):
    """Names of the operations that PyTorch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func._schema.name.split("::")
        self.names += [name] * (space == "aten" and not name.startswith("sym_"))
        return func(*args, **kwargs or {})


def whole_layer(index, hidden, weights):
    """Sort, move, put in the order of experts as if two ranks had sent it, and all of that back."""
    found = sort_pairs(index, 8)
    rows = permute(hidden, found.order)
    order, ends = order_by_expert(found.counts.view(2, 4), index.numel())
    made = permute(permute(rows, order) * ends[-1], order.back)
    return unpermute(made, found.order, weights, hidden.dtype)


def test_reads_no_value_on_the_host():
    """Fake tensors have none: whatever waits for the device raises."""
    with FakeTensorMode(), implementation("torch"):
        index, hidden, weights = torch.randint(8, (6, 2)), torch.randn(6, 16), torch.rand(6, 2)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            choices_of(sort_pairs(index, 8), 4, 8)
        hidden.requires_grad_(), weights.requires_grad_()
        whole_layer(index, hidden, weights).sum().backward()


@NEEDS_TRITON
def test_few_launches_and_no_value_read_on_the_host_around_kernels(monkeypatch):
    from fxskip.collectives import routing_kernels

    launched = []

    class Launch:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            assert all(isinstance(size, int) for size in grid)
            return lambda *args, **kwargs: launched.append(self.name)

    names = ("count_blocks", "place_pairs", "order_runs", "gather_rows", "add_choices", "weigh_back")
    for name in names:
        monkeypatch.setattr(routing_kernels, name, Launch(name))
    with FakeTensorMode(), implementation("triton"):
        index, hidden, weights = torch.randint(8, (6, 2)), torch.randn(6, 16), torch.rand(6, 2)
        hidden.requires_grad_(), weights.requires_grad_()
        with Operations() as seen:
            out = whole_layer(index, hidden, weights)
        assert launched == [
            "count_blocks", "place_pairs", "gather_rows", "order_runs", "gather_rows", "gather_rows", "add_choices",
        ]  # fmt: skip
        # Beside views, and what the test itself multiplies by, PyTorch adds up one table and allocates.
        nothing = {
            "detach",
            "view",
            "unbind",
            "select",
            "alias",
            "promote_types",
            "empty",
            "new_empty",
            "mul",
        }
        assert [n for n in seen.names if n not in nothing] == ["cumsum"], seen.names
        launched.clear()
        out.sum().backward()
        assert launched == ["weigh_back", "add_choices", "add_choices", "add_choices"]


@pytest.mark.gpu(1)
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_the_device_is_not_waited_for():
    index, hidden, weights = routed(64, 2, 8), torch.randn(64, 16), torch.rand(64, 2)
    hidden.requires_grad_(), weights.requires_grad_()
    whole_layer(index, hidden, weights).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole_layer(index, hidden, weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@NEEDS_TRITON
@pytest.mark.parametrize(("which", "kernels"), [("bf16", 6), pytest.param("all", 15, marks=pytest.mark.slow)])
def test_kernels_compile_for_a_gpu_and_the_sort_checks_its_input(which, kernels, tmp_path):
    lines = lines_of("collectives/compile_routing.py", which, tmp_path)
    assert len(lines) == kernels
    assert [line.split()[0] for line in lines if "assertion" in line] == ["count_blocks"]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    sizes = {"tokens": 32, "width": 32, "experts": 4, "choices": 2, "inner": 16, "repeats": 2}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "routing.py", "--out", tmp_path / "out.json", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    shown = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"balanced", "kernels", "torch", "sort_pairs", "unpermute"} <= shown
