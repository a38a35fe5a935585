"""The spec language: what is accepted, what it means, and what a user is told about everything else."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from fxskip.errors import SpecError
from fxskip.layer_selection import parse_layers
from fxskip.spec import Addend, Rule, Spec, load_spec

FULL = """\
fxskip: 1
name: everything
connect:
  - blocks: attention
    layers: {skip_first: 10%}
    without: [routed@1, all@2]
  - blocks: [moe, 'model.layers.*.mlp']
    layers: [7, 0]
    without: [all@1]
sum: split
parallel: {expert: {size: 8, exchange: all_reduce}, tensor: {size: 2}}
schedule: {overlap: none, gradients: in_backward, bucket_mib: 3, solver: cp_sat, costs: specs/hardware/h200.yaml,
           max_in_flight_mib: 64}
runtime: {recompute: layer, lower: aot_eager, transport: gloo, mode: eager_wait}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def rule(blocks="moe", layers="all", without=("all@1",)) -> dict:
    return {"blocks": blocks, "layers": layers, "without": list(without)}


def problems_of(source) -> list[tuple[int | None, str, str]]:
    with pytest.raises(SpecError) as caught:
        load_spec(source)
    return [tuple(problem) for problem in caught.value.problems]


# ---------------------------------------------------------------- what a spec says


def test_every_key_of_the_language_is_read(tmp_path):
    spec = load_spec(written(tmp_path, FULL))

    first, second = spec.connect
    assert (first.blocks, first.without) == (("attention",), (Addend("routed", 1), Addend("all", 2)))
    assert (second.blocks, second.layers.resolve(8)) == (("moe", "model.layers.*.mlp"), (0, 7))
    assert spec.sum == "split"
    assert (spec.parallel.expert.size, spec.parallel.expert.exchange, spec.parallel.tensor.size) == (
        8,
        "all_reduce",
        2,
    )
    assert spec.schedule.model_dump() == {
        "overlap": "none", "backward": "mirrored", "gradients": "in_backward", "bucket_mib": 3, "solver": "cp_sat",
        "costs": "specs/hardware/h200.yaml", "max_in_flight_mib": 64,
    }  # fmt: skip
    assert spec.runtime.model_dump() == {
        "recompute": "layer", "lower": "aot_eager", "transport": "gloo", "mode": "eager_wait"
    }  # fmt: skip


def test_what_is_omitted_means_one_process_and_nothing_scheduled():
    spec = load_spec({"fxskip": 1})
    assert (spec.connect, spec.sum, spec.parallel, spec.schedule, spec.runtime) == (
        (),
        "as_written",
        None,
        None,
        None,
    )
    section = load_spec({"fxskip": 1, "schedule": {}, "runtime": {}})
    assert section.schedule.model_dump() == {
        "overlap": "full", "backward": "mirrored", "gradients": "by_call", "bucket_mib": 25, "solver": "list",
        "costs": "roofline", "max_in_flight_mib": 1024,
    }  # fmt: skip
    assert section.runtime.model_dump() == {
        "recompute": "none", "lower": "none", "transport": "auto", "mode": "scheduled"
    }  # fmt: skip


def test_an_explicit_backward_needs_something_in_flight():
    spec = load_spec({"fxskip": 1, "schedule": {"backward": "explicit"}})
    assert spec.schedule.backward == "explicit"
    with pytest.raises(SpecError, match="overlap: none has none; write overlap: full, or leave backward out"):
        load_spec({"fxskip": 1, "schedule": {"backward": "explicit", "overlap": "none"}})


def test_a_rule_names_blocks_by_kind_or_path():
    def claims(blocks, kind, path="model.layers.3.mlp"):
        return Rule.model_validate(rule(blocks)).claims(kind, path)

    assert claims("moe", "moe") and not claims("moe", "dense")
    assert claims("mixer", "attention") and claims("mixer", "mixer") and not claims("attention", "mixer")
    assert claims("all", "dense")
    assert claims("model.layers.*.mlp", "dense") and not claims("model.layers.[12].mlp", "dense")


# ---------------------------------------------------------------- presets


