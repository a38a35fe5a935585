"""The errors fxskip raises: who complains, what was found, where, and what to write instead.

Every class builds its message from the same four parts, so that someone who has only the log can act:

    connect: connect.0 drops nothing: routed@1 is nothing that its blocks would see
      where  layers 0-1
             model.layers.0.self_attn: routed@1: no write that early; the embedding is not a write
      hint   the model has attention in layers 0-26, ...; @1 is the write just before the block
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, NamedTuple, Self, overload


class FxskipError(Exception):
    """Base of all errors of this package: `except FxskipError` catches them and nothing else.

    who    the pass, function or file that complains
    found  what was found, in the user's terms
    where  module path, graph node, file or rank; None when `who` and `found` already say it
    hint   what to write or run instead, with values that would have worked
    """

    def __init__(self, who: str, found: str, *, where: str | None = None, hint: str) -> None:
        self.who, self.found, self.where, self.hint = who, found, where, hint
        lines = [f"{who}: {found}"]
        if where is not None:
            lines.append(f"  where  {_indented(where)}")
        lines.append(f"  hint   {_indented(hint)}")
        super().__init__("\n".join(lines))

    def within(self, place: str) -> Self:
        """The same error, with the larger place (a layer, a model) in front of where it was found."""
        where = f"{place}: {self.where}" if self.where else place
        return type(self)(self.who, self.found, where=where, hint=self.hint)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        # Exception's own __reduce__ calls the class with `args`, which here is the finished message: `hint`
        # would be missing and the error lost, just when a worker process wants to report it.
        return _without_init, (type(self), self.args), self.__dict__


class Problem(NamedTuple):
    """One thing wrong in a file: its line (None if the values came from Python), its place, what is wrong."""

    line: int | None
    location: str
    message: str


class SpecError(FxskipError):
    """The user's spec or configuration file is wrong. `problems` lists every fault that was found.

    Built either like the other errors, from one finding, or from a source and all of its problems:

        SpecError("layers", "26 is out of range", hint="the model has layers 0-15")
        SpecError("specs/mine.yaml", [(4, "connect.0.without", "missing")])
    """

    problems: list[Problem]

    @overload
    def __init__(self, who: str, found: str, *, where: str | None = None, hint: str) -> None: ...

    @overload
    def __init__(
        self,
        who: str | PathLike[str],
        found: Sequence[tuple[int | None, str, str]],
        *,
        where: str | None = None,
    ) -> None: ...

    def __init__(
        self,
        who: str | PathLike[str],
        found: str | Sequence[tuple[int | None, str, str]],
        *,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        if isinstance(found, str):
            if hint is None:
                raise TypeError("SpecError: a single finding needs hint=: say what to write instead")
            self.problems = [Problem(None, where or "", found)]
            super().__init__(str(who), found, where=where, hint=hint)
        else:
            self.problems = [Problem(*problem) for problem in found]
            self._set_listing(str(who), where)

    def _set_listing(self, source: str, where: str | None) -> None:
        """Message of a list of problems. Each carries its own remedy, so there is no separate hint."""
        if not self.problems:
            raise TypeError("SpecError: the list of problems is empty; there is nothing to report")
        count = len(self.problems)
        found = f"{count} problem{'s' if count > 1 else ''}"
        self.who, self.found, self.where, self.hint = source, found, where, ""
        lines = [f"{source}: {found}"]
        if where is not None:
            lines.append(f"  where  {_indented(where)}")
        lines += _aligned(self.problems)
        # Past FxskipError.__init__, whose one-finding layout does not fit a list.
        Exception.__init__(self, "\n".join(lines))


class CaptureError(FxskipError):
    """A model could not be captured as one graph a region."""


class PassError(FxskipError):
    """A captured graph cannot be transformed as the spec asks."""


class ScheduleError(FxskipError):
    """An order of tasks would hang, or read a value before it has arrived."""


class CollectiveError(FxskipError):
    """An exchange between processes failed: one of them had an error, was killed, or does something else."""


class CacheError(FxskipError):
    """A teacher cache is missing, damaged, or was made for something else."""


class CheckpointError(FxskipError):
    """A saved model is incomplete, inconsistent, or would load with another wiring."""


def first_line(message: object) -> str:
    """The first line that is not blank of another library's error, to quote it; "" where it says nothing."""
    return next((line.strip() for line in str(message).splitlines() if line.strip()), "")


def _without_init(kind: type[FxskipError], args: tuple[Any, ...]) -> FxskipError:
    return kind.__new__(kind, *args)


def _indented(text: str) -> str:
    """Continuation lines line up under the first, after the label column."""
    return text.replace("\n", "\n" + " " * 9)


def _aligned(problems: Sequence[Problem]) -> list[str]:
    """One row a problem, in columns: line, location, message."""
    lines = [f"line {p.line}" if p.line is not None else "" for p in problems]
    line_width = max(map(len, lines))
    place_width = max(len(p.location) for p in problems)
    rows = []
    for line, problem in zip(lines, problems, strict=True):
        columns = [f"{line:<{line_width}}"] if line_width else []
        columns += [f"{problem.location:<{place_width}}"] if place_width else []
        rows.append("  " + "  ".join([*columns, problem.message]))
    return rows
