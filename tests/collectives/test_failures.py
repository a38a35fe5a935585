"""An error, on one process or on all, ends with a message that names the rank, and never with a hang."""

import os
import re
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import fxskip
from fxskip.collectives.landing import under_way
from fxskip.parallel import LayerMesh
from tests.collectives.deaths import run_until_all_end
from tests.collectives.spreads import assert_same_bits, in_mode, model, own_batch, regions, spread, step

LAYERS = 3
RANKS = 2
LIMIT_S = 60
"""Far less than the 30 minutes after which gloo itself gives up."""

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Mishap(Exception):
    """What goes wrong on purpose."""


class FailAt(TorchDispatchMode):
    """Raises at the n-th call of an operator."""

    def __init__(self, operator: str, call: int) -> None:
        super().__init__()
        self.operator, self.left = operator, call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= func._opname == self.operator
        if func._opname == self.operator and self.left == 0:
            self.go_wrong()
        return func(*args, **(kwargs or {}))

    def go_wrong(self) -> None:
        raise Mishap(f"{self.operator} went wrong")


class DieAt(FailAt):
    """Ends the process without a word."""

    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@cache
def student() -> nn.Module:
    return spread(model("mixtral", layers=LAYERS))


def on_a_group_of_its_own(module: nn.Module) -> nn.Module:
    """The student with exchanges over a new process group, for a group does not outlive an error on one rank."""
    group = dist.new_group(list(range(RANKS)))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("expert",))
    for region in regions(module):
        region.fxskip_mesh = LayerMesh(mesh)
    return module


def backward_of(module: nn.Module, rank: int) -> torch.Tensor:
    return module(**own_batch(rank), use_cache=False).loss  # type: ignore[no-any-return]


# --- all ranks have the same error ----------------------------------------------------------------


def all_fail_in_forward(rank: int) -> None:
    """In the attention of layer 1, under which its dispatch or the combine before it travels."""
    module = in_mode(student(), "scheduled")
    want = step(module, own_batch(rank), use_cache=False)
    with pytest.raises(Mishap) as caught, FailAt(ATTENTION, 2):
        module(**own_batch(rank), use_cache=False)
    assert under_way() == []
    (note,) = caught.value.__notes__
    said = (
        r"fxskip: decoder layer 1: waited for what was in flight: (dispatch|combine) of decoder layer [0-9]"
    )
    assert re.match(said, note), note
    assert_same_bits(step(module, own_batch(rank), use_cache=False), want)


def all_fail_in_backward(rank: int) -> None:
    """In the gradient of the attention of layer 1, under which gradients of an exchange travel."""
    module = in_mode(student(), "scheduled")
    want = step(module, own_batch(rank), use_cache=False)
    loss = backward_of(module, rank)
    said = "error ended a backward pass, with gradient of .* of decoder layer [01] in flight"
    with pytest.warns(UserWarning, match=said), pytest.raises(Mishap), FailAt(f"{ATTENTION}_backward", 2):
        loss.backward()
    assert under_way() == []
    assert_same_bits(step(module, own_batch(rank), use_cache=False), want)


# --- one rank alone ------------------------------------------------------------------------------


def all_fail_before_anything_is_sent(rank: int) -> None:
    """One goes on at once, and waits for the other, whose error is known and no reason to stop."""
    trained, inputs = on_a_group_of_its_own(student()), own_batch(rank)
    want = step(trained, inputs)
    with FailAt("pow", 1), pytest.raises(Mishap):  # in the first norm
        trained(**inputs)
    time.sleep(3 * rank)
    assert_same_bits(step(trained, inputs), want)


def one_fails_in_forward(rank: int) -> None:
    module = on_a_group_of_its_own(in_mode(student(), "scheduled"))
    if rank == 1:
        with pytest.raises(Mishap), FailAt(ATTENTION, 2):
            module(**own_batch(rank), use_cache=False)
        with pytest.raises(fxskip.CollectiveError, match="cannot go on together"):
            module(**own_batch(rank), use_cache=False)
        return
    with pytest.raises(fxskip.CollectiveError) as caught:
        module(**own_batch(rank), use_cache=False)
    text = str(caught.value)
    assert re.search("of decoder layer [0-9]", text) and "rank 1 had an error and stopped" in text
    assert f"rank 1, decoder layer 1: Mishap: {ATTENTION} went wrong" in text
    with pytest.raises(fxskip.CollectiveError, match="cannot go on together"):
        module(**own_batch(rank), use_cache=False)


