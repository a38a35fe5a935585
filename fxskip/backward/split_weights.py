"""Find the products of a step whose weight gradients can be split off."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from fxskip.backward.module_calls import takes_parameters
from fxskip.backward.program import WeightGradient
from fxskip.backward.weight_gradients import WEIGHT_POSITIONS
from fxskip.ir import op_name, value


def split_weights(
    step: str, nodes: Sequence[fx.Node], inputs: Collection[fx.Node]
) -> tuple[dict[fx.Node, tuple[int, ...]], list[WeightGradient]]:
    """The products in `nodes` with the positions of the weights that can be split off, and a record for each weight.

    A weight can be split off where every use of it in the step is that of a product, as its weight: the parameter
    itself, or one view of it that nothing else uses. Then all of its gradient is computed later, in the usual order.

    inputs   nodes of other steps, placeholders and attributes that the step reads
    """
    inside = set(nodes)
    by_name: dict[str, list[fx.Node]] = {}
    for node in inputs:
        if _may_be_weight(node):
            by_name.setdefault(input_name(node), []).append(node)
    found: dict[fx.Node, tuple[int, ...]] = {}
    records = []
    for name, weights in by_name.items():
        users = [user for weight in weights for user in weight.users if user in inside]
        uses = (
            _through_a_view(weights[0], users[0], inside) if len(users) == 1 else _all_direct(weights, users)
        )
        if uses is not None:
            for product, at in uses:
                found[product] = (*found.get(product, ()), at)
            records.append(WeightGradient(step, name, deferred=True))
        elif _is_weight(weights[0]) and users and all(map(takes_parameters, users)):
            records.append(WeightGradient(step, name, deferred=True))  # by the products that the module calls
        elif _is_weight(weights[0]) or any(_position(user, w) is not None for user in users for w in weights):
            reason = f"not every use is that of a product's weight: {', '.join(user.name for user in users)}"
            records.append(WeightGradient(step, name, deferred=False, reason=reason))
    return {node: tuple(sorted(at)) for node, at in found.items()}, records


def input_name(node: fx.Node) -> str:
    """Name, in the program, of a value of the graph; an attribute has that of its path."""
    return str(node.target) if node.op == "get_attr" else node.name


def _all_direct(weights: Sequence[fx.Node], users: Sequence[fx.Node]) -> list[tuple[fx.Node, int]] | None:
    uses = []
    for user in users:
        at = next((at for weight in weights if (at := _position(user, weight)) is not None), None)
        if at is None:
            return None
        uses.append((user, at))
    return uses


def _through_a_view(
    weight: fx.Node, user: fx.Node, inside: Collection[fx.Node]
) -> list[tuple[fx.Node, int]] | None:
    """The product inside at the end of operations on the weight alone, none of which has another use."""
    at = _position(user, weight)
    while at is None:
        if user.all_input_nodes != [weight] or len(user.users) != 1:
            return None
        weight, user = user, next(iter(user.users))
        if user not in inside:
            return None
        at = _position(user, weight)
    return [(user, at)]


def _position(user: fx.Node, weight: fx.Node) -> int | None:
    """Where a product takes the weight; None where the user is no product or takes it in another place."""
    places = [at for at, argument in enumerate(user.args) if argument is weight]
    wanted = WEIGHT_POSITIONS.get(op_name(user), ()) if user.op in ("call_function", "call_method") else ()
    elsewhere = user.all_input_nodes.count(weight) > 1 or weight in user.kwargs.values()
    return places[0] if len(places) == 1 and places[0] in wanted and not elsewhere else None


def _is_weight(node: fx.Node) -> bool:
    return node.op == "get_attr" or (
        node.op == "placeholder" and "_parameters_" in node.name
    )  # Dynamo's names


def _may_be_weight(node: fx.Node) -> bool:
    """A placeholder of a graph without recorded values may be one. When the graph runs, only a parameter counts."""
    return _is_weight(node) or (node.op == "placeholder" and value(node) is None)
