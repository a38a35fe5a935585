"""Layer selections: what they resolve to, and when two of them are sure to share a layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxskip.errors import SpecError
from fxskip.layer_selection import parse_layers


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