def one_fails_in_backward(rank: int) -> None:
    module = on_a_group_of_its_own(in_mode(student(), "scheduled"))
    loss = backward_of(module, rank)
    if rank == 1:
        with (
            pytest.warns(UserWarning, match="in flight"),
            pytest.raises(Mishap),
            FailAt(f"{ATTENTION}_backward", 2),
        ):
            loss.backward()
        return
    with pytest.raises(
        fxskip.CollectiveError, match=r"gradient of .* of decoder layer [0-9]: waited for in vain: rank 1"
    ):
        loss.backward()


def one_fails_in_an_explicit_backward(rank: int) -> None:
    """The others learn which step of which layer it was, and the error."""
    explicit = spread(model("mixtral", layers=LAYERS), schedule={"backward": "explicit"})
    loss = backward_of(on_a_group_of_its_own(explicit), rank)
    if rank == 1:
        with pytest.raises(Mishap), FailAt(f"{ATTENTION}_backward", 2):
            loss.backward()
        return
    with pytest.raises(fxskip.CollectiveError, match="waited for in vain: rank 1") as caught:
        loss.backward()
    said = rf"rank 1, backward of step '.*' of decoder layer 1: Mishap: {ATTENTION}_backward went wrong"
    assert re.search(said, str(caught.value)), caught.value


def one_has_other_weights(rank: int) -> None:
    said = r"different models[\s\S]*rank 0: .* values [\s\S]*rank 1: .* values "
    with pytest.raises(fxskip.PassError, match=said):
        spread(model("mixtral", layers=2, seed=rank))


def one_has_another_spec(rank: int) -> None:
    with pytest.raises(fxskip.PassError, match=r"different models[\s\S]*rank 0: spec[\s\S]*rank 1: spec"):
        spread(model("mixtral", layers=2), ("farskip", "ladder")[rank])


def one_computes_without_gradients(rank: int) -> None:
    """It would leave the others waiting in their backward pass."""
    module = on_a_group_of_its_own(in_mode(student(), "scheduled"))
    with pytest.raises(fxskip.CollectiveError) as caught, torch.set_grad_enabled(rank == 0):
        module(**own_batch(rank), use_cache=False)
    text = str(caught.value)
    assert "rank 0: decoder layer 0, hidden states float32[..., 64] with gradients" in text
    assert "rank 1: decoder layer 0, hidden states float32[..., 64] without gradients" in text


def one_is_killed(rank: int) -> None:
    module = on_a_group_of_its_own(in_mode(student(), "scheduled"))
    step(module, own_batch(rank), use_cache=False)
    if rank == 1:
        with DieAt(ATTENTION, 2):
            module(**own_batch(rank), use_cache=False)
    with pytest.raises(fxskip.CollectiveError) as caught:
        module(**own_batch(rank), use_cache=False)
    assert re.search("of decoder layer [0-9]", str(caught.value))
    assert "no word from rank 1: killed" in str(caught.value)


def one_ends_early(rank: int) -> None:
    """With fewer batches than the others, and no error."""
    module = on_a_group_of_its_own(in_mode(student(), "scheduled"))
    with torch.no_grad():
        module(**own_batch(rank), use_cache=False)
        if rank == 1:
            return
        with pytest.raises(fxskip.CollectiveError, match="waited for in vain: rank 1 ended") as caught:
            module(**own_batch(rank), use_cache=False)
    text = str(caught.value)
    assert re.search("rank 1, at its exit: its process ended, after [0-9]+ collectives of the group", text)
    assert "equally often" in text and "killed" not in text


