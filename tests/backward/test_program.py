"""Programs and orders: what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fxskip.backward.program import Event, Program, Step, backward_order, forward_order
from fxskip.errors import PassError, ScheduleError


def step(name: str, inputs: str, outputs: str, random: bool = False) -> Step:
    return Step(name, lambda *values: values, tuple(inputs.split()), tuple(outputs.split()), random)


def diamond() -> Program:
    """a feeds b and c, which feed d."""
    steps = (step("a", "x", "p q"), step("b", "p", "r"), step("c", "q x", "s"), step("d", "r s", "y"))
    return Program(steps, ("x",), ("y",))


def test_dependencies_and_readers() -> None:
    assert diamond().dependencies() == {
        "a": {},
        "b": {"a": "it makes 'p'"},
        "c": {"a": "it makes 'q'"},
        "d": {"b": "it makes 'r'", "c": "it makes 's'"},
    }
    assert diamond().readers() == {"x": (2, 0), "p": (1,), "q": (2,), "r": (3,), "s": (3,), "y": ()}


def test_steps_that_draw_random_numbers_form_a_chain() -> None:
    steps = (
        step("a", "x", "p", True),
        step("b", "x", "q"),
        step("c", "x", "r", True),
        step("d", "p r", "s", True),
    )
    assert Program(steps, ("x",), ("s",)).dependencies() == {
        "a": {},
        "b": {},
        "c": {"a": "both draw random numbers"},
        "d": {"a": "it makes 'p'", "c": "it makes 'r'"},
    }


@pytest.mark.parametrize(
    ("steps", "inputs", "outputs", "found"),
    [
        ((step("a", "z", "y"),), "x", "y", "step 'a' reads 'z', which nothing makes"),
        (
            (step("a", "q", "p"), step("b", "x", "q")),
            "x",
            "p",
            "step 'a' reads 'q', which a later step makes",
        ),
        (
            (step("a", "x", "y"), step("b", "x", "y")),
            "x",
            "y",
            "step 'b' makes 'y', which step 'a' made before",
        ),
        ((step("a", "x", "x"),), "x", "x", "step 'a' makes 'x', which the inputs made before"),
        ((step("a", "x", "p"), step("a", "x", "q")), "x", "p", "two steps are named 'a'"),
        ((), "x x", "x", "two inputs are named 'x'"),
        ((step("a", "x", "y"),), "x", "z", "the program returns 'z', which nothing makes"),
        ((step("a.wgrad", "x", "y"),), "x", "y", "a step is named 'a.wgrad'"),
    ],
)
def test_programs_that_are_refused(steps: tuple[Step, ...], inputs: str, outputs: str, found: str) -> None:
    with pytest.raises(PassError, match=found):
        Program(steps, tuple(inputs.split()), tuple(outputs.split()))


def test_orders() -> None:
    assert forward_order(diamond(), None) == (0, 1, 2, 3)
    assert forward_order(diamond(), ["a", "c", "b", "d"]) == (0, 2, 1, 3)
    assert backward_order(diamond(), None) == tuple(Event(n, "both") for n in (3, 2, 1, 0))
    assert backward_order(diamond(), ["d", "b", "c.dgrad", "a", "c.wgrad"]) == (
        Event(3, "both"),
        Event(1, "both"),
        Event(2, "dgrad"),
        Event(0, "both"),
        Event(2, "wgrad"),
    )


@pytest.mark.parametrize(
    ("order", "found"),
    [
        (["a", "b", "d"], "missing: c"),
        (["a", "b", "c", "c", "d"], "twice: c"),
        (["a", "b", "c", "d", "e"], "unknown: e"),
        (["a", "d", "b", "c"], "step 'd' runs before 'b', which it depends on: it makes 'r'"),
    ],
)
def test_forward_orders_that_are_refused(order: Sequence[str], found: str) -> None:
    with pytest.raises(ScheduleError, match=found):
        forward_order(diamond(), order)


@pytest.mark.parametrize(
    ("order", "found"),
    [
        (["d", "c", "b"], "missing: a"),
        (["d", "c.wgrad", "b", "a"], "missing: c.dgrad"),
        (["d", "c.dgrad", "b", "a"], "missing: c; unknown: c.dgrad"),
        (["d", "c", "c.dgrad", "c.wgrad", "b", "a"], "unknown: c"),
        (["d", "c.wgrad", "c.dgrad", "b", "a"], "'c.wgrad' comes before 'c.dgrad'"),
        (["b", "d", "c", "a"], "backward of 'b' runs before that of 'd', which gives it a gradient of 'r'"),
        (["d", "b", "a", "c"], "backward of 'a' runs before that of 'c', which gives it a gradient of 'q'"),
        (["d", "b", "a", "c.dgrad", "c.wgrad"], "backward of 'a' runs before that of 'c'"),
    ],
)
def test_backward_orders_that_are_refused(order: Sequence[str], found: str) -> None:
    with pytest.raises(ScheduleError, match=found):
        backward_order(diamond(), order)
