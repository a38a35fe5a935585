"""The decoder layers of any PyTorch model: found by calling a copy without memory with example inputs.

The layers are the children of a list of modules that run one after the other in one chain, `x = layer(x, ...)`:
each is called once, in order, and the output of one (or its first element) is the first argument of the next.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxskip.capture.twin import (
    LayerCapture,
    capture_chain,
    layer_class,
    meta_twin,
    require_own_class_forward,
)
from fxskip.errors import CaptureError, FxskipError, first_line
from fxskip.leaves import assumed_results

Inputs = tuple[Any, ...]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def capture_layers(
    model: nn.Module, example_inputs: Inputs, paths: tuple[str, ...] = ()
) -> list[LayerCapture]:
    """Capture every layer of `model`, in the order in which they run. `model` is left alone.

    `paths` are the layers; without them they are looked for. Only the shapes and dtypes of `example_inputs` matter.

    Raises CaptureError where the model cannot be called without values, has no chain of layers or several, or
    where a layer cannot be captured as one graph.
    """
    inputs = without_values(example_inputs)
    paths = paths or find_layers(model, inputs)
    for index, path in enumerate(paths):
        require_own_class_forward(model.get_submodule(path), index)
    twin = meta_twin(model).eval()
    layers = {path: twin.get_submodule(path) for path in paths}
    return capture_chain(layers, lambda: call(twin, inputs), model=type(model).__name__)


def without_values(inputs: Inputs) -> Inputs:
    """The inputs with their tensors on the meta device: shapes and dtypes alone. CaptureError for what is no tuple."""
    if not isinstance(inputs, tuple | list):
        raise CaptureError(
            "example_inputs",
            f"found a {type(inputs).__name__}",
            hint="give a tuple of the positional inputs: example_inputs=(ids,), with the comma",
        )
    moved: Inputs = pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), inputs)
    return moved


def require_streams_pass(model: nn.Module, inputs: Inputs, layers: Sequence[LayerCapture]) -> None:
    """Refuse a model that does more with a layer's output than hand it on: rewired, it can be several streams.

    Calls a twin twice, with layers that return one tensor and with layers that return a tuple of two.
    """
    results = []
    for count in (1, 2):
        twin = meta_twin(model).eval()
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            _hand_on(twin.get_submodule(layer.path), layer.result, 1 if is_last else count)
        try:
            results.append(pytree.tree_map_only(Tensor, _described, call(twin, inputs)))
        except CaptureError as error:
            raise CaptureError(
                "transform", f"{_TOUCHED}: {error.found}", where=error.where, hint=_UNTOUCHED_HINT
            ) from error.__cause__
    if results[0] != results[1]:
        raise CaptureError(
            "transform",
            f"{_TOUCHED}: it returns {results[0]} with one stream and {results[1]} with two",
            where=type(model).__name__,
            hint=_UNTOUCHED_HINT,
        )


_TOUCHED = "the model does more with a layer's output than hand it to the next layer"
_UNTOUCHED_HINT = (
    "between rewired layers the stream is a tuple of tensors, the full one first: collect or change hidden states "
    "inside the layers or after the last one, not between them"
)


class _Sealed(tuple[Tensor, ...]):
    """Streams that only a layer may open: `x[-1]` of a model would be a stream here, and a token there."""

    def _refuse(self, *arguments: Any) -> Any:
        raise CaptureError("streams", "it opens the tuple of streams", hint=_UNTOUCHED_HINT)

    __getitem__ = __iter__ = __len__ = __add__ = __mul__ = __contains__ = _refuse


def _hand_on(layer: nn.Module, result: Any, count: int) -> None:
    def forward(stream: Any, *args: Any, **kwargs: Any) -> Any:
        first = result[0] if isinstance(result, tuple) else result
        streams = first if count == 1 else _Sealed(torch.empty_like(first) for _ in range(count))
        return (streams, *result[1:]) if isinstance(result, tuple) else streams

    layer.__class__ = layer_class(layer)
    layer.forward = forward


def call(twin: nn.Module, inputs: Inputs) -> Any:
    """Call a twin on the meta device. Raises CaptureError where its code needs values."""
    try:
        with torch.no_grad(), torch.device("meta"):
            return twin(*inputs)
    except FxskipError:
        raise
    except Exception as error:
        raise CaptureError(
            "capture_layers",
            f"the model's code around its layers does not run without values: {type(error).__name__}: "
            f"{first_line(error)}",
            where=f"{type(twin).__name__}{_last_line(twin, error)}",
            hint="example_inputs must be what the model is called with; its tensors are moved to the meta device, so "
            "code outside the layers must not read values (.item(), if tensor) or name another device",
        ) from error


def _last_line(twin: nn.Module, error: Exception) -> str:
    """Where the model's own code was when the error was raised."""
    file = inspect.getsourcefile(type(twin))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f', File "{frames[-1].filename}", line {frames[-1].lineno}: {frames[-1].line}' if frames else ""


