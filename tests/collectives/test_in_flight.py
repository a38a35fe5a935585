"""One collective from its start to its wait, with a transport of the test's own, in one process."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxskip
from fxskip.collectives import failures
from fxskip.collectives.in_flight import Flight, start, wait
from fxskip.collectives.landing import Issued, drain, poisoned_buffers, under_way
from fxskip.collectives.measuring import Place, Sent


class Arrival:
    """Work that is done after some waits, or fails."""

    def __init__(self, buffer: Tensor, result: Tensor, waits: int, error: str | None) -> None:
        self.buffer, self.result, self.left, self.error = buffer, result, waits, error

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        self.left -= 1
        if self.left > 0:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        self.buffer.copy_(self.result)

    def is_completed(self) -> bool:
        return self.left <= 0


class Doubling:
    """A collective that gives twice its input, and whose gradient is thrice what arrives."""

    def __init__(self, waits: int = 1, error: str | None = None) -> None:
        self.group = dist.group.WORLD
        self.waits, self.error = waits, error

    def issue(self, tensor: Tensor) -> Issued:
        return self._issue(tensor.detach() * 2)

    def issue_reverse(self, gradient: Tensor) -> Issued:
        return self._issue(gradient * 3)

    def _issue(self, result: Tensor) -> Issued:
        buffer = torch.zeros_like(result)
        return Issued(buffer, Arrival(buffer, result, self.waits, self.error), result)


def flight_of(name: str, collective: Doubling, *, at_once: bool = False) -> Flight:
    return Flight(Sent(name, Place(0, "test", "expert")), collective, at_once=at_once)


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    drain()
    dist.destroy_process_group()


def test_forward_and_backward() -> None:
    x = torch.arange(4.0, requires_grad=True)
    flight = flight_of("test", Doubling(waits=3))
    with poisoned_buffers():
        buffer = start(x, flight)
        assert bool(buffer.isnan().all()) and under_way() == ["test"]
        arrived = wait(buffer, flight)
        assert torch.equal(arrived, 2 * x) and under_way() == []
        arrived.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3)) and under_way() == []


def test_a_start_that_waits_at_once() -> None:
    flight = flight_of("test", Doubling(), at_once=True)
    with poisoned_buffers():
        assert torch.equal(start(torch.ones(2), flight), torch.full((2,), 2.0))
    assert under_way() == []


def test_another_tensor_than_the_buffer_is_refused() -> None:
    flight = flight_of("combine of decoder layer 3", Doubling())
    buffer = start(torch.ones(2), flight)
    with pytest.raises(fxskip.PassError, match="combine of decoder layer 3: another tensor arrived"):
        wait(buffer.clone(), flight)
    wait(buffer, flight)
    with pytest.raises(fxskip.PassError, match="was waited for before"):
        wait(buffer, flight)


def test_a_gradient_that_somebody_changed_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    flight = flight_of("dispatch of decoder layer 1", Doubling())
    buffer = start(x, flight)
    buffer.register_hook(lambda gradient: gradient * 2)
    with (
        pytest.raises(fxskip.PassError, match="dispatch of decoder layer 1: another gradient arrived"),
        pytest.warns(UserWarning, match="ended a backward pass"),
    ):
        wait(buffer, flight).sum().backward()
    assert under_way() == []


def test_second_derivatives_are_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    flight = flight_of("test", Doubling())
    loss = wait(start(x * x, flight), flight).pow(2).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_transport_that_fails_names_the_flight() -> None:
    flight = flight_of("combine of decoder layer 2", Doubling(error="Connection closed by peer"))
    buffer = start(torch.ones(2), flight)
    said = "combine of decoder layer 2: the transport gave up: Connection closed by peer"
    with pytest.raises(fxskip.CollectiveError, match=said):
        wait(buffer, flight)
    with pytest.raises(fxskip.CollectiveError, match=said):  # the group stays broken
        start(torch.ones(2), flight_of("dispatch of decoder layer 0", Doubling()))


def test_an_error_before_a_pass_has_exchanged_anything_is_forgotten() -> None:
    failures.begin_pass()
    failures.tell(ValueError("wrong argument"), "decoder layer 0")
    flight = flight_of("test", Doubling())
    assert torch.equal(wait(start(torch.ones(2), flight), flight), torch.full((2,), 2.0))
    assert not failures._said_by_others(failures._member(dist.group.WORLD))


def test_drain_lands_what_is_under_way() -> None:
    flights = [flight_of(f"flight {number}", Doubling()) for number in range(2)]
    buffers = [start(torch.ones(2), flight) for flight in flights]
    assert drain() == ["flight 0", "flight 1"] and under_way() == []
    assert torch.equal(wait(buffers[1], flights[1]), torch.full((2,), 2.0))
