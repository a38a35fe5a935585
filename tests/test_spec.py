"""The spec language: what is accepted, what it means, and what a user is told about everything else."""

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fxskip.errors import CheckpointError, FxskipError, PassError, SpecError
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
schedule: {overlap: none, solver: cp_sat, costs: specs/hardware/h200.yaml, max_in_flight_mib: 64}
runtime: {recompute: layer, transport: gloo, mode: eager_wait}
"""


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
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
        "overlap": "none", "solver": "cp_sat", "costs": "specs/hardware/h200.yaml", "max_in_flight_mib": 64
    }  # fmt: skip
    assert spec.runtime.model_dump() == {"recompute": "layer", "transport": "gloo", "mode": "eager_wait"}


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
        "overlap": "full", "solver": "list", "costs": "roofline", "max_in_flight_mib": 1024
    }  # fmt: skip
    assert section.runtime.model_dump() == {"recompute": "none", "transport": "auto", "mode": "scheduled"}


@pytest.mark.parametrize(
    ("layers", "n_layers", "expected"),
    [
        ("all", 3, [0, 1, 2]),
        ([5, 0], 6, [0, 5]),
        ("4-6", 7, [4, 5, 6]),
        ({"first": 2}, 5, [0, 1]),
        ({"last": 2}, 5, [3, 4]),
        ({"skip_first": 2}, 5, [2, 3, 4]),
        ({"last": "75%"}, 27, range(7, 27)),  # 20.25 -> 20 layers
        ({"first": "50%"}, 27, range(14)),  # 13.5 -> 14 layers
        ({"first": "12.5%"}, 20, range(3)),  # 2.5 -> 3 layers
        ({"first": "1%"}, 4, [0]),  # 0.04 -> still one layer
        ({"skip_first": "10%"}, 4, [1, 2, 3]),  # 0.4 -> one layer is skipped
        ({"last": "100%"}, 3, [0, 1, 2]),
    ],
)
def test_layers_resolve(layers, n_layers, expected):
    assert parse_layers(layers).resolve(n_layers) == tuple(expected)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("4-26", r"layers 4-26: the model has 16 decoder layers .0-15.\n  where  connect.0\n  hint   .*0-15"),
        ([16], "use numbers 0-15"),
        ({"first": 17}, r"write \{first: 16\} or less"),
        ({"skip_first": 16}, "no layer is left"),
    ],
)  # fmt: skip
def test_layers_that_do_not_fit_the_model_are_refused(layers, message):
    assert parse_layers({"last": 16}).resolve(16) == tuple(range(16))
    with pytest.raises(SpecError, match=message):
        parse_layers(layers).resolve(16, where="connect.0")


amounts = st.one_of(st.integers(1, 12), st.integers(1, 99).map(lambda p: f"{p}%"))
selections = st.one_of(
    st.just("all"),
    st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True),
    st.tuples(st.sampled_from(["first", "last", "skip_first"]), amounts).map(lambda pair: dict([pair])),
).map(parse_layers)


@given(one=selections, other=selections)
def test_a_shared_layer_is_claimed_only_if_every_model_has_it(one, other):
    assert parse_layers(one.to_plain()) == one
    shared = one.shares_a_layer_with(other)
    assert shared == other.shares_a_layer_with(one)
    for n_layers in range(1, 30):
        try:
            common = set(one.resolve(n_layers)) & set(other.resolve(n_layers))
        except SpecError:
            continue
        assert common or not shared, f"{one} and {other} share nothing in {n_layers} layers"


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
    assert [r.blocks for r in own.connect] == [("moe",), ("attention",)]


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


def test_digest_is_the_sha256_of_the_meaning(tmp_path):
    meaning = {
        "fxskip": 1,
        "connect": [
            ["attention", "{skip_first: 10%}", "all@2", "routed@1"],
            ["moe", "[0, 7]", "all@1"],
            ["model.layers.*.mlp", "[0, 7]", "all@1"],
        ],
        "sum": "split",
        "parallel": {"expert": {"size": 8, "exchange": "all_reduce"}, "tensor": {"size": 2}},
        "schedule": {
            "overlap": "none", "solver": "cp_sat", "costs": "specs/hardware/h200.yaml", "max_in_flight_mib": 64
        },
        "runtime": {"recompute": "layer", "transport": "gloo", "mode": "eager_wait"},
    }  # fmt: skip
    meaning["connect"].sort()
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
    assert load_spec(written(tmp_path, FULL)).digest() == hashlib.sha256(text.encode()).hexdigest()


def test_digest_ignores_how_it_was_written_and_sees_what_it_means():
    farskip = load_spec("farskip").digest()
    rules = [rule("dense"), rule("attention", {"last": "100%"}, ["routed@1"]), rule("moe")]
    same = {"fxskip": 1, "name": "mine", "connect": rules, "parallel": {"tensor": {"size": 1}}}
    assert load_spec(same).digest() == farskip
    for change in (
        {"sum": "split"},
        {"schedule": {}},
        {"parallel": {"tensor": {"size": 2}}},
        {"connect": rules[:2]},
    ):
        assert load_spec(same | change).digest() != farskip, change


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


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file is empty"),
        ("# nothing\n", 1, "the file is empty"),
        ("\n- fxskip: 1\n", 2, "expected a mapping of keys and values, found a list"),
        ("fxskip: 1\nconnect:\n\t- blocks: moe\n", 3, "a tab; indent with spaces"),
        ("fxskip: 1\nname: a\nname: b\n", 3, "twice, first on line 2"),
        ("fxskip: 1\nname: &a x\n", 2, "anchors and aliases"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n", 1, "anchors and aliases"),
        ("fxskip: 1\nconnect:\n  - blocks: *.mlp\n", 3, "quote the glob, as in '*.mlp'"),
        ("fxskip: 1\nname: @x\n", 2, "quote it"),
        ("fxskip: 1\nname: !!python/object/apply:os.getcwd []\n", 2, "of the YAML type"),
        ("fxskip: 1\nname: 2026-01-01\n", 2, "of the YAML type 'timestamp'"),
        ("fxskip: 1\n1: x\n", 2, "the key '1' is not a word"),
        ("fxskip: 1\n<<: {name: x}\n", 2, "the key '<<' is not a word"),
        ("fxskip: 1\n---\nfxskip: 1\n", 2, "a second document"),
        ("fxskip: 1\nname: [a\n", 3, "expected ',' or ']'"),
        ("fxskip: 010\n", 1, "write a plain decimal number"),
        ("fxskip: " + "9" * 5000, 1, "is not a number that can be held"),
        ("fxskip: " + "9" * 4000, 1, "; too large"),
        ("fxskip: " + "[" * 5000, 1, "nested deeper than 16 levels"),
        ("fxskip: 1\nname: " + "{a: " * 30 + "\n", 2, "nested deeper than 16 levels"),
        (b"fxskip: 1\nname: \xff\xfe\n", 2, "not UTF-8 text"),
        (b"fxskip: 1\nname: \x00\n", 2, "a control character"),
        (b"#" * (2 << 20), None, "larger than 1 MiB"),
    ],
)
def test_text_that_is_no_spec_is_refused_with_its_line(tmp_path, text, line, message):
    first = problems_of(written(tmp_path, text))[0]
    assert first[0] == line
    assert message in first[2]


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


def test_yaml_text_of_numbers_means_what_it_looks_like(tmp_path):
    # 1e-4 is a number although YAML 1.1 wants a dot; a strict number field would refuse the text.
    from fxskip.strict_yaml import read

    assert read(written(tmp_path, "a: 1e-4\nb: 2\nc: 4-26\nd: true\n")).data == {
        "a": 1e-4,
        "b": 2,
        "c": "4-26",
        "d": True,
    }
    assert yaml.safe_load("a: 1e-4") == {"a": "1e-4"}


# ---------------------------------------------------------------- errors


def test_an_error_says_who_what_where_and_what_to_write():
    error = PassError(
        "reroute", "drops nothing", where="model  layers\nin two lines", hint="select layers 2-26"
    )
    assert (
        str(error)
        == """\
reroute: drops nothing
  where  model  layers
         in two lines
  hint   select layers 2-26"""
    )
    assert (
        str(CheckpointError("doctor", "no spec", hint="save again")) == "doctor: no spec\n  hint   save again"
    )


@pytest.mark.parametrize(
    "error",
    [
        PassError("reroute", "drops nothing", where="layer 3", hint="select other layers"),
        SpecError("layers", "out of range", hint="0-15"),
        SpecError("mine.yaml", [(4, "connect.0", "missing"), (None, "", "empty")]),
    ],
)
def test_an_error_survives_the_way_from_a_worker_process(error):
    error.add_note("pass 3 of 5")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and isinstance(again, FxskipError)
    assert str(again) == str(error) and vars(again) == vars(error)


def test_a_spec_made_by_hand_obeys_the_same_rules():
    with pytest.raises(ValueError, match="claims moe"):
        Spec(fxskip=1, connect=(Rule.model_validate(rule()), Rule.model_validate(rule())))
