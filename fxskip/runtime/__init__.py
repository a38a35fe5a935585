"""Runs rewired regions in place of a model's decoder layers."""

from fxskip.capture.region import capture_count

__all__ = ["capture_count"]