def one_leaves_a_backward_pass_out(rank: int) -> None:
    """gloo ends the process that then issues a smaller exchange than the other; this one says what that may be."""
    module = on_a_group_of_its_own(in_mode(student(), "scheduled"))
    loss = backward_of(module, rank)
    if rank == 1:
        backward_of(module, rank)
    with pytest.raises(fxskip.CollectiveError, match="no word from rank 1: killed, .* or ended") as caught:
        loss.backward()
    assert "leaves out a forward or backward pass of the others" in str(caught.value)


def one_leaves_average_gradients_out(rank: int) -> None:
    """It waits in its next forward pass for the others, which wait for it."""
    module = on_a_group_of_its_own(in_mode(student(), "scheduled"))
    backward_of(module, rank).backward()
    fxskip.average_gradients(module)  # the first call makes process groups, on all ranks together
    with pytest.raises(
        fxskip.CollectiveError, match="make different calls, and wait for each other"
    ) as caught:
        if rank == 0:
            fxskip.average_gradients(module)
        backward_of(module, rank)
    text = str(caught.value)
    assert "rank 0: waits for comparison of what trains" in text
    assert "rank 1: waits for expert counts of decoder layer 0" in text


def one_leaves_the_first_average_out(rank: int) -> None:
    """In which the others make process groups."""
    module = on_a_group_of_its_own(in_mode(student(), "scheduled"))
    backward_of(module, rank).backward()
    said = "make different calls, and wait for each other"
    with pytest.raises(fxskip.CollectiveError, match=said) as caught:
        if rank == 0:
            fxskip.average_gradients(module)
        backward_of(module, rank)
    text = str(caught.value)
    assert "rank 0: waits for making of a group for gradients (expert)" in text
    assert "rank 1: waits for expert counts of decoder layer 0" in text


def _all_of(checks: tuple[Callable[[int], None], ...], folder: Path, rank: int) -> None:
    for check in checks:
        (folder / f"rank{rank}").write_text(check.__name__)
        begun = time.monotonic()
        check(rank)
        assert time.monotonic() - begun < LIMIT_S, f"{check.__name__} took longer than {LIMIT_S} s"
    (folder / f"rank{rank}").write_text("done")


def run(checks: tuple[Callable[[int], None], ...], folder: Path) -> tuple[dict[int, int], list[str]]:
    ends = run_until_all_end(partial(_all_of, checks, folder), RANKS, folder / "store", limit_s=300)
    return ends, [(folder / f"rank{rank}").read_text() for rank in range(RANKS)]


@pytest.mark.distributed
@pytest.mark.slow
def test_errors_and_a_killed_process(tmp_path: Path) -> None:
    ends, last = run(
        (all_fail_in_forward, all_fail_before_anything_is_sent, one_fails_in_forward, one_is_killed), tmp_path
    )
    assert last == ["done", "one_is_killed"]
    assert ends == {0: 0, 1: -signal.SIGKILL}


@pytest.mark.distributed
@pytest.mark.slow
def test_a_process_that_ends_early(tmp_path: Path) -> None:
    ends, last = run((one_ends_early,), tmp_path)
    assert (ends, last) == ({0: 0, 1: 0}, ["done", "done"])


@pytest.mark.distributed
@pytest.mark.slow
def test_a_backward_pass_left_out(tmp_path: Path) -> None:
    ends, last = run((one_leaves_a_backward_pass_out,), tmp_path)
    assert (ends, last) == ({0: 0, 1: -signal.SIGABRT}, ["done", "one_leaves_a_backward_pass_out"])


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    ends, last = run((one_leaves_average_gradients_out, one_leaves_the_first_average_out), tmp_path)
    assert (ends, last) == ({0: 0, 1: 0}, ["done", "done"])


@pytest.mark.distributed
@pytest.mark.slow
def test_more_errors(tmp_path: Path) -> None:
    checks = (
        all_fail_in_backward,
        one_fails_in_backward,
        one_fails_in_an_explicit_backward,
        one_has_other_weights,
        one_has_another_spec,
        one_computes_without_gradients,
    )
    ends, last = run(checks, tmp_path)
    assert (ends, last) == ({0: 0, 1: 0}, ["done", "done"])
