"""The values between the steps of a program during one forward: freed after their last use, and never overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxskip.backward.region_plan import Plan
from fxskip.errors import PassError
from fxskip.leaves import write_count


class StepValues:
    """Values by name.

    A step that writes into a tensor would change what other steps read, or read already; autograd sees neither,
    because each step has a graph of its own. So each read compares how often the memory was written.
    """

    def __init__(self, plan: Plan, values: Mapping[str, Any]) -> None:
        self._plan = plan
        self._values = dict(values)
        self._versions = {name: _version(value) for name, value in values.items()}

    def arguments(self, number: int) -> list[Any]:
        """The inputs of step `number`."""
        step = self._plan.program.steps[number]
        return [self._read(name, f"step {step.name!r} reads") for name in step.inputs]

    def returned(self) -> list[Any]:
        """The program's outputs."""
        return [self._read(name, "the program returns") for name in self._plan.program.outputs]

    def _read(self, name: str, reader: str) -> Any:
        value = self._values[name]
        if _version(value) != self._versions[name]:
            raise _overwritten(f"{reader} {name!r}, which another step has overwritten since it was made")
        return value

    def put(self, number: int, results: list[Any]) -> None:
        """Step `number` has run."""
        step = self._plan.program.steps[number]
        for name in step.inputs:
            if _version(self._values[name]) != self._versions[name]:
                self._require_nobody_sees(number, name)
        for name, value in zip(step.outputs, results, strict=True):
            self._values[name] = value
            self._versions[name] = _version(value)

    def _require_nobody_sees(self, number: int, name: str) -> None:
        """Step `number` has written into its input `name`."""
        program, value = self._plan.program, self._values[name]
        others = (
            self._plan.readers[name] != (number,)
            or name in program.outputs
            or (name in program.inputs and value.requires_grad)
            or not self._plan.in_order
        )
        if others:
            raise _overwritten(
                f"step {program.steps[number].name!r} writes into its input {name!r}, which others see as well"
            )

    def free(self, position: int) -> None:
        """Let go of what nothing reads after the step at this position of the forward order."""
        for name in self._plan.unused_after[position]:
            del self._values[name]


def _version(value: Any) -> int:
    return write_count(value) if isinstance(value, Tensor) else 0


def _overwritten(found: str) -> PassError:
    return PassError(
        "scheduled region",
        found,
        hint="make the operation functional (x = x + y for x += y), or put it into the step that makes the value",
    )


def random_state() -> tuple[Any, ...]:
    """What changes where random numbers are drawn: the CPU's generator, and the offsets of those of the GPUs."""
    offsets = (
        tuple(generator.get_offset() for generator in torch.cuda.default_generators)
        if torch.cuda.is_initialized()
        else ()
    )
    return torch.get_rng_state().numpy().tobytes(), offsets
