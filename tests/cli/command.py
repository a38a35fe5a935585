"""Run a command as a shell would, in this process: its imports take longer than the tests."""

from fxskip.cli import main


def run(*arguments: object) -> int:
    """The exit code."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("main returned")
