"""The spec: which earlier outputs each sub-block no longer waits for, and how the compiler is set.

    fxskip: 1                        # version of the language
    name: mine
    preset: farskip                  # optional: the rules of specs/farskip.yaml, added to those below
    connect:
      - blocks: attention            # attention, moe, dense, mixer, all, a glob of module paths, or a list
        layers: {last: 75%}          # see layer_selection.py
        without: [routed@1]          # addends of earlier writes to the stream
    sum: as_written
    parallel: {expert: {size: 8, exchange: all_to_all}, tensor: {size: 1}}
    schedule: {overlap: full, backward: mirrored, gradients: by_call, bucket_mib: 25, solver: list, costs: roofline,
               max_in_flight_mib: 1024}
    runtime: {recompute: none, lower: none, transport: auto, mode: scheduled}

Nothing here runs a model or imports torch: a spec can be checked before the half minute that torch takes.
"""

import re
from collections.abc import Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from fxskip import strict_yaml
from fxskip.errors import Problem, SpecError
from fxskip.layer_selection import Layers
from fxskip.rule import Addend, Rule
from fxskip.strict_model import Strict, as_tuple, did_you_mean, printable, problem, problems, validate
from fxskip.strict_yaml import Document, Place, shown

__all__ = [
    "Addend", "Expert", "Layers", "Parallel", "Rule", "Runtime", "Schedule", "Spec", "Tensor",
    "load_spec", "preset_names", "specs_folder",
]  # fmt: skip


def _one_rule_a_block(rules: tuple[Rule, ...], info: ValidationInfo) -> tuple[Rule, ...]:
    """Refuse two rules for one block. `info.context` is the preset, if any, and where its rules start."""
    preset, start = info.context or ("", len(rules))
    faults: list[tuple[Place, str]] = []
    # A clash is reported on a line that the user can change, so never on one of the preset, and once a rule.
    for j, own in enumerate(rules[:start]):
        for i, other in (*enumerate(rules[:j]), *enumerate(rules[start:], start)):
            if both := other.overlap_with(own):
                theirs = f"connect.{i}" if i < start else f"preset {preset!r}"
                faults.append(((j,), f"claims {both}, and so does {theirs}; a block takes one rule"))
                break
    if faults:
        raise problems(faults)
    return rules


class Expert(Strict):
    """How the routed experts are spread over processes."""

    size: int = Field(ge=1, le=65536, description="processes that share one set of experts")
    exchange: Literal["all_to_all", "all_reduce"] = Field(
        default="all_to_all",
        description="all_to_all sends each token to its experts; all_reduce keeps every token everywhere and "
        "adds what the experts of each process made of it",
    )


class Tensor(Strict):
    """How matrices are split over processes."""

    size: int = Field(ge=1, le=65536, description="processes that share one matrix")


class Parallel(Strict):
    """The mesh that the model is cut for. An axis that is not written has size 1."""

    expert: Expert | None = Field(default=None, description="expert parallelism")
    tensor: Tensor | None = Field(default=None, description="tensor parallelism")

    @model_validator(mode="after")
    def _names_an_axis(self) -> "Parallel":
        if self.expert is None and self.tensor is None:
            raise problem("names no axis; write expert or tensor, or delete parallel for one process")
        return self


def _check_costs(written: str) -> str:
    # As with blocks: a misspelt word must not become a file that nobody wrote.
    if written not in ("roofline", "measured") and not re.search(r"[./\\]", written):
        hint = did_you_mean(written, ("roofline", "measured"))
        raise problem(f"{shown(written)} is neither a path nor a word; {hint}")
    return written


class Schedule(Strict):
    """How collectives are placed under compute."""

    overlap: Literal["full", "none"] = Field(
        default="full",
        description="full starts each collective as early and waits as late as it may; none blocks",
    )
    backward: Literal["mirrored", "explicit"] = Field(
        default="mirrored",
        description="mirrored runs a layer's backward pass in the mirror image of its forward order, as autograd does; "
        "explicit in an order of its own, with weight gradients under the exchanges",
    )
    gradients: Literal["by_call", "in_backward"] = Field(
        default="by_call",
        description="when gradients are averaged over processes: by_call where fxskip.average_gradients is called; "
        "in_backward while the backward pass runs, bucket by bucket",
    )
    bucket_mib: int = Field(
        default=25,
        ge=1,
        le=1 << 20,
        description="MiB of gradients of one layer that are averaged by one all-reduce; a larger gradient has one of "
        "its own",
    )
    solver: Literal["list", "cp_sat"] = Field(
        default="list", description="list is critical-path list scheduling; cp_sat searches for the optimum"
    )
    costs: Annotated[str, AfterValidator(printable), AfterValidator(_check_costs)] = Field(
        default="roofline",
        description="where task times come from: roofline, measured, or the path of a table",
    )
    max_in_flight_mib: int = Field(
        default=1024,
        ge=1,
        le=1 << 20,
        description="MiB of buffers of unfinished collectives on one rank, at most",
    )

    @model_validator(mode="after")
    def _orders_what_overlaps(self) -> "Schedule":
        if self.backward == "explicit" and self.overlap == "none":
            raise problem(
                "backward: explicit orders the backward pass around collectives in flight, and overlap: none has none; "
                "write overlap: full, or leave backward out"
            )
        return self


