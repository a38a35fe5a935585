"""Measured costs: round trip, what they were measured for, medians over ranks."""

import json
from itertools import permutations

import pytest

from fxskip.errors import ScheduleError, SpecError
from fxskip.schedule.cost_table import CostKey, CostTable, load_costs, merged_costs, save_costs

KEY = CostKey(
    shapes={"hidden": [2, 4096, 2048]},
    dtype="bfloat16",
    device="NVIDIA H200",
    versions={"torch": "2.11.0", "nccl": "2.28.9"},
)
TABLE = CostTable(key=KEY, costs_us={"dispatch": 371.5, "experts": 1190.2})


def test_a_table_comes_back(tmp_path):
    save_costs(TABLE, tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json", key=KEY) == TABLE


def test_a_digest_depends_on_content_alone():
    other = KEY.model_copy(update={"versions": {"nccl": "2.28.9", "torch": "2.11.0"}})
    assert other.digest() == KEY.digest()
    assert KEY.model_copy(update={"dtype": "float16"}).digest() != KEY.digest()


def test_a_table_of_another_configuration(tmp_path):
    save_costs(TABLE, tmp_path / "costs.json")
    wanted = KEY.model_copy(update={"device": "NVIDIA B200"})
    with pytest.raises(ScheduleError, match="another device") as caught:
        load_costs(tmp_path / "costs.json", key=wanted)
    assert "'NVIDIA H200', wanted 'NVIDIA B200'" in str(caught.value)


def test_all_problems_of_a_file_are_told(tmp_path):
    path = tmp_path / "costs.json"
    data = TABLE.model_dump() | {"costs_us": {"a": -1.0, "b": "fast"}, "unit": "us"}
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError) as caught:
        load_costs(path)
    assert {problem.location for problem in caught.value.problems} == {"costs_us.a", "costs_us.b", "unit"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "cannot be read"),
        ("[1]", "holds no mapping"),
        ('{"key": 1, "key": 2}', "'key' stands there twice"),
    ],
)
def test_a_file_that_is_no_table(tmp_path, text, found):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=found):
        load_costs(path)


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        load_costs(tmp_path / "none.json")


def test_ranks_agree_in_whatever_order_they_come():
    ranks = [{"a": 1.0, "b": 0.1 + 0.2}, {"b": 0.3, "a": 4.0}, {"a": 2.0, "b": 9.0}, {"a": 3.0, "b": 0.3}]
    merged = {tuple(sorted(merged_costs(order).items())) for order in permutations(ranks)}
    assert merged == {(("a", 2.0), ("b", 0.3))}
    assert merged_costs(ranks[:3]) == {"a": 2.0, "b": 0.1 + 0.2}


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([], "no rank gave costs"),
        ([{"a": 1.0}, {"b": 1.0}], "rank 1 and rank 0 measured different tasks: a, b"),
        ([{"a": 1.0}, {"a": float("nan")}], "a took nan us"),
        ([{"a": 0.0}], r"a took 0\.0 us"),
    ],
)
def test_medians_that_cannot_be_merged(ranks, found):
    with pytest.raises(ScheduleError, match=found):
        merged_costs(ranks)
