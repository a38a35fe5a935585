from tests.captures import fresh_dynamo

__all__ = ["fresh_dynamo"]
