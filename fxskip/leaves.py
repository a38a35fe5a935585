"""Leaves: modules that TorchDynamo cannot follow, such as a loop over experts that skips the empty ones.

A leaf is one operation of the captured graph. When the graph runs, the module itself is called, eagerly and
with its hooks: plain autograd, no recomputation. Like a rewired layer, a leaf is its module with another class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fxskip.errors import CaptureError
from fxskip.swapped import Swapped, swapped_class

Contents = Literal["routed", "experts", "unknown"]
"""What a leaf adds to the stream: routed output alone (declared); several experts, perhaps with a shared one beside
them; or nothing that its parameters tell."""

Kind = TypeVar("Kind", bound=type[nn.Module])


@dataclass(frozen=True)
class Declaration:
    """What a user says about a class of modules with `fxskip.leaf`."""

    outputs: Callable[..., Any] | None = None
    adds: Literal["routed"] | None = None


_DECLARED: dict[type[nn.Module], Declaration] = {}


@overload
def leaf(module_class: Kind, /) -> Kind: ...


@overload
def leaf(
    module_class: Kind, /, *, outputs: Callable[..., Any] | None = None, adds: Literal["routed"] | None = None
) -> Kind: ...


@overload
def leaf(
    *, outputs: Callable[..., Any] | None = None, adds: Literal["routed"] | None = None
) -> Callable[[Kind], Kind]: ...


def leaf(
    module_class: Any = None,
    /,
    *,
    outputs: Callable[..., Any] | None = None,
    adds: Literal["routed"] | None = None,
) -> Any:
    """Declare that modules of a class run as they are, as one operation: a call, or a decorator of the class.

        fxskip.leaf(MyExperts)

    Needed only where fxskip does not find out by itself, or assumes too little. Call it before `transform`, and
    again in every process that loads the model: best beside the class.

    Args:
        module_class: a subclass of nn.Module; its subclasses are leaves too.
        outputs: takes the arguments of `forward` and returns empty tensors with the shapes and dtypes of its results.
            Without it, the result is assumed to be one tensor like the first floating-point argument.
        adds: "routed" says that all that the module returns is routed: it has no shared expert inside. Without
            it, a module that routes its tokens itself is a MoE whose shared and routed parts cannot be told apart.

    Raises:
        CaptureError: `module_class` is no class of modules.
    """
    if module_class is None:
        return lambda decorated: leaf(decorated, outputs=outputs, adds=adds)
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)) or adds not in (
        None,
        "routed",
    ):
        raise CaptureError(
            "leaf",
            f"{module_class!r} with adds={adds!r} is no declaration of a leaf",
            hint='pass the class, not an instance: fxskip.leaf(MyExperts), or fxskip.leaf(MyMoE, adds="routed")',
        )
    _DECLARED[module_class] = Declaration(outputs, adds)
    return module_class


class Leaf(Swapped):
    """Mixin of a module that is a leaf. Where Dynamo traces, it is one operation; anywhere else it is itself."""

    fxskip_leaf: str
    """Path of the module in its decoder layer."""
    fxskip_contents: Contents

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return run_leaf(self.fxskip_leaf, self.fxskip_contents, args, kwargs)
        return super().__call__(*args, **kwargs)


def make_leaf(layer: nn.Module, path: str) -> None:
    """Turn the module at `path` in `layer`, in place, into a leaf."""
    module = layer.get_submodule(path)
    if isinstance(module, Leaf) and module.fxskip_leaf != path:
        raise CaptureError(
            "leaf",
            f"two decoder layers share one {module.fxskip_base.__name__} at {module.fxskip_leaf!r} and at {path!r}",
            where=type(layer).__name__,
            hint="give it the same name in both layers",
        )
    if not isinstance(module, Leaf):
        module.__class__ = swapped_class(Leaf, type(module))
    held = cast(Leaf, module)
    held.fxskip_leaf, held.fxskip_contents = path, _contents(held)


def declared_leaves(layer: nn.Module) -> list[str]:
    """The paths of the modules in `layer` whose class the user declared."""
    return [path for path, module in layer.named_modules() if path and _declaration(module) is not None]


def paths_of_class(layer: nn.Module, kind: type[nn.Module]) -> list[str]:
    """The paths of the modules in `layer` of exactly this class."""
    return [path for path, module in layer.named_modules() if path and type(module) is kind]


def leaf_paths(layer: nn.Module) -> tuple[str, ...]:
    """The paths of the leaves of `layer`; what lies inside another leaf is not listed."""
    found: list[str] = []
    for path, module in layer.named_modules():
        if isinstance(module, Leaf) and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return tuple(found)


def holds_experts(module: nn.Module) -> bool:
    """Whether the module's parameters are those of several experts: children with equal parameters, or stacks.

    A stack is a parameter [experts, in, out].
    """
    if any(p.dim() == 3 and p.shape[0] > 1 for p in module.parameters()):
        return True
    for container in module.modules():
        if isinstance(container, nn.ModuleList | nn.ModuleDict) and len(container) > 1:
            shapes = [tuple(tuple(p.shape) for p in child.parameters()) for child in container.children()]
            if shapes[0] and all(one == shapes[0] for one in shapes):
                return True
    return False


@contextmanager
def running(layer: nn.Module) -> Iterator[None]:
    """While it is open, leaves that run are those of `layer`, in this thread and task only."""
    token = _running.set(layer)
    try:
        yield
    finally:
        _running.reset(token)


_running: ContextVar[nn.Module] = ContextVar("fxskip_running_layer")


def running_layer() -> nn.Module:
    """The decoder layer that runs now: equal layers share one graph, so its operations name no module."""
    return _running.get()


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def run_leaf(path: str, contents: Contents, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the leaf at `path` of the layer that runs now; equal layers share one graph, so it names no module.

    Tensors without values (fake ones while Dynamo traces, or meta ones) give empty results of the assumed shapes.

    Raises CaptureError where the results have not the shapes and dtypes that the graph was captured with, or where
    the module wrote into an argument.
    """
    module = cast(Leaf, running_layer().get_submodule(path))
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
        return assumed_results(module, args, kwargs)
    versions = [write_count(t) for t in tensors]
    out = module(*args, **kwargs)
    if versions != [write_count(t) for t in tensors]:
        raise CaptureError(
            "leaf",
            f"{_name(module)} writes into one of its arguments, where no pass can see it",
            where=f"module {module.fxskip_leaf}",
            hint="have it return a new tensor, or copy the argument first",
        )
    _require_assumed(module, out, args, kwargs)
    return out


