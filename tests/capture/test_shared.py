"""Settings that threads share hold until the last of them is done, and are then as before."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fxskip.capture.shared import Shared


def test_the_last_to_leave_restores() -> None:
    settings = {"mode": "before"}

    @contextmanager
    def during() -> Iterator[None]:
        old, settings["mode"] = settings["mode"], "during"
        yield
        settings["mode"] = old

    shared = Shared(during)
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen: list[str] = []

    def first() -> None:
        with shared():
            first_is_in.set()
            second_is_in.wait(10)
        first_is_out.set()

    def second() -> None:
        first_is_in.wait(10)
        with shared():
            second_is_in.set()
            first_is_out.wait(10)
            seen.append(settings["mode"])

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == ["during"]
    assert settings["mode"] == "before"


def test_a_setting_that_fails_leaves_the_others_as_they_were() -> None:
    log: list[str] = []

    @contextmanager
    def sound() -> Iterator[None]:
        log.append("in")
        try:
            yield
        finally:
            log.append("out")

    @contextmanager
    def broken() -> Iterator[None]:
        raise ValueError("broken")
        yield

    shared = Shared(sound, broken)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"), shared():
            pass
    assert log == ["in", "out"] * 2