def test_a_preset_stands_for_its_rules():
    farskip = load_spec("farskip")
    assert load_spec({"fxskip": 1, "preset": "farskip"}) == farskip
    assert load_spec(farskip) is farskip
    own = load_spec({"fxskip": 1, "preset": "farskip-attention", "connect": [rule("moe", without=["all@2"])]})
    assert [r.blocks for r in own.connect] == [("moe",), ("mixer",)]


def test_own_rules_may_not_claim_what_the_preset_claims(tmp_path):
    path = written(tmp_path, "fxskip: 1\npreset: farskip\nconnect:\n  - {blocks: moe, without: [all@2]}\n")
    message = "claims moe, and so does preset 'farskip'; a block takes one rule"
    assert problems_of(path) == [(4, "connect.0", message)]


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (rule("moe"), rule(["dense", "moe"], [3]), "moe"),
        (rule("attention", "2-4"), rule("mixer", [4, 9]), "attention"),
        (rule("moe", {"last": 3}), rule("moe", {"skip_first": "50%"}), "moe"),
        (rule("all"), rule("*.mlp", [1]), "*.mlp"),
        (rule("*.mlp"), rule("*.mlp"), "*.mlp"),
        (rule("moe", [0, 1]), rule("moe", [2]), None),
        (rule("moe", {"first": 4}), rule("moe", {"last": 4}), None),  # depends on the number of layers
        (rule("all", [0, 3]), rule("model.layers.7.mlp"), None),  # the path names another layer
        (rule("moe"), rule("model.layers.7.mlp"), None),  # layer 7 may be dense
        (rule("moe"), rule("dense"), None),
    ],
)
def test_two_rules_for_one_block(one, other, both):
    for rules, later in ([one, other], "connect.0"), ([other, one], "connect.0"):
        source = {"fxskip": 1, "connect": rules}
        if both is None:
            assert len(load_spec(source).connect) == 2
        else:
            message = f"claims {both}, and so does {later}; a block takes one rule"
            assert problems_of(source) == [(None, "connect.1", message)]


# ---------------------------------------------------------------- a spec travels


def test_a_spec_survives_dict_json_yaml_and_pickle(tmp_path):
    spec = load_spec(written(tmp_path, FULL))
    assert load_spec(json.loads(json.dumps(spec.to_dict()))) == spec
    assert load_spec(written(tmp_path, spec.to_yaml())) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec.to_dict()["connect"][0]["layers"] == {"skip_first": "10%"}


def test_a_spec_cannot_be_changed():
    spec = load_spec("farskip")
    with pytest.raises(ValueError, match="frozen"):
        spec.connect[0].layers = parse_layers([1])
    assert isinstance(hash(spec), int)


def test_loading_a_spec_imports_no_torch():
    # The package's own __init__ may import torch; the spec and what it stands on may not.
    code = """if True:
        import sys, types
        package = types.ModuleType("fxskip")
        package.__path__ = ["fxskip"]
        sys.modules["fxskip"] = package
        from fxskip.spec import load_spec
        load_spec("farskip")
        print("torch" in sys.modules)"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "False\n"


# ---------------------------------------------------------------- what the user is told


def test_all_problems_are_reported_at_once_with_their_lines(tmp_path):
    path = written(
        tmp_path,
        """\
fxskip: 2
nam: x
preset: farskp
connect:
  - blocks: atention
    layers: 26-4
    without: [routed@0, rooted@1, all@1, all@1]
  - blocks: moe
    witout: [all@1]
    layers: {frist: 3}
  - blocks: [moe, 3, all]
    without: all@1
    layers: [3, 3, -1]
sum: splitt
sum: split
parallel: {expert: {size: 0}, tensor: 8}
schedule: {costs: rooflin, max_in_flight_mib: 1.5}
runtime:
""",
    )
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert (
        str(caught.value)
        == f"""\
{path}: 22 problems
  line 1   fxskip                      expected 1, found 2
  line 2   nam                         unknown key; did you mean 'name'?
  line 3   preset                      no preset is called 'farskp'; did you mean 'farskip'?
  line 5   connect.0.blocks            'atention' is neither a kind of block nor a glob such as \
'model.layers.*.mlp'; did you mean 'attention'?
  line 6   connect.0.layers            "26-4" runs backwards; write "4-26"
  line 7   connect.0.without.0         'routed@0': the number must be 1 to 9999 \
