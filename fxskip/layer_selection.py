"""Which decoder layers a rule speaks of.

    all     [0, 3]     "4-26"     {first: 75%}     {last: 12}     {skip_first: 10%}

A selection is written without knowing the model, so it is resolved later, against a number of layers.

Percentages are shares of that number, exact, rounded half up, and never less than one layer: 75% of 27 layers
is 20.25, so 20; 50% of 27 is 13.5, so 14; 10% of 4 is 0.4, so 1. `{skip_first: 10%}` rounds the layers that
are skipped in this way, and selects the rest.
"""

import re
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal, NoReturn, cast

from fxskip.errors import SpecError
from fxskip.strict_model import did_you_mean, problem, problems
from fxskip.strict_yaml import shown

MAX_LAYER = 9999  # deeper than any model; "0-99999999999" must not build a tuple of that size
_NUMBERS = tuple(range(MAX_LAYER + 1))  # one object a number, however many ranges a file has
FORMS = 'all, [0, 3], "4-26", {first: 75%}, {last: 12} or {skip_first: 10%}'

End = Literal["first", "last", "skip_first"]
ENDS: tuple[End, ...] = ("first", "last", "skip_first")


@dataclass(frozen=True, slots=True)
class Layers:
    """A selection of decoder layers. Exactly one form is set; with none set it is all layers.

    numbers  layer numbers, ascending; from a list or a range, both ends included
    end      the end of the model at which `count` layers, or `percent` of them, are taken or skipped
    """

    numbers: tuple[int, ...] = ()
    end: End | None = None
    count: int | None = None
    percent: Decimal | None = None

    @property
    def is_all(self) -> bool:
        return not self.numbers and self.end is None

    def resolve(self, n_layers: int, *, where: str | None = None) -> tuple[int, ...]:
        """The layer numbers in a model of `n_layers` decoder layers, ascending.

        SpecError if the selection does not fit that model; `where` says in the message whose selection it is.
        """
        if n_layers < 1:
            raise SpecError(
                "layers", f"a model with {n_layers} decoder layers", where=where, hint="at least 1 is needed"
            )
        if self.numbers:
            if self.numbers[-1] >= n_layers:
                self._does_not_fit(
                    n_layers, where, f'use numbers 0-{n_layers - 1}, or "all", or {{last: {n_layers}}}'
                )
            return self.numbers
        if self.end is None:
            return tuple(range(n_layers))
        taken = self._taken(n_layers)
        if self.end == "skip_first":
            if taken >= n_layers:
                self._does_not_fit(n_layers, where, "no layer is left; skip fewer, or drop the rule")
            return tuple(range(taken, n_layers))
        if taken > n_layers:
            self._does_not_fit(n_layers, where, f"write {{{self.end}: {n_layers}}} or less, or all")
        return tuple(range(taken) if self.end == "first" else range(n_layers - taken, n_layers))

    def shares_a_layer_with(self, other: "Layers") -> bool:
        """True if both contain one layer in every model that both fit; False if that depends on the model."""
        return self.is_all or other.is_all or bool(self._certain() & other._certain())

    def to_plain(self) -> str | list[int] | dict[str, int | str]:
        """As it is written in a spec; parse_layers reads it back."""
        if self.numbers:
            first, last = self.numbers[0], self.numbers[-1]
            is_range = len(self.numbers) > 1 and last - first + 1 == len(self.numbers)
            return f"{first}-{last}" if is_range else list(self.numbers)
        if self.end is None:
            return "all"
        return {self.end: f"{self.percent:f}%" if self.count is None else self.count}

    def __str__(self) -> str:
        plain = self.to_plain()
        if isinstance(plain, dict):
            return ", ".join(f"{{{end}: {amount}}}" for end, amount in plain.items())
        return str(plain)

    def _taken(self, n_layers: int) -> int:
        if self.percent is None:
            return cast(int, self.count)
        return max(1, int((n_layers * self.percent / 100).to_integral_value(ROUND_HALF_UP)))

    def _certain(self) -> frozenset[int]:
        """Layers it has in every model that it fits; -1 is the last layer, whatever its number."""
        if self.end == "first":
            return frozenset(range(self.count or 1))  # of a percentage only layer 0 is certain
        return frozenset([-1] if self.end else self.numbers)

    def _does_not_fit(self, n_layers: int, where: str | None, hint: str) -> NoReturn:
        found = f"the model has {n_layers} decoder layers (0-{n_layers - 1})"
        raise SpecError(f"layers {self}", found, where=where, hint=hint)


def parse_layers(written: object) -> Layers:
    """A selection as written in a spec. Raises the errors of strict_model, which point at the faulty part."""
    if isinstance(written, Layers):
        return written
    if written == "all":
        return Layers()
    if isinstance(written, str):
        return Layers(numbers=_range(written))
    if isinstance(written, list | tuple):
        return Layers(numbers=_listed(list(written)))
    if isinstance(written, dict):
        return _from_end(written)
    hint = f"; for one layer write [{shown(written)}]" if _is_int(written) else ""
    raise problem(f"expected {FORMS}, found {shown(written)}{hint}")


def _range(written: str) -> tuple[int, ...]:
    match = re.fullmatch(r"\s*(\d{1,4})\s*-\s*(\d{1,4})\s*", written, re.ASCII)
    if match is None:
        raise problem(f"expected {FORMS}, found {shown(written)}; numbers are 0 to {MAX_LAYER}")
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise problem(f'"{first}-{last}" runs backwards; write "{last}-{first}"')
    return _NUMBERS[first : last + 1]


def _listed(written: list[object]) -> tuple[int, ...]:
    if not written:
        raise problem("an empty list selects no layer; name layers, or drop the rule")
    faults = []
    seen: set[object] = set()
    for i, number in enumerate(written):
        if not _is_int(number) or not 0 <= cast(int, number) <= MAX_LAYER:
            faults.append(((i,), f"expected a layer number, 0 to {MAX_LAYER}, found {shown(number)}"))
        elif number in seen:
            faults.append(((i,), f"layer {number} is here twice"))
        else:
            seen.add(number)
    if faults:
        raise problems(faults)
    return tuple(sorted(cast(list[int], written)))


def _from_end(written: dict[object, object]) -> Layers:
    if len(written) != 1:
        raise problem(f"expected one key, {' or '.join(ENDS)}; found {len(written)}")
    ((key, amount),) = written.items()
    end = next((known for known in ENDS if known == key), None)
    if end is None:
        raise problems([((str(key),), f"unknown key; {did_you_mean(key, ENDS)}")])
    if _is_int(amount) and 1 <= cast(int, amount) <= MAX_LAYER:
        return Layers(end=end, count=cast(int, amount))
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", amount, re.ASCII) if isinstance(amount, str) else None
    percent = Decimal(match[1]).normalize() if match else Decimal(0)
    if not 0 < percent <= 100 or (percent == 100 and end == "skip_first"):
        limit = "below 100%" if end == "skip_first" else "up to 100%"
        message = f"expected a number of layers, 1 to {MAX_LAYER}, or a share above 0% and {limit}"
        raise problems([((end,), f"{message}, found {shown(amount)}")])
    return Layers() if percent == 100 else Layers(end=end, percent=percent)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
