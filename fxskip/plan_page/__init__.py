"""A plan as a self-contained web page: headline numbers, the wiring before and after as a picture, the table."""

from fxskip.plan_page.legend import legend
from fxskip.plan_page.markup import document, element
from fxskip.plan_page.page import page, wiring_section
from fxskip.plan_page.picture import pictures

__all__ = ["document", "element", "legend", "page", "pictures", "wiring_section"]
