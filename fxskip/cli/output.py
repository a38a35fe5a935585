"""What every command does with stdout and stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import typer


def note(text: str) -> None:
    """Tell the user something that is not the command's result."""
    typer.echo(text, err=True)


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """While a command works, what libraries print goes to stderr: stdout is for the result."""
    with redirect_stdout(sys.stderr):
        _hide_bars_in_logs()
        yield


def _hide_bars_in_logs() -> None:
    if not sys.stderr.isatty():
        from transformers import logging

        logging.disable_progress_bar()
