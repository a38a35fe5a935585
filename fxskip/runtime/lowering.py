"""What runs a rewired graph, as the spec's `runtime.lower` says: PyTorch itself, or a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch._dynamo
import torch._inductor.config
from torch import fx

from fxskip.errors import FxskipError, PassError, first_line


def lowered(lower: str, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """What runs the graph of `module`, forward and backward; called while Dynamo captures, with its fake inputs.

    `none` runs node by node, to the original's last bit. `aot_eager` and `inductor` are torch.compile's backends;
    inductor fuses, so it is right to rounding. Random numbers are drawn as in eager mode.

    Raises PassError where the compiler refuses the graph.
    """
    if lower == "none":
        run: Callable[..., Any] = module.forward
        return run
    try:
        with torch._inductor.config.patch(fallback_random=True):
            compiled: Callable[..., Any] = torch._dynamo.lookup_backend(lower)(module, list(example_inputs))
            return compiled
    except FxskipError:
        raise
    except Exception as error:  # a compiler may raise anything
        raise PassError(
            "runtime.lower",
            f"{lower} cannot compile the rewired layer: {type(error).__name__}: {first_line(error)}",
            hint="runtime: {lower: none} runs the layer without a compiler",
        ) from error
