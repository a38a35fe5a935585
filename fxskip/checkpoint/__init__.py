"""Saving, loading and examining rewired models."""

from fxskip.checkpoint.family import FxSkipConfig, FxSkipForCausalLM, family, register_families
from fxskip.checkpoint.record import WiringRecord

__all__ = ["FxSkipConfig", "FxSkipForCausalLM", "WiringRecord", "family", "register_families"]
