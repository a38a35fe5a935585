"""Operations that read a module of the layer which runs, with its parameters as arguments.

A graph does not show the parameters of its leaves, routed experts and cut linear layers. A region whose backward is
explicit has to: they are among its inputs.

    before   run_own_experts("mlp.experts", rows, routing)
    after    run_own_experts_with_parameters(names, (gate_up, down), "mlp.experts", rows, routing)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.func import functional_call

from fxskip.backward.weight_gradients import products
from fxskip.collectives.cut_linear import run_cut_linear
from fxskip.collectives.expert_parallel import local, run_own_experts
from fxskip.errors import PassError
from fxskip.leaves import run_leaf, running_layer


@dataclass(frozen=True)
class ModuleParameters:
    """The parameters of one module of a layer, by name, as a graph takes them."""

    path: str
    names: tuple[str, ...]

    def of_running_layer(self) -> tuple[Tensor, ...]:
        """This rank's parts. Their gradients reach the parameters.

        Raises PassError where the module has other parameters than when the graph was made.
        """
        found = dict(running_layer().get_submodule(self.path).named_parameters())
        if tuple(found) != self.names:
            raise PassError(
                "schedule.backward",
                f"module {self.path} has the parameters {', '.join(found) or 'none'}, and the region was made for "
                f"{', '.join(self.names) or 'none'}",
                hint="change modules before the transform, or write backward: mirrored",
            )
        return tuple(local(parameter) for parameter in found.values())


class _Call(nn.Module):
    """An operation as something that `functional_call` can lend other parameters to."""

    def __init__(self, module: nn.Module, operation: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._operation = operation

    def forward(self, *args: Any) -> Any:
        return self._operation(*args)


def _with_parameters(operation: Callable[..., Any]) -> Callable[..., Any]:
    """`operation` with two more arguments in front: names of parameters and what they are meanwhile."""

    def call(names: tuple[str, ...], parameters: tuple[Tensor, ...], *args: Any) -> Any:
        module = _Call(running_layer().get_submodule(args[0]), operation)
        lent = {f"module.{name}": tensor for name, tensor in zip(names, parameters, strict=True)}
        with products(parameters):
            return functional_call(module, lent, args)

    call.__name__ = f"{operation.__name__}_with_parameters"
    return call


_WITH_PARAMETERS = {
    operation: _with_parameters(operation) for operation in (run_own_experts, run_leaf, run_cut_linear)
}
"""For operations whose first argument is the path of a module in the layer that runs."""


def takes_parameters(node: fx.Node) -> bool:
    """Whether the operation runs a module with the parameters that are its arguments."""
    return node.target in _WITH_PARAMETERS.values()


def expose_parameters(graph: fx.Graph, first: fx.Node) -> list[tuple[ModuleParameters, list[fx.Node]]]:
    """Change `graph` so that it takes the parameters of modules that it runs as placeholders, in front of `first`.

    Needs the layer that runs: names are those of its modules.
    """
    found: dict[str, tuple[ModuleParameters, list[fx.Node]]] = {}
    for node in list(graph.nodes):
        if node.target not in _WITH_PARAMETERS:
            continue
        path = str(node.args[0])
        if path not in found:
            names = tuple(name for name, _ in running_layer().get_submodule(path).named_parameters())
            with graph.inserting_before(first):
                found[path] = (ModuleParameters(path, names), [_placeholder(graph, path, n) for n in names])
        held, placeholders = found[path]
        with graph.inserting_before(node):
            operation = _WITH_PARAMETERS[node.target]
            call = graph.call_function(operation, (held.names, tuple(placeholders), *node.args))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    return list(found.values())


def _placeholder(graph: fx.Graph, path: str, name: str) -> fx.Node:
    return graph.placeholder(f"{path}_parameters_{name}".replace(".", "_"))