class Runtime(Strict):
    """How the rewired model runs."""

    recompute: Literal["none", "layer", "selective"] = Field(
        default="none",
        description="what the backward pass computes again instead of keeping: layer keeps a layer's inputs alone; "
        "selective also the results of matrix products and attention",
    )
    lower: Literal["none", "aot_eager", "inductor"] = Field(
        default="none",
        description="what runs the rewired layers: none runs them operation by operation, to the original's last "
        "bit; inductor compiles them, right to rounding; aot_eager has the compiler's graphs run uncompiled",
    )
    transport: Literal["auto", "nccl", "gloo", "copy_engine", "measured"] = Field(
        default="auto",
        description="what moves the bytes: auto is the process group's backend; copy_engine copies rows of experts "
        "between the devices of one host, and leaves all else to the process group; measured takes the faster of "
        "the two where both can be, timed when the model is spread",
    )
    mode: Literal["scheduled", "reference", "eager_wait"] = Field(
        default="scheduled",
        description="scheduled overlaps; reference runs the rewired model in plain order; eager_wait waits "
        "at once, to tell a race from a wrong result",
    )

    @model_validator(mode="after")
    def _selects_what_it_sees(self) -> "Runtime":
        if self.recompute == "selective" and self.lower != "none":
            raise problem(
                f"recompute: selective chooses among operations, and lower: {self.lower} compiles them into one; "
                "write recompute: layer, or lower: none"
            )
        return self


def _is_version(written: object) -> object:
    if type(written) is not int:  # `yes` and 1.0 equal 1 in Python
        raise problem(f"expected 1, found {shown(written)}")
    return written


class Spec(Strict):
    """A whole spec. `load_spec` makes one; preset names are already replaced by their rules."""

    fxskip: Annotated[Literal[1], BeforeValidator(_is_version)] = Field(description="version of the language")
    name: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(printable)] | None = Field(
        default=None, description="one line for people; means nothing"
    )
    connect: Annotated[tuple[Rule, ...], BeforeValidator(as_tuple), AfterValidator(_one_rule_a_block)] = (
        Field(
            default=(),
            description="the rules; a block without one reads the full stream, and no rules is the identity",
        )
    )
    sum: Literal["as_written", "split"] = Field(
        default="as_written",
        description="order of additions: that of the original code, or split: ((r + shared) + routed)",
    )
    parallel: Parallel | None = Field(default=None, description="the mesh; omitted: one process")
    schedule: Schedule | None = Field(default=None, description="omitted: nothing is scheduled")
    runtime: Runtime | None = Field(default=None, description="omitted: the model runs as PyTorch runs it")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `load_spec` reads them back to an equal spec."""
        # What was not written stays unwritten: a default that is spelt out would look like a wish.
        return self.model_dump(mode="json", exclude_none=True, exclude_unset=True)

    def to_yaml(self) -> str:
        """The text of a spec file; `load_spec` reads it back to an equal spec."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=110)


def load_spec(source: str | PathLike[str] | Mapping[str, Any] | Spec) -> Spec:
    """Read and check a spec: a file, a mapping, the name of a preset ("farskip"), or a Spec as it is.

    A string that is the name of a preset is that preset; any other string, and every Path, is a file.
    SpecError lists all problems, each with its line in the file and what would be right.
    """
    if isinstance(source, Spec):
        return source
    if isinstance(source, Mapping):
        return _load(Document("spec", dict(source)))
    if isinstance(source, str) and source in preset_names():
        return _load(strict_yaml.read(specs_folder() / f"{source}.yaml"))
    if not isinstance(source, str | PathLike):
        raise SpecError(
            "load_spec", f"found {shown(source)}", hint="give a path, a mapping, a preset name or a Spec"
        )
    if "\n" in str(source):
        raise SpecError(
            "load_spec", "found text of several lines", hint="give a path, or yaml.safe_load(text)"
        )
    names = ", ".join(preset_names())
    return _load(strict_yaml.read(Path(source), if_missing=f"the presets are {names}"))


@cache
def specs_folder() -> Path:
    """The folder of the specs that come with fxskip: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "specs", package.parent / "specs"):
        if (folder / "farskip.yaml").is_file():
            return folder
    raise SpecError("load_spec", f"no specs/farskip.yaml in or beside {package}", hint="install fxskip again")


@cache
def preset_names() -> tuple[str, ...]:
    """Names that `load_spec` and the key `preset` know: the files of specs/."""
    return tuple(sorted(path.stem for path in specs_folder().glob("*.yaml")))


def _load(document: Document) -> Spec:
    """Check it all, with the rules of a preset behind the user's own: connect.0 is what the user wrote."""
    data = dict(document.data)
    faults: list[Problem] = []
    context = None
    if "preset" in data:
        preset, own = data.pop("preset"), data.get("connect", [])
        if not isinstance(preset, str) or preset not in preset_names():
            message = f"no preset is called {shown(preset)}; {did_you_mean(preset, preset_names())}"
            faults.append(Problem(document.line_of(("preset",)), "preset", message))
        elif isinstance(own, list | tuple):
            context = (preset, len(own))
            data["connect"] = [*own, *load_spec(preset).connect]
            if not own:
                data.setdefault("name", preset)
    checked = Document(document.source, data, document.lines, document.problems)
    return validate(Spec, checked, also=faults, more_keys=["preset"], context=context)
