"""Programs of named steps, and the orders in which their forward and backward may run.

A step is a function of named values. Its backward is one event, or two where its weight gradients are split off:
`experts.dgrad`, the gradients of what it read, and `experts.wgrad`, those of its weights. The order of the steps in
a program is canonical: plain autograd on the program in this order is what every other order has to equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fxskip.errors import PassError, ScheduleError

Part = Literal["both", "dgrad", "wgrad"]


@dataclass(frozen=True, slots=True)
class Step:
    """A named part of a program.

    function   takes the values named in `inputs`, in order, and returns a tuple of those named in `outputs`. Tensors
               that it differentiates by, parameters included, must be among its inputs.
    random     it draws random numbers: such steps stay in program order
    """

    name: str
    function: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    random: bool = False


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """What becomes of the gradient of a weight where the backward order splits its step."""

    step: str
    weight: str
    """Name of the input of the program."""
    deferred: bool
    """It is computed at `.wgrad`; otherwise at `.dgrad`."""
    reason: str = ""
    """Why it is not deferred."""


@dataclass(frozen=True)
class Program:
    """Steps in canonical order, the names of the values they start from, and of those that are returned.

    attributes        the last inputs, where the program comes from a graph: attributes of its module
    weight_gradients  which weight gradients can be split off; empty where nobody looked

    Raises PassError where a value is made twice, read before it is made, or unknown.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    weight_gradients: tuple[WeightGradient, ...] = ()

    def __post_init__(self) -> None:
        _require_unique([step.name for step in self.steps], "step")
        _require_unique(self.inputs, "input")
        made: dict[str, str] = dict.fromkeys(self.inputs, "the inputs")
        everything = {name for step in self.steps for name in step.outputs}
        for step in self.steps:
            _require_plain_name(step)
            for name in step.inputs:
                if name not in made:
                    raise _unknown(name, f"step {step.name!r} reads", made, name in everything)
            for name in step.outputs:
                if name in made:
                    raise PassError(
                        "program",
                        f"step {step.name!r} makes {name!r}, which {made[name]} made before",
                        hint="give each value a name of its own",
                    )
                made[name] = f"step {step.name!r}"
        for name in self.outputs:
            if name not in made:
                raise _unknown(name, "the program returns", made, later=False)

    def dependencies(self) -> dict[str, dict[str, str]]:
        """For each step the steps that must run before it, with the reason: the value, or random numbers."""
        maker = {name: step.name for step in self.steps for name in step.outputs}
        before: dict[str, dict[str, str]] = {}
        drew: str | None = None
        for step in self.steps:
            needs = {maker[name]: f"it makes {name!r}" for name in step.inputs if name in maker}
            if step.random:
                if drew is not None:
                    needs.setdefault(drew, "both draw random numbers")
                drew = step.name
            before[step.name] = needs
        return before

    def readers(self) -> dict[str, tuple[int, ...]]:
        """For each value the numbers of the steps that read it, last first: as autograd adds up its gradient."""
        found: dict[str, tuple[int, ...]] = dict.fromkeys(self.inputs, ())
        for number, step in enumerate(self.steps):
            found.update(dict.fromkeys(step.outputs, ()))
            for name in dict.fromkeys(step.inputs):
                found[name] = (number, *found[name])
        return found


class Event(NamedTuple):
    """One entry of a backward order: the number of a step, and the part of its backward."""

    step: int
    part: Part


def forward_order(program: Program, order: Sequence[str] | None) -> tuple[int, ...]:
    """The numbers of the steps in the order they run forward; program order for None.

    Raises ScheduleError where the order is not one of all steps, or runs a step before one that it depends on.
    """
    names = [step.name for step in program.steps]
    if order is None:
        return tuple(range(len(names)))
    _require_all(order, names, "forward")
    position = {name: at for at, name in enumerate(order)}
    for name, needs in program.dependencies().items():
        for other, reason in needs.items():
            if position[other] > position[name]:
                raise ScheduleError(
                    "forward order",
                    f"step {name!r} runs before {other!r}, which it depends on: {reason}",
                    hint=f"run {other!r} before {name!r}",
                )
    number = {name: at for at, name in enumerate(names)}
    return tuple(number[name] for name in order)


def backward_order(program: Program, order: Sequence[str] | None) -> tuple[Event, ...]:
    """The events of a backward order; the program from its last step to its first for None.

    Raises ScheduleError where a step's backward is missing or twice, or comes before the gradients it needs.
    """
    names = [step.name for step in program.steps]
    if order is None:
        return tuple(Event(number, "both") for number in reversed(range(len(names))))
    split = [entry.removesuffix(".wgrad") for entry in order if entry.endswith(".wgrad")]
    wanted = [part for name in names for part in (_halves(name) if name in split else (name,))]
    _require_all(order, wanted, "backward")
    position = {entry: at for at, entry in enumerate(order)}
    for name in split:
        dgrad, wgrad = _halves(name)
        if position[wgrad] < position[dgrad]:
            raise ScheduleError(
                "backward order", f"{wgrad!r} comes before {dgrad!r}", hint="the weight gradients come last"
            )
    first = {name: position[_halves(name)[0] if name in split else name] for name in names}
    _require_gradients_arrive(program, first)
    number = {name: at for at, name in enumerate(names)}
    return tuple(_events(order, number))


def _events(order: Iterable[str], number: Mapping[str, int]) -> Iterator[Event]:
    for entry in order:
        name, _, part = entry.rpartition(".")
        if part == "dgrad":
            yield Event(number[name], "dgrad")
        elif part == "wgrad":
            yield Event(number[name], "wgrad")
        else:
            yield Event(number[entry], "both")


def _halves(name: str) -> tuple[str, str]:
    return f"{name}.dgrad", f"{name}.wgrad"


def _require_gradients_arrive(program: Program, position: Mapping[str, int]) -> None:
    """A step's backward comes after that of every step that reads what it made. Random numbers do not matter here."""
    maker = {name: step.name for step in program.steps for name in step.outputs}
    for step in program.steps:
        for value in step.inputs:
            if value in maker and position[maker[value]] < position[step.name]:
                raise ScheduleError(
                    "backward order",
                    f"the backward of {maker[value]!r} runs before that of {step.name!r}, "
                    f"which gives it a gradient of {value!r}",
                    hint=f"run the backward of {step.name!r} before that of {maker[value]!r}",
                )


def _require_all(order: Sequence[str], wanted: Sequence[str], which: str) -> None:
    twice = sorted({name for name in order if order.count(name) > 1})
    missing = [name for name in wanted if name not in order]
    unknown = [name for name in order if name not in wanted]
    faults = {"missing": missing, "unknown": unknown, "twice": twice}
    if any(faults.values()):
        found = "; ".join(f"{word}: {', '.join(names)}" for word, names in faults.items() if names)
        raise ScheduleError(f"{which} order", found, hint=f"it has each of these once: {', '.join(wanted)}")


def _require_unique(names: Sequence[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise PassError("program", f"two {what}s are named {name!r}", hint="give each its own name")


def _require_plain_name(step: Step) -> None:
    if step.name.endswith((".dgrad", ".wgrad")):
        raise PassError(
            "program",
            f"a step is named {step.name!r}, which means a part of a step's backward",
            hint="choose a name without .dgrad and .wgrad at its end",
        )


def _unknown(name: str, reader: str, made: Mapping[str, str], later: bool) -> PassError:
    found = f"{reader} {name!r}, which {'a later step makes' if later else 'nothing makes'}"
    return PassError("program", found, hint=f"values there: {', '.join(made) or 'none'}")
