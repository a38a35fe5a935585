"""A plan as a self-contained web page: headline numbers, the wiring before and after as a picture, the table."""

from fxskip.plan_page.markup import document, element
from fxskip.plan_page.page import page
from fxskip.plan_page.picture import pictures

__all__ = ["document", "element", "page", "pictures"]
