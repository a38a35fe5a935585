"""A few steps of a student under watch: estimated beside measured."""

from fxskip.tracing.timeline import Timeline
from fxskip.tracing.trace import trace
from fxskip.tracing.tune import Tuning, tune

__all__ = ["Timeline", "Tuning", "trace", "tune"]
