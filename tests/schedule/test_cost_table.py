"""Measured costs: round trip, what they were measured for, medians over ranks."""

import json
import warnings
from itertools import permutations

import pytest

from fxskip.errors import ScheduleError, SpecError
from fxskip.parallel import TaskCosts
from fxskip.schedule.cost_table import CostKey, CostTable, load_costs, merged_costs, save_costs

KEY = CostKey(
    model="DeepseekV2ForCausalLM",
    shapes={"layers.0.o_proj.weight": [2048, 2048], "layers.1.gate.weight": [64, 2048]},
    parallel={"expert": "8, all_to_all", "tensor": "1"},
    dtype="bfloat16",
    device="NVIDIA H200",
    transport="nccl",
    versions={"torch": "2.11.0", "nccl": "2.28.9"},
)
TABLE = CostTable(key=KEY, tokens=8192, costs_us={"dispatch": 371.5, "experts": 1190.2})


def test_a_table_comes_back(tmp_path):
    save_costs(TABLE, tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == TABLE


def test_what_a_layer_is_scheduled_by_can_be_hashed():
    one, other = ({"dispatch": 371.5, "experts": 1190.2}, {"experts": 1190.2, "dispatch": 371.5})
    assert hash(TaskCosts.of(8192, other)) == hash(TaskCosts.of(8192, one))
    assert TaskCosts.of(8192, one) == TaskCosts(8192, (("dispatch", 371.5), ("experts", 1190.2)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            {"model": "MixtralForCausalLM"},
            "differs in model\n.*'DeepseekV2ForCausalLM', here 'MixtralForCausalLM'",
        ),
        (
            {"shapes": KEY.shapes | {"layers.1.gate.weight": [32, 2048]}},
            r"differs in shapes\n.*layers.1.gate.weight \[64, 2048\], here \[32, 2048\]",
        ),
        (
            {"shapes": {"layers.0.o_proj.weight": [2048, 2048]}},
            r"layers.1.gate.weight \[64, 2048\], here missing",
        ),
        (
            {"parallel": {"expert": "4, all_to_all", "tensor": "1"}, "dtype": "float32"},
            "differs in parallel, dtype\n.*expert 8, all_to_all, here 4, all_to_all; 'bfloat16', here 'float32'",
        ),
    ],
)
def test_costs_of_other_work_are_refused(change, found):
    with pytest.raises(ScheduleError, match=found) as caught:
        TABLE.require_fit(KEY.model_copy(update=change), "mine/costs.json")
    assert "mine/costs.json" in str(caught.value) and "fxskip trace" in str(caught.value)


def test_many_differences_are_counted():
    wide = KEY.model_copy(update={"shapes": {f"layers.{n}.weight": [n] for n in range(10)}})
    with pytest.raises(ScheduleError, match="and 9 more"):
        TABLE.require_fit(wide, "costs.json")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"device": "NVIDIA B200"}, "'NVIDIA H200', here 'NVIDIA B200'"),
        ({"transport": "copy_engine"}, "'nccl', here 'copy_engine'"),
        ({"versions": {"torch": "2.13.0"}}, "torch 2.11.0, here 2.13.0, nccl 2.28.9, here missing"),
    ],
)
def test_costs_of_other_machinery_are_taken_with_a_warning(change, found):
    with pytest.warns(UserWarning, match=f"mine/costs.json was measured elsewhere: {found}"):
        TABLE.require_fit(KEY.model_copy(update=change), "mine/costs.json")


def test_costs_that_fit_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TABLE.require_fit(KEY, "costs.json")


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
    with pytest.raises(SpecError, match=r"none\.json cannot be read: No such file") as caught:
        load_costs(tmp_path / "none.json")
    assert "trace/costs.json" in str(caught.value)


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