(1 is the write just before the block)
  line 7   connect.0.without.1         'rooted@1': no addend is called 'rooted'; did you mean 'routed'?
  line 8   connect.1.without           missing
  line 9   connect.1.witout            unknown key; did you mean 'without'?
  line 10  connect.1.layers.frist      unknown key; did you mean 'first'?
  line 11  connect.2.blocks.0          'moe' is already part of 'all'; delete one
  line 11  connect.2.blocks.1          expected attention, moe, dense, mixer, all \
or a glob of module paths, found 3
  line 12  connect.2.without           expected a list, found 'all@1'; write [all@1]
  line 13  connect.2.layers.1          layer 3 is here twice
  line 13  connect.2.layers.2          expected a layer number, 0 to 9999, found -1
  line 14  sum                         expected as_written or split, found 'splitt'; did you mean 'split'?
  line 15  sum                         this key is here twice, first on line 14; keep one
  line 16  parallel.expert.size        found 0; must be 1 or more
  line 16  parallel.tensor             expected a mapping with the keys size; found 8
  line 17  schedule.costs              'rooflin' is neither a path nor a word; did you mean 'roofline'?
  line 17  schedule.max_in_flight_mib  expected a valid integer, found 1.5
  line 18  runtime                     has no value; write one, or delete the key"""
    )


# What is wrong with one rule: (the fields that differ from a good one, where, what the message says).
BAD_RULES = [
    ({"blocks": ["mixer", "attention"]}, "blocks.1", "already part of 'mixer'"),
    ({"blocks": "moe, dense"}, "blocks", "write a list, [moe, dense]"),
    ({"blocks": []}, "blocks", "selects no block"),
    ({"layers": 3}, "layers", "for one layer write [3]"),
    ({"layers": []}, "layers", "selects no layer"),
    ({"layers": {"first": 0.75}}, "layers.first", "found 0.75"),
    ({"layers": {"skip_first": "100%"}}, "layers.skip_first", "below 100%"),
    ({"layers": "0-99999"}, "layers", "numbers are 0 to 9999"),
    ({"without": []}, "without", "drops nothing"),
    ({"without": ["all@1", "routed@1"]}, "without.1", "part of all@1"),
    ({"without": ["routed"]}, "without.0", "an addend such as routed@1"),
]
BAD_SPECS = [
    ({}, "fxskip", "missing"),
    ({"fxskip": True}, "fxskip", "expected 1, found True"),
    ({"fxskip": 1.0}, "fxskip", "expected 1, found 1.0"),
    ({"fxskip": 1, "connect": rule()}, "connect", "expected a list, found a mapping"),
    ({"fxskip": 1, "parallel": {}}, "parallel", "names no axis"),
    ({"fxskip": 1, "preset": 3}, "preset", "no preset is called 3; known: farskip, "),
    *[
        ({"fxskip": 1, "connect": [rule() | bad]}, f"connect.0.{place}", text)
        for bad, place, text in BAD_RULES
    ],
]


@pytest.mark.parametrize(("source", "location", "message"), BAD_SPECS)
def test_values_that_mean_nothing_are_refused(source, location, message):
    ((line, found_location, found_message),) = problems_of(source)
    assert (line, found_location) == (None, location)
    assert message in found_message


def test_a_source_that_is_no_spec_is_refused(tmp_path):
    assert "no such file; the presets are farskip, " in problems_of("nowhere.yaml")[0][2]
    assert "cannot be read" in problems_of(tmp_path)[0][2]
    assert "cannot be read" in problems_of("a\0b")[0][2]
    assert "several lines" in problems_of(FULL)[0][2]
    with pytest.raises(SpecError, match="give a path, a mapping"):
        load_spec(3)


def test_a_mapping_is_left_alone():
    source = {"fxskip": 1, "preset": "farskip", "connect": []}
    load_spec(source)
    assert source == {"fxskip": 1, "preset": "farskip", "connect": []}


def test_a_spec_made_by_hand_obeys_the_same_rules():
    with pytest.raises(ValueError, match="claims moe"):
        Spec(fxskip=1, connect=(Rule.model_validate(rule()), Rule.model_validate(rule())))
