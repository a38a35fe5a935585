"""fxskip: rewire the residual stream of Mixture-of-Experts models so that communication hides under compute.

    student = fxskip.transform(model, "farskip")

Importing the package tells transformers' Auto classes how to load rewired models.
"""

from fxskip import distill, loss
from fxskip.api import (
    explain,
    is_transformed,
    parallelize,
    plan,
    spec_of,
    trainable,
    transform,
    transport_of,
)
from fxskip.checkpoint import register_families
from fxskip.errors import (
    CacheError,
    CaptureError,
    CheckpointError,
    CollectiveError,
    FxskipError,
    PassError,
    ScheduleError,
    SpecError,
)
from fxskip.leaves import leaf
from fxskip.planning import Plan, Trainable
from fxskip.runtime.gradients import average_gradients, clip_grad_norm_, no_sync, parameter_groups
from fxskip.spec import Spec, load_spec
from fxskip.tracing import Timeline, Tuning, trace, tune
from fxskip.transport import TransportChoice
from fxskip.version import __version__

register_families()

__all__ = [
    "CacheError",
    "CaptureError",
    "CheckpointError",
    "CollectiveError",
    "FxskipError",
    "PassError",
    "Plan",
    "ScheduleError",
    "Spec",
    "SpecError",
    "Timeline",
    "Trainable",
    "TransportChoice",
    "Tuning",
    "__version__",
    "average_gradients",
    "clip_grad_norm_",
    "distill",
    "explain",
    "is_transformed",
    "leaf",
    "load_spec",
    "loss",
    "no_sync",
    "parallelize",
    "parameter_groups",
    "plan",
    "spec_of",
    "trace",
    "trainable",
    "transform",
    "transport_of",
    "tune",
]
