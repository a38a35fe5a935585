"""Each way of rewiring that the tests use, twice: as a spec for fxskip and as rules for the reference."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from tests.reference import Rules, Without, rewired

Spec = dict[str, Any]


def spec(*rules: dict[str, Any], **fields: Any) -> Spec:
    return {"fxskip": 1, "name": "test", "connect": list(rules), **fields}


@dataclass(frozen=True)
class Wiring:
    """The same rules for every layer, in both languages.

    gradient_tolerance   how far a gradient may be from the reference's, relative to its norm: 0 is to the last
                         bit. Where three or more blocks read one value, autograd sums their gradients in the order
                         in which the reads ran, and the student need not run them in the order of the reference.
    """

    spec: Spec
    without: Without
    gradient_tolerance: float = 0.0

    def reference(self, model: PreTrainedModel, layers: Iterable[int] | None = None) -> PreTrainedModel:
        """The hand-written model: rewired everywhere, or in `layers` only."""
        chosen = range(model.config.num_hidden_layers) if layers is None else layers
        rules: Rules = dict.fromkeys(chosen, self.without)
        return rewired(model, rules)


REORDERED = 1e-6

ATTENTION_RULE = {"blocks": "attention", "layers": "all", "without": ["routed@1"]}
MLP_RULE = {"blocks": ["moe", "dense"], "without": ["all@1"]}

FARSKIP = Wiring(spec(ATTENTION_RULE, MLP_RULE), Without(attention=(("routed", 1),), mlp=(("all", 1),)))

WIRINGS: dict[str, Wiring] = {
    "farskip": FARSKIP,
    "attention_only": Wiring(spec(ATTENTION_RULE), Without(attention=(("routed", 1),))),
    "mlp_only": Wiring(spec(MLP_RULE), Without(mlp=(("all", 1),))),
    "ladder": Wiring(
        spec({"blocks": "all", "without": ["all@1"]}), Without(attention=(("all", 1),), mlp=(("all", 1),))
    ),
    # A write in the middle is missing: later ones are added to the earlier stream.
    "two_back": Wiring(
        spec({"blocks": "all", "without": ["all@2"]}), Without(attention=(("all", 2),), mlp=(("all", 2),))
    ),
    # Addends of several earlier layers at once, so that streams cross more than one layer.
    "far_back": Wiring(
        spec(
            {"blocks": "attention", "without": ["routed@1", "routed@3"]},
            {"blocks": ["moe", "dense"], "without": ["all@1", "routed@4"]},
        ),
        Without(attention=(("routed", 1), ("routed", 3)), mlp=(("all", 1), ("routed", 4))),
        gradient_tolerance=REORDERED,
    ),
}
