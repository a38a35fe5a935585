from tests.captures import forget_captures

__all__ = ["forget_captures"]
