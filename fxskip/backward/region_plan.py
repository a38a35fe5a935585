"""What follows from a program and its orders, for every call of a region."""

from __future__ import annotations

from dataclasses import dataclass

from fxskip.backward.program import Event, Program


@dataclass(frozen=True)
class Plan:
    """A program, and the orders of its steps."""

    program: Program
    forward: tuple[int, ...]
    """Numbers of the steps in the order they run."""
    backward: tuple[Event, ...]
    in_order: bool
    """The forward order is that of the program."""
    readers: dict[str, tuple[int, ...]]
    """For each value the numbers of the steps that read it, last of the program first."""
    last_event: dict[int, int]
    """Position, in `backward`, of the last event of each step."""
    split: frozenset[int]
    """The steps whose weight gradients are an event of their own."""
    unused_after: tuple[tuple[str, ...], ...]
    """For each position in `forward` the values that nothing reads any more."""

    @classmethod
    def of(cls, program: Program, forward: tuple[int, ...], backward: tuple[Event, ...]) -> Plan:
        last_use: dict[str, int] = {}
        for position, number in enumerate(forward):
            step = program.steps[number]
            last_use.update(dict.fromkeys((*step.inputs, *step.outputs), position))
        unused: list[list[str]] = [[] for _ in forward]
        for name, position in last_use.items():
            if name not in program.outputs:
                unused[position].append(name)
        return cls(
            program=program,
            forward=forward,
            backward=backward,
            in_order=forward == tuple(range(len(forward))),
            readers=program.readers(),
            last_event={event.step: position for position, event in enumerate(backward)},
            split=frozenset(event.step for event in backward if event.part == "wgrad"),
            unused_after=tuple(map(tuple, unused)),
        )
