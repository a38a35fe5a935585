"""What a region says of itself in errors, and to whoever watches its steps."""

from __future__ import annotations

from fxskip.backward.program import Part


class Site:
    """Where in a model a call of a region runs."""

    def __str__(self) -> str:
        """In errors."""
        return "a scheduled region"

    def forward(self, step: str) -> None:
        """That step begins to run."""

    def backward(self, step: str, part: Part) -> None:
        """That part of its backward begins, and has gradients to compute."""

    def failed(self, error: BaseException, where: str) -> None:
        """An error ended a step there; what is in flight has not been waited for yet."""
