"""A few steps of a student under watch: estimated beside measured."""

from fxskip.tracing.timeline import Timeline
from fxskip.tracing.trace import trace

__all__ = ["Timeline", "trace"]
