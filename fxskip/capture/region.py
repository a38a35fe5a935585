"""Capture the body of a decoder layer with TorchDynamo, rewire it, and run the result in its place.

Dynamo keeps what a captured graph depends on as guards: training mode, gradients, a cache, the number
and kind of masks. A call that differs is captured again, a call with other sizes is not. Parameters are
inputs of the graph, read from the layer at every call, so all layers of one kind share a graph.
"""

from __future__ import annotations

import inspect
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config
from torch import Tensor, fx, nn

from fxskip.capture.causes import cause
from fxskip.capture.eager_branches import eager_branches
from fxskip.capture.recorded_outputs import traceable_recording
from fxskip.capture.selective_scan import whole_selective_scans
from fxskip.capture.shared import Shared
from fxskip.errors import CaptureError, FxskipError, first_line
from fxskip.ir import is_matrix_product, module_path, op_name, refuse_to_run, stream_in, stream_out

Streams = tuple[Tensor, ...]
CompiledRegion = Callable[
    [nn.Module, type[nn.Module], Streams, tuple[Any, ...], dict[str, Any]], tuple[Any, Streams]
]

_DYNAMO = {
    # Without it `dynamic=True` turns eps and scales into graph inputs, and a scale of a residual would be no constant.
    "specialize_float": True,
    # Modes multiply: train and eval, with and without gradients, cache and masks, batch or length 1.
    "recompile_limit": 128,
    # Hooks that a user adds after the capture must be seen.
    "skip_nnmodule_hook_guards": False,
    # FSDP2 would have Dynamo miss the same hooks, and a parameter that is frozen, in the modules that it manages.
    "skip_fsdp_guards": False,
    # DDP would have Dynamo cut the region at bucket borders; the cut has to see the whole stream.
    "optimize_ddp": False,
}

# Sizes that happen to be equal (batch and heads) must not become one size: another batch would be captured again.
_SHAPES: Any = torch.fx.experimental._config

# PyTorch's own settings are each thread's; these two are functions of modules, which all threads see.
_while_any_region_runs = Shared(eager_branches, whole_selective_scans)

# Dynamo warns that it looks inside functools.lru_cache; transformers caches answers that never change.
warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")

_captures = 0


def capture_count() -> int:
    """How many regions this process has captured so far; a call that adds to it was a new kind of call."""
    return _captures


def compile_region(
    build: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]], n_outputs: int, name: str
) -> CompiledRegion:
    """Return a function that runs a layer's body in the form that `build` gives it.

    The function takes the layer, the class whose `forward` is the body, the incoming streams and the
    body's other arguments. It returns what the body returns, and the `n_outputs - 1` streams beside the
    full one. `build` is called once a capture with the graph, its streams marked, and fake inputs; it returns
    what runs.
    """

    def region(
        layer: nn.Module,
        base: type[nn.Module],
        streams: Streams,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Streams]:
        if not torch.compiler.is_dynamo_compiling():
            raise refuse_to_run("region")
        marked = tuple([stream_in(stream, index) for index, stream in enumerate(streams)])
        out = base.forward(layer, marked[0], *args, **kwargs)
        others = tuple([stream_out(marked[-1], index) for index in range(1, n_outputs)])
        if isinstance(out, tuple):
            return (stream_out(out[0], 0), *out[1:]), others
        return stream_out(out, 0), others

    # Dynamo stores captures on the code object, which all closures of this function would share: then one
    # wiring's captures would count against another's limit and be looked through at each call.
    region.__code__ = region.__code__.replace(co_name=f"region_{name}")

    def backend(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        global _captures
        _captures += 1
        _require_flat(module)
        return build(module, example_inputs)

    compiled = torch.compile(region, backend=backend, fullgraph=True, dynamic=True)

    def run(*arguments: Any) -> tuple[Any, Streams]:
        with _settings(), _while_any_region_runs(), traceable_recording():
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if isinstance(error.inner_exception, FxskipError):
                    raise error.inner_exception from None
                raise
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.UserError) as error:
                raise _capture_error(arguments[0], error) from error

    return run