def find_layers(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """The paths of the model's layers; `inputs` have no values.

    Raises CaptureError that says for each list of modules why it is no chain.
    """
    twin = meta_twin(model).eval()
    observed = [
        _Observed(path, m) for path, m in twin.named_modules() if isinstance(m, _LISTS) and len(m) > 0
    ]
    with _watching(twin, observed):
        call(twin, inputs)
    chains = [one for one in observed if one.fault() == ""]
    outer = [c for c in chains if not any(c.path.startswith(f"{o.path}.") for o in chains if o is not c)]
    if len(outer) == 1:
        return tuple(outer[0].paths)
    looked_at = "\n".join(f"{o.path} ({len(o.children)} modules): {o.fault() or 'a chain'}" for o in observed)
    raise CaptureError(
        "find_layers",
        f"{type(model).__name__} has {len(outer)} lists of modules that form a chain, each fed with the output of the "
        "one before; there must be one",
        where=looked_at or "it has no nn.ModuleList, nn.ModuleDict or nn.Sequential",
        hint="write the layers as one such list that the model calls in order: for layer in self.layers: "
        "x = layer(x, ...), with x [batch, length, width] the first positional argument",
    )


@dataclass
class _Call:
    child: int
    x: Tensor | None
    """The first positional argument, if it is a tensor."""
    out: Tensor | None


@dataclass
class _Observed:
    """A list of modules, and the calls of its children in one forward of the model."""

    path: str
    module: nn.Module
    calls: list[_Call] = field(default_factory=list)

    @property
    def children(self) -> list[nn.Module]:
        return [child for _, child in self.module.named_children()]

    @property
    def paths(self) -> list[str]:
        return [".".join(filter(None, (self.path, name))) for name, _ in self.module.named_children()]

    def fault(self) -> str:
        """Why the children are no chain of layers; "" where they are."""
        order = [c.child for c in self.calls]
        if order != list(range(len(self.children))):
            return f"its modules ran in the order {order}" if order else "none of its modules was called"
        for number, one in enumerate(self.calls):
            if one.x is None:
                return f"module {number} was not called with a tensor as its first positional argument"
            if one.x.dim() != 3 or not one.x.is_floating_point():
                return f"the input of module {number} is {_described(one.x)}, not a stream [batch, length, width]"
            if one.out is None or (one.out.shape, one.out.dtype) != (one.x.shape, one.x.dtype):
                return f"module {number} turns {_described(one.x)} into {_described(one.out)}"
            if number > 0 and one.x is not self.calls[number - 1].out:
                return f"the input of module {number} is not the output of module {number - 1}"
        return ""


def _described(value: Tensor | None) -> str:
    return "no tensor" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


@contextmanager
def _watching(twin: nn.Module, observed: Sequence[_Observed]) -> Iterator[None]:
    """While it is open, calls of the lists' children are noted, and modules that need values return empty results."""
    places: dict[nn.Module, list[tuple[_Observed, int]]] = {}
    for one in observed:
        for number, child in enumerate(one.children):
            places.setdefault(child, []).append((one, number))
    inner = [module for module in twin.modules() if module is not twin]
    for module in inner:
        module.forward = _noting(module, module.forward, places.get(module, []))
    try:
        yield
    finally:
        for module in inner:
            del module.forward


def _noting(
    module: nn.Module, forward: Callable[..., Any], places: Sequence[tuple[_Observed, int]]
) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            out = forward(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            # As a loop over experts does, which will be a leaf; any other error shows when the layers are captured.
            out = assumed_results(module, args, kwargs)
        x = args[0] if args and isinstance(args[0], Tensor) else None
        first = out[0] if isinstance(out, tuple) and out else out
        for one, number in places:
            one.calls.append(_Call(number, x, first if isinstance(first, Tensor) else None))
        return out

    return noting
