"""Check plain values against a pydantic model and report every misfit at once, in the user's terms.

document = strict_yaml.read(path)
spec = validate(Spec, document)        # SpecError lists all problems with their lines
"""

import difflib
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from fxskip.errors import Problem, SpecError
from fxskip.strict_yaml import Document, Place, dotted, shown

MAX_PROBLEMS = 50  # one slip in a generated file can be a thousand problems


class Strict(BaseModel):
    """Base of all that is written in our YAML: frozen, no unknown keys, no conversions ("8" is not 8)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


StrictT = TypeVar("StrictT", bound=Strict)


def problem(message: str) -> PydanticCustomError:
    """What a validator raises when the value it was given is wrong in one way."""
    return problems([((), message)])


def problems(found: Sequence[tuple[Place, str]]) -> PydanticCustomError:
    """What a validator raises for several faults: each with the part of the value that it is about."""
    # The texts travel in the context because PydanticCustomError reads braces in its message as placeholders.
    return PydanticCustomError("fxskip", "; ".join(text for _, text in found), {"problems": list(found)})


def printable(written: str) -> str:
    """Text that a file, a terminal and UTF-8 take as it is: one line, no control characters, no half characters."""
    if not written.isprintable():
        raise problem(f"{shown(written)}: expected one line of characters that can be printed")
    return written


def as_tuple(written: object) -> object:
    """A list becomes a tuple, which nobody can change later. A single value lacks its brackets."""
    if isinstance(written, list):
        return tuple(written)
    if isinstance(written, tuple):
        return written
    is_short = isinstance(written, str) and written.isprintable() and len(written) <= 40
    example = f"; write [{written}]" if is_short else ""
    raise problem(f"expected a list, found {shown(written)}{example}")


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """'did you mean X?', or the list of what is known when nothing is close."""
    names = list(known)
    close = difflib.get_close_matches(shown(word).strip("'").lower(), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def validate(
    model: type[StrictT],
    document: Document,
    *,
    also: Sequence[Problem] = (),
    more_keys: Sequence[str] = (),
    context: Any = None,
) -> StrictT:
    """The document as a `model`. SpecError lists the first `MAX_PROBLEMS` problems, and says how many follow.

    also       problems that the caller found; reported together with the rest, in the order of the file
    more_keys  top-level keys that the caller has taken out of the document; only spelling hints use them
    context    handed to the model's validators as `info.context`
    """
    faults = [*document.problems, *also]
    # A value that the reader had to leave out was reported there, by what it looked like.
    reported = {(fault.line, fault.location) for fault in faults}
    try:
        made = model.model_validate(document.data, context=context)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            faults += [
                f for f in _faults(model, document, detail, more_keys) if (f.line, f.location) not in reported
            ]
    if faults:
        faults.sort(key=lambda fault: fault.line or 0)
        if len(faults) > MAX_PROBLEMS:
            last, more = faults[MAX_PROBLEMS], len(faults) - MAX_PROBLEMS
            faults[MAX_PROBLEMS:] = [Problem(last.line, "", f"and {more} more from here on")]
        raise SpecError(document.source, faults)
    return made


def _faults(
    model: type[Strict], document: Document, detail: ErrorDetails, more_keys: Sequence[str]
) -> list[Problem]:
    if detail["type"] == "fxskip":
        found = detail["ctx"]["problems"]
    else:
        found = [((), _message(model, detail, more_keys))]
    places = [((*detail["loc"], *at), text) for at, text in found]
    return [Problem(document.line_of(place), dotted(place), text) for place, text in places]


def _message(model: type[Strict], detail: ErrorDetails, more_keys: Sequence[str]) -> str:
    found, place, context = shown(detail["input"]), detail["loc"], detail.get("ctx", {})
    match detail["type"]:
        case "missing":
            return "missing"
        case "extra_forbidden":
            keys = [*_keys_at(model, place[:-1]), *(more_keys if len(place) == 1 else ())]
            return f"unknown key; {did_you_mean(place[-1], keys)}"
        case "literal_error":
            choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            close = difflib.get_close_matches(found.strip("'"), choices, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            return f"expected {' or '.join(choices)}, found {found}{meant}"
        case "model_type":
            return f"expected a mapping with the keys {', '.join(_keys_at(model, place))}; found {found}"
        case "greater_than_equal":
            return f"found {found}; must be {context['ge']} or more"
        case "less_than_equal":
            return f"found {found}; must be {context['le']} or less"
        case "value_error":  # a rule about several fields says all that is needed
            return str(detail["msg"]).removeprefix("Value error, ")
        case "int_parsing_size":  # more digits than pydantic reads
            return f"found {found}; too large"
        case _:
            return f"{detail['msg'].replace('Input should be', 'expected', 1)}, found {found}"


def _keys_at(model: type[Strict], place: Place) -> list[str]:
    """The keys that may be written at `place`: follows field names, through lists and `| None`."""
    for step in place:
        if isinstance(step, str):
            model = _models_in(model.model_fields[step].annotation)[0]
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[Strict]]:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in _models_in(part)]
