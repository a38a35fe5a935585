"""Ranks that wait for each other are found out; ranks that are only slow are not."""

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from fxskip.collectives import waiting
from fxskip.collectives.waiting import Wait, for_each_other, strike_out, write_down


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    found = dist.HashStore()
    monkeypatch.setattr(waiting, "_get_default_store", lambda: found)
    return found


def waits(name: str, group: str, number: int, ranks: Sequence[int], **issued: Sequence[str]) -> Wait:
    """`issued` has the names of what was issued in each group."""
    counts = {one: len(names) for one, names in issued.items()}
    return Wait(name, group, number, list(ranks), counts, {one: list(names) for one, names in issued.items()})


STEPS, MORE = ["counts", "dispatch"], ["counts", "dispatch", "counts"]


def test_two_ranks_in_different_calls() -> None:
    """Rank 1 has left average_gradients out, and is in the next forward pass."""
    write_down(0, waits("averages", "data", 1, (0, 1), expert=STEPS, data=["averages"]))
    assert for_each_other(0) == ""  # rank 1 may only be slow
    write_down(1, waits("counts", "expert", 3, (0, 1), expert=MORE))
    assert for_each_other(0) == (
        "rank 0: waits for averages, which rank 1 has not begun\n"
        "rank 1: waits for counts, which rank 0 has not begun"
    )
    assert for_each_other(1).startswith("rank 1: waits for counts, which rank 0 has not begun\nrank 0")


def test_a_rank_that_waits_no_longer() -> None:
    write_down(0, waits("averages", "data", 1, (0, 1), expert=STEPS, data=["averages"]))
    write_down(1, waits("counts", "expert", 3, (0, 1), expert=MORE))
    strike_out(1)
    assert for_each_other(0) == ""


def test_one_that_is_behind_is_waited_for() -> None:
    """Both wait for what the other has issued, or one of them for nobody."""
    write_down(0, waits("dispatch", "expert", 2, (0, 1), expert=STEPS))
    write_down(1, waits("counts", "expert", 3, (0, 1), expert=MORE))
    assert for_each_other(0) == for_each_other(1) == ""


def test_three_ranks_in_a_circle() -> None:
    """Each waits in a group of two for its neighbour. A fourth, which waits for one of them, is in no circle."""
    for rank in range(3):
        following = (rank + 1) % 3
        group = "".join(map(str, sorted((rank, following))))
        ranks = sorted((rank, following))
        write_down(rank, waits(f"sum {rank}", group, 1, ranks, **{group: [f"sum {rank}"]}))
    write_down(3, waits("sum 3", "03", 1, (0, 3), **{"03": ["sum 3"]}))
    assert for_each_other(1) == (
        "rank 1: waits for sum 1, which rank 2 has not begun\n"
        "rank 2: waits for sum 2, which rank 0 has not begun\n"
        "rank 0: waits for sum 0, which rank 1 has not begun"
    )
    assert for_each_other(3) == ""


def test_one_collective_that_two_ranks_take_for_different_ones() -> None:
    write_down(0, waits("gradient", "expert", 3, (0, 1), expert=[*STEPS, "gradient"]))
    write_down(1, waits("counts", "expert", 4, (0, 1), expert=[*MORE, "counts"]))
    assert for_each_other(0) == for_each_other(1)
    assert for_each_other(0) == (
        "rank 0: collective number 3 of ranks 0, 1 is gradient; waits for gradient\n"
        "rank 1: collective number 3 of ranks 0, 1 is counts; waits for counts"
    )


def test_names_are_compared_as_far_as_both_are_known() -> None:
    long = [f"sum {number}" for number in range(100)]
    one = Wait("sum 99", "g", 100, [0, 1], {"g": 100}, {"g": long[-64:]})
    other = Wait("sum 79", "g", 80, [0, 1], {"g": 80}, {"g": long[:80][-64:]})
    write_down(0, one)
    write_down(1, other)
    assert (one.name_of("g", 37), one.name_of("g", 36), one.name_of("g", 101)) == ("sum 36", None, None)
    assert for_each_other(0) == for_each_other(1) == ""
