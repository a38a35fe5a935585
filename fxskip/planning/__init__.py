"""What a spec does to a model: the plan, and its forms as text, JSON and a self-contained web page."""

from fxskip.planning.legend import legend
from fxskip.planning.markup import document, element
from fxskip.planning.page import page, wiring_section
from fxskip.planning.picture import pictures
from fxskip.planning.plan import Plan, PlannedBlock, make_plan
from fxskip.planning.trainable import Trainable, trainable_parameters
from fxskip.planning.window import LayerWindow, Window

__all__ = [
    "LayerWindow",
    "Plan",
    "PlannedBlock",
    "Trainable",
    "Window",
    "document",
    "element",
    "legend",
    "make_plan",
    "page",
    "pictures",
    "trainable_parameters",
    "wiring_section",
]
