"""Bring a rewired model's quality back: `distill` trains it towards its original, `evaluate` measures it."""

from fxskip.distill.config import DistillConfig
from fxskip.distill.distill import distill
from fxskip.distill.evaluate import Metrics, evaluate
from fxskip.distill.result import Result

__all__ = ["DistillConfig", "Metrics", "Result", "distill", "evaluate"]
