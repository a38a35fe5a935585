from pathlib import Path

import pytest
from pydantic import ValidationError

from fxskip.distill import DistillConfig
from fxskip.distill.config import load_config
from fxskip.errors import SpecError

RECIPES = Path(__file__).parents[2] / "specs" / "distill"


def test_the_default_is_the_recipe_in_specs():
    assert load_config(RECIPES / "fcsd.yaml") == DistillConfig() == load_config(None)


def test_the_control_differs_only_in_what_it_learns_from():
    control = load_config(str(RECIPES / "sft.yaml"))
    assert control == DistillConfig(objective="cross_entropy", hidden_weight=0)


def test_all_problems_are_reported_with_their_lines(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "steps: 1.5\nlearning_rate: 6e-4\nwarm_up_fraction: 0.1\nearly_stopping:\n  patience: 0\n"
    )
    with pytest.raises(SpecError) as error:
        load_config(path)
    found = {(p.line, p.location): p.message for p in error.value.problems}
    assert found.keys() == {(1, "steps"), (3, "warm_up_fraction"), (5, "early_stopping.patience")}
    assert found[3, "warm_up_fraction"] == "unknown key; did you mean 'warmup_fraction'?"
    assert found[1, "steps"].endswith("found 1.5")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "150"}, "found '150'"),
        ({"learning_rate": float("nan")}, "finite"),
        ({"betas": [0.9, 1.0]}, "below 1"),
        ({"objective": "cross_entropy"}, "write hidden_weight: 0"),
        ({"objective": "cross_entropy", "hidden_weight": 0, "temperature": 2.0}, "only objective kl has one"),
        ({"objective": "reverse_kl"}, "expected kl or cross_entropy"),
    ],
    ids=str,
)
def test_a_bad_value_is_explained(values, message):
    with pytest.raises(SpecError, match=message):
        load_config(values)


def test_files_that_are_no_recipe(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- steps\n")
    with pytest.raises(SpecError, match="found a list"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("steps: [\n")
    with pytest.raises(SpecError, match="line 2"):
        load_config(tmp_path / "broken.yaml")


def test_python_values_are_checked_and_frozen():
    config = DistillConfig(learning_rate=1, early_stopping={"patience": 2})
    assert (config.learning_rate, config.early_stopping.patience) == (1.0, 2)
    with pytest.raises(ValidationError):
        config.steps = 3
