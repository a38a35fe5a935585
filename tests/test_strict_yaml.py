"""Text that is no strict YAML, as the user meets it: through load_spec."""

import pytest
import yaml

from fxskip.errors import SpecError
from fxskip.spec import load_spec
from fxskip.strict_yaml import read


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
        ("fxskip: " + "9" * 5000, 1, "is no int that can be held"),
        ("fxskip: " + "9" * 4000, 1, "; too large"),
        ("fxskip: " + "[" * 5000, 1, "nested deeper than 16 levels"),
        ("fxskip: 1\nname: " + "{a: " * 30 + "\n", 2, "nested deeper than 16 levels"),
        (b"fxskip: 1\nname: \xff\xfe\n", 2, "not UTF-8 text"),
        (b"fxskip: 1\nname: \x00\n", 2, "a control character"),
        (b"#" * (25 << 10), None, "larger than 24 KiB"),
    ],
)
def test_text_that_is_no_spec_is_refused_with_its_line(tmp_path, text, line, message):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    first = caught.value.problems[0]
    assert first.line == line
    assert message in first.message


def test_a_fault_of_the_text_is_not_reported_again_as_a_value(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("fxskip: 1\nconnect:\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert caught.value.problems == [(2, "connect", "has no value; write one, or delete the key")]


def test_yaml_text_of_numbers_means_what_it_looks_like(tmp_path):
    # 1e-4 is a number although YAML 1.1 wants a dot; a strict number field would refuse the text.
    path = tmp_path / "mine.yaml"
    path.write_text("a: 1e-4\nb: 2\nc: 4-26\nd: true\n")
    assert read(path).data == {"a": 1e-4, "b": 2, "c": "4-26", "d": True}
    assert yaml.safe_load("a: 1e-4") == {"a": "1e-4"}
