"""Whatever does not know the wiring must fail to load a rewired model, and say what to install."""

import json

import pytest
import transformers

from tests.checkpoint.samples import edited, run_module
from tests.checkpoint.without_fxskip import WAYS

# What a careless repair of config.json might look like; any one of them alone.
EDITS = {
    "as_saved": lambda config: None,
    "model_type": lambda config: config.update(model_type="mixtral"),
    "model_type_and_class": lambda c: c.update(model_type="mixtral", architectures=["MixtralForCausalLM"]),
    "no_remote_code": lambda config: (config.update(model_type="mixtral"), config.pop("auto_map")),
    "no_record": lambda config: (config.update(model_type="mixtral"), config.pop("fxskip")),
}

OTHERS = [way for way in WAYS if way != "AutoConfig" and not way.startswith("AutoModelForCausalLM")]


@pytest.fixture(scope="module")
def outcomes(saved, stock, tmp_path_factory):
    root = tmp_path_factory.mktemp("edited")
    folders = [edited(saved, root / name, edit) for name, edit in EDITS.items()]
    printed = run_module("tests.checkpoint.without_fxskip", stock, *folders, cache=root / "cache")
    found = json.loads(printed.splitlines()[-1])
    return {name: found[str(root / name)] for name in EDITS} | {"stock": found[str(stock)]}


def test_the_ways_to_load_work_for_the_original(outcomes):
    """So that the failures below are not those of the environment."""
    assert all(result.startswith("loaded") for result in outcomes["stock"].values()), outcomes["stock"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EDITS)
def test_loading_without_fxskip_fails_and_says_what_to_do(outcomes, name, way):
    result = outcomes[name][way]
    assert not result.startswith("loaded")
    # Without trust transformers does not look further, and asks for it; with it, the answer is the other one.
    asks_for_trust = "trusting" not in way and "trust_remote_code=True" in result
    assert "pip install fxskip" in result or asks_for_trust


@pytest.mark.parametrize("way", OTHERS)
def test_with_fxskip_no_other_class_loads_it(saved, way):
    """AutoModel too: a base model has no head, so the record of a causal model does not speak of it."""
    with pytest.raises(ValueError, match=r"pip install fxskip|FxSkipMixtralConfig"):
        getattr(transformers, way.partition(",")[0]).from_pretrained(saved, **WAYS[way])
