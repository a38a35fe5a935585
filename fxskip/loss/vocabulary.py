"""A vocabulary that is spread over the ranks of a process group, each with the rows of the head that it holds."""

# V columns of this rank that are tokens, D width

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group as resolve

from fxskip.errors import FxskipError

# The name since torch 2.13, where the old one warns at each call.
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Shard:
    """This rank's part: tokens first to first + columns - 1 of `vocabulary`. Later rows of the weight are padding."""

    group: dist.ProcessGroup | None
    first: int
    columns: int
    vocabulary: int

    def gathered(self, rows: Tensor) -> tuple[Tensor, dist.Work]:
        """[ranks, ...]: `rows` of every rank, when the returned work is done."""
        assert self.group is not None
        return all_gather(rows, self.group)


def all_gather(part: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """[ranks, *part.shape], when the returned work is done."""
    every = part.new_empty(group.size() * part.numel())  # flat: all that every backend takes
    work: dist.Work | None = GATHER(every, part.reshape(-1), group=group, async_op=True)
    assert work is not None
    return every.view(-1, *part.shape), work


def group_of(name: str) -> dist.ProcessGroup | None:
    """The process group of that name; operators take names, since a group is not a value of a graph. There is no public
    way back from a name; PyTorch's own functional collectives take this one."""
    return resolve(name) if name else None  # type: ignore[arg-type] # a str to older versions


def name_of(who: str, group: object) -> str:
    """What operators call `group`; "" for None."""
    if group is None:
        return ""
    if not isinstance(group, dist.ProcessGroup):
        raise FxskipError(
            who,
            f"group is a {type(group).__name__}",
            hint="a ProcessGroup (mesh.get_group() of a DeviceMesh), or None",
        )
    return str(group.group_name)


def shard_of(
    who: str,
    weight: Tensor,
    vocabulary: int | None,
    group: dist.ProcessGroup | None,
    same: Callable[[], Mapping[str, float | Tensor]],
    *,
    validate: bool,
) -> Shard:
    """Where this rank's rows of the head lie. With `validate` the ranks tell one another what they hold, and the host
    waits for it; without, all are taken to hold as many rows as this one.

    same   gives what all ranks must have alike, by the name of the argument, numbers or tensors []; only then asked
    """
    rows = weight.shape[0]
    if group is None:
        total, first = rows, 0
    elif validate:
        sizes = agreed_sizes(who, weight, {**same(), "vocabulary": vocabulary or 0}, group)
        total, first = sum(sizes), sum(sizes[: group.rank()])
    else:
        total, first = rows * group.size(), rows * group.rank()
    if vocabulary is not None and not 0 < vocabulary <= total:
        held = f"{rows} rows" if group is None else f"{total} rows on {group.size()} ranks"
        raise FxskipError(
            who,
            f"vocabulary is {vocabulary}, and weight has {held}",
            hint=f"vocabulary counts the tokens: 1 to {total}; give each rank of group its own shard of the head",
        )
    tokens = total if vocabulary is None else vocabulary
    return Shard(group, first, min(max(tokens - first, 0), rows), tokens)


def agreed_sizes(
    who: str, weight: Tensor, same: Mapping[str, float | Tensor], group: dist.ProcessGroup
) -> list[int]:
    """Rows of each rank's weight. Where ranks differ in the rest they would wait for each other, or add up parts of
    different losses."""
    mine = torch.stack(
        [
            torch.as_tensor(value, dtype=torch.float64, device=weight.device)
            for value in (len(weight), *same.values())
        ]
    )
    every, work = all_gather(mine, group)
    work.wait()
    sizes, *others = every.T.tolist()
    for name, values in zip(same, others, strict=True):
        if len(set(values)) > 1:
            raise FxskipError(
                who,
                f"the ranks of group differ: {name} is {', '.join(f'{value:g}' for value in values)}",
                hint="every rank of a vocabulary group has the same tokens and options, and its own rows of the head",
            )
    return [int(size) for size in sizes]
