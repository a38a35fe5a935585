"""Measured costs: a small JSON file, with what they were measured for, and the medians of ranks made one.

{
  "fxskip_costs": 1,
  "key": {"shapes": {"hidden": [2, 4096, 2048]}, "dtype": "bfloat16", "device": "NVIDIA H200",
          "versions": {"torch": "2.11.0", "nccl": "2.28.9"}},
  "costs_us": {"layers.3.dispatch": 371.5, "layers.3.experts": 1190.2}
}
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from fxskip.errors import ScheduleError, SpecError
from fxskip.strict_model import Strict, validate
from fxskip.strict_yaml import Document


class CostKey(Strict):
    """What measured costs depend on. Costs of another key say nothing."""

    shapes: dict[str, list[int]] = Field(description="of each input that matters, by name")
    dtype: str = Field(min_length=1, description="of weights and activations, as torch names it")
    device: str = Field(min_length=1, description="as torch.cuda.get_device_name() says")
    versions: dict[str, str] = Field(description="of torch, NCCL, fxskip and what else runs kernels")

    def digest(self) -> str:
        """SHA-256 in hex; the same in every process and in whatever order names were given."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class CostTable(Strict):
    """Costs of tasks alone on the machine, in microseconds."""

    fxskip_costs: Literal[1] = Field(default=1, description="version of this format")
    key: CostKey
    costs_us: dict[str, PositiveFloat] = Field(min_length=1, description="by task name")


def load_costs(path: str | PathLike[str], *, key: CostKey | None = None) -> CostTable:
    """Read and check a table. `key`: what it must have been measured for.

    Raises SpecError for a file that is no table, and ScheduleError for one that was measured for something else.
    """
    table = validate(CostTable, Document(str(path), _json(Path(path))))
    if key is not None and table.key != key:
        wanted, found = key.model_dump(), table.key.model_dump()
        differ = [name for name in wanted if wanted[name] != found[name]]
        raise ScheduleError(
            "load_costs",
            f"the costs were measured for another {', '.join(differ)}",
            where=f"{path}: " + "; ".join(f"{n} is {found[n]!r}, wanted {wanted[n]!r}" for n in differ),
            hint="measure again with fxskip trace, or give the table of this configuration",
        )
    return table


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
            "load_costs", f"{path} cannot be read: {error}", hint="give a table of costs"
        ) from None
    if not isinstance(data, dict):
        raise SpecError("load_costs", f"{path} holds no mapping", hint="see fxskip/schedule/cost_table.py")
    return data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Python's reader would keep the last of two values of one name and say nothing."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands there twice")
        found[name] = value
    return found
