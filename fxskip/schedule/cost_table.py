"""Measured costs: a small JSON file, with what they were measured for, and the medians of ranks made one.

{
  "fxskip_costs": 1,
  "key": {"model": "DeepseekV2ForCausalLM", "shapes": {"model.layers.0.self_attn.o_proj.weight": [2048, 2048]},
          "parallel": {"expert": "8, all_to_all", "tensor": "1"}, "dtype": "bfloat16", "device": "NVIDIA H200",
          "transport": "nccl", "versions": {"torch": "2.11.0", "nccl": "2.28.9"}},
  "tokens": 8192,
  "costs_us": {"dispatch": 371.5, "experts": 1190.2}
}
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from fxskip.errors import ScheduleError, SpecError
from fxskip.strict_model import Strict, validate
from fxskip.strict_yaml import Document


class CostKey(Strict):
    """What measured costs depend on, but for the number of tokens.

    Costs of other work say nothing: they are refused. Those of other machinery may still be the best there are: a
    warning names both.
    """

    model: str = Field(min_length=1, description="class of the model")
    shapes: dict[str, list[int]] = Field(
        description="of the parameters of a decoder layer on all ranks together, by the name in the first layer that "
        "has such a one"
    )
    parallel: dict[str, str] = Field(
        description="sizes of the axes that a layer is spread over, and the exchange"
    )
    dtype: str = Field(min_length=1, description="of weights and activations, as torch names it")
    device: str = Field(min_length=1, description="as torch.cuda.get_device_name() says")
    transport: str = Field(min_length=1, description="what moves the bytes")
    versions: dict[str, str] = Field(description="of torch, NCCL, fxskip and what else runs kernels")


_WORK = ("model", "shapes", "parallel", "dtype")
"""The part of a key that says what is computed and sent."""
_SHOWN = 3
"""So many differences of one kind are quoted."""


class CostTable(Strict):
    """Costs of tasks alone on the machine, in microseconds."""

    fxskip_costs: Literal[1] = Field(default=1, description="version of this format")
    key: CostKey
    tokens: int = Field(ge=1, description="of one rank in the step that was measured")
    costs_us: dict[str, PositiveFloat] = Field(min_length=1, description="by role of the task")

    def require_fit(self, key: CostKey, path: str | PathLike[str]) -> None:
        """Raise ScheduleError where the costs are those of other work than `key` says; warn where they were measured
        on another device, by another transport or with other versions. `path`: where the table was read."""
        differ = {
            name: _difference(getattr(self.key, name), getattr(key, name)) for name in CostKey.model_fields
        }
        work = {name: found for name, found in differ.items() if found and name in _WORK}
        if work:
            raise ScheduleError(
                "schedule.costs",
                f"the costs were measured for a student that differs in {', '.join(work)}",
                where=f"{path}: " + "; ".join(work.values()),
                hint="measure this student with fxskip trace, or write costs: roofline",
            )
        if other := [found for found in differ.values() if found]:
            warnings.warn(
                f"fxskip: schedule.costs: {path} was measured elsewhere: {'; '.join(other)}. Orders are chosen by it "
                "all the same; fxskip trace measures here",
                stacklevel=2,
            )


def load_costs(path: str | PathLike[str]) -> CostTable:
    """Read and check a table. Raises SpecError for a file that cannot be read or is none."""
    return validate(CostTable, Document(str(path), _json(Path(path))))


def save_costs(table: CostTable, path: str | PathLike[str]) -> None:
    """Write the table; the file's text depends on its content alone."""
    Path(path).write_text(json.dumps(table.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")


def merged_costs(per_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One cost for each task from the medians of all ranks: their median, the lower one of an even number.

    Nothing is computed, only chosen, and ranks count alike: in whatever order they come, the result is the same.

    Raises ScheduleError where ranks measured different tasks or something that is no time.
    """
    if not per_rank:
        raise ScheduleError("merged_costs", "no rank gave costs", hint="gather them from every rank")
    names = list(per_rank[0])
    for rank, costs in enumerate(per_rank):
        odd = sorted(set(costs) ^ set(names))
        if odd:
            raise ScheduleError(
                "merged_costs",
                f"rank {rank} and rank 0 measured different tasks: {', '.join(odd[:5])}",
                hint="measure the same task graph on every rank",
            )
        for name, us in costs.items():
            if not 0 < us < float("inf"):
                raise ScheduleError(
                    "merged_costs",
                    f"{name} took {us!r} us",
                    where=f"rank {rank}",
                    hint="give microseconds above 0",
                )
    return {name: statistics.median_low(costs[name] for costs in per_rank) for name in names}


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(), object_pairs_hook=_without_repeats)
    except (OSError, ValueError) as error:
        raise SpecError(
            "schedule.costs", f"{path} cannot be read: {_reason(error)}", hint=_HOW_TO_MEASURE
        ) from None
    if not isinstance(data, dict):
        raise SpecError("schedule.costs", f"{path} holds no mapping", hint=_HOW_TO_MEASURE)
    return data


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


_HOW_TO_MEASURE = (
    "schedule.costs is roofline, or a table of measured costs: fxskip.trace(student, batch, out='trace') writes "
    "trace/costs.json, and fxskip trace --out trace does"
)


def _difference(found: object, wanted: object) -> str:
    """What one part of a table's key is, and what that of the student; "" where they are the same."""
    if found == wanted:
        return ""
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return f"{found!r}, here {wanted!r}"
    names = [name for name in found | wanted if found.get(name) != wanted.get(name)]
    told = [f"{n} {found.get(n, 'missing')}, here {wanted.get(n, 'missing')}" for n in names[:_SHOWN]]
    return ", ".join(told) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Python's reader would keep the last of two values of one name and say nothing."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands there twice")
        found[name] = value
    return found