def write_count(tensor: Tensor) -> int:
    """How often the memory was written; not known in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def assumed_results(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Empty tensors of the shapes and dtypes that a module returns, as declared, or like its first argument.

    Raises CaptureError where it has no floating-point argument.
    """
    declared = _declaration(module)
    if declared is not None and declared.outputs is not None:
        return declared.outputs(*args, **kwargs)
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.is_floating_point():
            return torch.empty_like(value)
    raise CaptureError(
        "leaf",
        f"{_name(module)} has no floating-point argument that its result could be like",
        hint=_outputs_hint(module),
    )


def _require_assumed(module: Leaf, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compare with what was assumed, computed again from the shapes of this call."""
    shapes = pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), (args, kwargs))
    with torch.no_grad():
        assumed = assumed_results(module, *shapes)
    if _described(out) == _described(assumed):
        return
    raise CaptureError(
        "leaf",
        f"{_name(module)} returned {_described(out)} where {_described(assumed)} was assumed",
        where=f"module {module.fxskip_leaf}",
        hint=_outputs_hint(module),
    )


def _described(out: Any) -> str:
    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return type(value).__name__

    if isinstance(out, tuple | list):
        return f"({', '.join(map(one, out))})"
    return one(out)


def _name(module: nn.Module) -> str:
    return getattr(type(module), "fxskip_base", type(module)).__name__


def _outputs_hint(module: nn.Module) -> str:
    return (
        "say before the transform what it returns, for example two tensors:\n"
        f"import fxskip\nfxskip.leaf({_name(module)}, outputs=lambda x, *rest: (torch.empty_like(x), x.new_empty(...)))"
    )


def _declaration(module: nn.Module) -> Declaration | None:
    return next((_DECLARED[kind] for kind in type(module).__mro__ if kind in _DECLARED), None)


def _contents(module: Leaf) -> Contents:
    declared = _declaration(module)
    if declared is not None and declared.adds == "routed":
        return "routed"
    return "experts" if holds_experts(module) else "unknown"
