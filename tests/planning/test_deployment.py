"""What estimates are for: the caller's word, then the spec's, then a default that says so."""

import pytest

from fxskip.errors import SpecError
from fxskip.planning.deployment import Wishes, deployment
from fxskip.planning.words import deployed
from fxskip.schedule.costs import Costs, Part
from fxskip.schedule.hardware import load_hardware
from fxskip.spec import load_spec

H200 = load_hardware("h200")


def chosen(parallel=None, *, experts=64, heads=16, model_dtype="bfloat16", **wishes):
    spec = load_spec({"fxskip": 1, "preset": "farskip"} | ({"parallel": parallel} if parallel else {}))
    costs = [Costs((Part("attention", 1, 1.0, 1.0, 1),), 64, heads=heads), Costs((), 64, experts, 4)]
    return deployment(Wishes(H200, **wishes), spec, costs, dtype=model_dtype)


def sizes(*arguments, **wishes):
    made = chosen(*arguments, **wishes)
    return made.expert, made.tensor, made.exchange, made.assumed


def test_without_a_word_experts_are_spread_over_one_domain():
    assert sizes() == (8, 1, "all_to_all", True)
    assert sizes(experts=12) == (4, 1, "all_to_all", True)  # as many of its GPUs as can share them evenly


def test_a_spec_that_names_a_mesh_means_it():
    assert sizes({"expert": {"size": 2}}) == (2, 1, "all_to_all", False)
    assert sizes({"tensor": {"size": 2}}) == (1, 2, "all_to_all", False)
    both = {"expert": {"size": 16, "exchange": "all_reduce"}, "tensor": {"size": 2}}
    assert sizes(both) == (16, 2, "all_reduce", False)


def test_the_caller_has_the_last_word():
    assert sizes({"expert": {"size": 2}}, expert_size=4, tensor_size=8) == (4, 8, "all_to_all", False)
    assert sizes(expert_size=1) == (1, 1, "all_to_all", False)


def test_the_type_is_the_model_s_unless_the_caller_names_one():
    assert [chosen(model_dtype="float32").dtype, chosen(model_dtype="float32").bytes] == ["float32", 4]
    assert [chosen(dtype="float8").dtype, chosen(dtype="float8").bytes] == ["float8", 1]
    with pytest.raises(SpecError, match="no figure for matrix products in float64"):
        chosen(dtype="float64")


def test_a_model_in_a_type_without_a_figure_is_estimated_in_another_which_is_said():
    made = chosen(model_dtype="float64")
    assert (made.dtype, made.instead_of) == ("bfloat16", "float64")
    assert "bfloat16 (there is no figure for float64)" in deployed(made)
    assert "no figure" not in deployed(chosen())


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"tokens_per_rank": 0}, "tokens_per_rank is 0"),
        ({"context_tokens": "4096"}, "context_tokens is '4096'"),
        ({"tensor_size": True}, "tensor_size is True"),
        ({"copies_per": "rank"}, "copies_per is 'rank'.*\n.*expert, domain"),
        ({"expert_size": 3}, "3 ranks cannot share 64 experts"),
        ({"tensor_size": 3}, "3 ranks cannot share 16 attention heads"),
    ],
)
def test_refusals(wishes, words):
    with pytest.raises(SpecError, match=words):
        chosen(**wishes)