_patches: list[tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = []


@contextmanager
def _settings() -> Iterator[None]:
    """PyTorch's settings for regions. Patches are used again: to make one costs a class, and a context variable which
    the thread then keeps for ever."""
    try:
        patches = _patches.pop()
    except IndexError:  # the first call, or others are inside, in other threads
        patches = torch._dynamo.config.patch(_DYNAMO), _SHAPES.patch(use_duck_shape=False)
    try:
        with patches[0], patches[1]:
            yield
    finally:
        _patches.append(patches)


def _require_flat(module: fx.GraphModule) -> None:
    """Refuse products and choices of experts inside a nested graph, where no pass would see them."""
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        for operand in node.all_input_nodes:
            inner = getattr(module, str(operand.target), None) if operand.op == "get_attr" else None
            nodes = inner.graph.nodes if isinstance(inner, fx.GraphModule) else ()
            hidden = next((n for n in nodes if is_matrix_product(n) or op_name(n) == "topk"), None)
            if hidden is not None:
                raise CaptureError(
                    "capture",
                    f"{op_name(hidden)} is called inside {node.target.name()}, where it cannot be rewired",
                    where=f"module {module_path(hidden) or module_path(node) or 'the decoder layer itself'}",
                    hint="take torch.utils.checkpoint, torch.cond and their like out of the decoder layers; to "
                    "recompute, checkpoint whole layers: checkpoint(layer, x, use_reentrant=False)",
                )


def is_data_dependent(error: BaseException | None) -> bool:
    """Whether Dynamo stopped at code whose course or shapes depend on values."""
    text = str(error)
    return any(sign in text for sign in _DATA_DEPENDENT)


_DATA_DEPENDENT = (
    "data-dependent",
    "Data-dependent",
    "Dynamic shape operator",
    "nonzero",
    "Tensor.item",
    "tolist",
)


def failed_module(layer: nn.Module, error: BaseException | None) -> nn.Module | None:
    """The innermost module of `layer` in whose code Dynamo stopped; None for the layer itself and outside code."""
    modules = [module for module in layer.modules() if module is not layer]
    for frame in reversed(getattr(error, "real_stack", None) or ()):
        for module in modules:
            if any(_is_in(code, frame) for code in _codes(type(module))):
                return module
    return None


def _codes(kind: type[nn.Module]) -> Iterator[types.CodeType]:
    """The code of all methods of a class of modules, nn.Module's own excluded."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else member
            if isinstance(function, types.FunctionType):
                yield function.__code__


def _is_in(code: types.CodeType, frame: traceback.FrameSummary) -> bool:
    lines = [line for *_, line in code.co_lines() if line is not None]
    return code.co_filename == frame.filename and min(lines) <= (frame.lineno or 0) <= max(lines)


def _capture_error(layer: nn.Module, error: Exception) -> CaptureError:
    text = str(error)
    reason = (
        ": ".join(filter(None, (first_line(text), first_line(error.__cause__ or "")))) or type(error).__name__
    )
    found = f"the layer cannot be captured as one graph: {reason}"
    hint = "rewrite the part named in the full message above so that torch.compile(fullgraph=True) accepts it"
    module = failed_module(layer, error)
    if (known := cause(text)) is not None:
        found, hint = known.found, known.hint
    if module is not None and (known is None or is_data_dependent(error)):
        hint = (
            f"{hint};\nor have the module run as it is, declared before the transform:\n"
            f"import fxskip\nfxskip.leaf({type(module).__name__})"
        )
    return CaptureError(
        f"capture of {type(layer).__name__}", found, where=_place(layer, module, error), hint=hint
    )


def _place(layer: nn.Module, module: nn.Module | None, error: Exception) -> str | None:
    """Module and line at which Dynamo stopped; None where it does not say."""
    frames = list(getattr(error, "real_stack", None) or ())
    line = f'File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}' if frames else None
    if module is None:
        return line
    name = next(name for name, other in layer.named_modules() if other is module)
    return f"module {name} ({type(module).__name__}), {line}"
