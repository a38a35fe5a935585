"""Keep transformers' output recording (hidden states, attentions, router logits) working in captured layers.

transformers records by hooks that look up a context variable, which TorchDynamo cannot trace; it has a
second way for the case that the whole model is compiled. Here only the layers are, so the switch is made
around each layer, with a dictionary of its own: captured hooks then see an empty list a key every time,
whatever other layers have recorded before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # before transformers 5.20 a thread-local in another place: nothing to switch
    _active_collector = None  # type: ignore[assignment]


@contextmanager
def traceable_recording() -> Iterator[None]:
    """While it is open, recording hooks inside a captured layer store in a way that Dynamo can follow."""
    variable: Any = _active_collector
    if variable is None or not hasattr(variable, "compiling") or variable.compiling:
        yield
        return
    collected = variable.get()
    own: dict[str, list[Any]] | None = None if collected is None else {key: [] for key in collected}
    variable.compiling, variable.global_var = True, own
    try:
        yield
    finally:
        variable.compiling, variable.global_var = False, None
    if collected is not None and own is not None:
        for key, values in own.items():
            collected[key] = [*(collected[key] or ()), *values]


def records_layers() -> bool:
    """Whether transformers records, in the call that runs, what decoder layers return."""
    variable: Any = _active_collector
    recorded = variable.get() if variable is not None else None
    return recorded is not None and not set(recorded) <= {"attentions", "router_logits"}
