"""What a GPU's host reads of collectives, on streams that only note what they are told."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from fxskip.collectives import to_host
from fxskip.collectives.measuring import waiting_at_once


class Streams:
    """In the place of torch.cuda: notes who waits for whom, and which stream is current."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.compute, self.side = self.stream_called("compute"), self.stream_called("side")
        self.current = self.compute

    def stream_called(self, name: str) -> Any:
        stream = MagicMock()
        stream.name = name
        stream.wait_stream.side_effect = lambda other: self.log.append((name, "waits for", other.name))
        stream.record_event.side_effect = lambda: self.event
        return stream

    event = MagicMock()

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found, empty = Streams(), torch.empty
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.inside)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: found.side)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **how: empty(*shape, **how))
    monkeypatch.setattr(to_host, "_SIDE_STREAMS", {})
    monkeypatch.setattr(to_host, "issued", lambda group: 7)
    monkeypatch.setattr(to_host, "until", lambda name, group, done, number: done())
    return found


def under_way(streams: Streams) -> to_host.ToHost:
    source = MagicMock(device="cuda:0")

    def make() -> torch.Tensor:
        streams.log.append(("issued in", streams.current.name))
        return torch.tensor([3, 4])

    found = to_host.ToHost("counts", None, source, make)
    source.record_stream.assert_called_once_with(streams.side)
    return found


def test_the_compute_stream_waits_for_nothing(streams: Streams) -> None:
    found = under_way(streams)
    assert streams.log == [("side", "waits for", "compute"), ("issued in", "side")]
    assert found.get().tolist() == [3, 4]


def test_what_blocks_is_waited_for_by_it_too(streams: Streams) -> None:
    with waiting_at_once():
        under_way(streams)
    assert streams.log[-1] == ("compute", "waits for", "side")
