"""Capture the body of a decoder layer with TorchDynamo, rewire it, and run the result in its place.

Dynamo keeps what a captured graph depends on as guards: training mode, gradients, a cache, the number
and kind of masks. A call that differs is captured again, a call with other sizes is not. Parameters are
inputs of the graph, read from the layer at every call, so all layers of one kind share a graph.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config
from torch import Tensor, fx, nn

from fxskip.capture.causes import cause
from fxskip.capture.eager_branches import eager_branches
from fxskip.capture.recorded_outputs import traceable_recording
from fxskip.errors import CaptureError, FxskipError
from fxskip.ir import refuse_to_run, stream_in, stream_out

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
        return build(module, example_inputs)

    compiled = torch.compile(region, backend=backend, fullgraph=True, dynamic=True)

    def run(*arguments: Any) -> tuple[Any, Streams]:
        with (
            torch._dynamo.config.patch(_DYNAMO),
            _SHAPES.patch(use_duck_shape=False),
            eager_branches(),
            traceable_recording(),
        ):
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if isinstance(error.inner_exception, FxskipError):
                    raise error.inner_exception from None
                raise
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.UserError) as error:
                raise _capture_error(arguments[0], error) from error

    return run


def _capture_error(layer: nn.Module, error: Exception) -> CaptureError:
    text = str(error)
    reason = (
        ": ".join(filter(None, (first_line(text), first_line(str(error.__cause__ or "")))))
        or type(error).__name__
    )
    found = f"the layer cannot be captured as one graph: {reason}"
    hint = "rewrite the part named in the full message above so that torch.compile(fullgraph=True) accepts it"
    if (known := cause(text)) is not None:
        found, hint = known.found, known.hint
    frame = next(
        (line.strip() for line in reversed(text.splitlines()) if line.strip().startswith("File ")), None
    )
    return CaptureError(
        f"capture of {type(layer).__name__}", found, where=_module_of(layer, text) or frame, hint=hint
    )


def first_line(text: str) -> str:
    """The first line of a long message that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _module_of(layer: nn.Module, text: str) -> str | None:
    """The submodule whose forward stands in Dynamo's user stack, deepest last."""
    named = [(name, type(module)) for name, module in layer.named_modules() if name]
    for line in reversed(text.splitlines()):
        for name, kind in named:
            if line.strip().startswith("File ") and kind.__module__.rpartition(".")[2] in line:
                code = getattr(kind.forward, "__wrapped__", kind.forward).__code__
                number = _line_number(line)
                if number is not None and _covers(code, number):
                    return f"module {name} ({kind.__name__}), {line.strip()}"
    return None


def _line_number(line: str) -> int | None:
    _, found, rest = line.partition("line ")
    digits = rest.split(",")[0].strip() if found else ""
    return int(digits) if digits.isdigit() else None


def _covers(code: types.CodeType, number: int) -> bool:
    lines = [line for *_, line in code.co_lines() if line is not None]
    return bool(lines) and min(lines) <= number <= max(lines)
