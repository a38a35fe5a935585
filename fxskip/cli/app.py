"""The command `fxskip`: its options, its commands, and what becomes of errors."""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn

import typer

import fxskip.cli as package
from fxskip.cli.bench import bench
from fxskip.cli.convert import convert
from fxskip.cli.distill import distill
from fxskip.cli.doctor import doctor
from fxskip.cli.eval import evaluate
from fxskip.cli.exit_code import ExitCode, exit_code_of
from fxskip.cli.plan import plan
from fxskip.cli.trace import trace
from fxskip.cli.tune import tune
from fxskip.errors import FxskipError
from fxskip.version import __version__

app = typer.Typer(
    help=package.__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help reads the same on a terminal and in a log, and keeps its line breaks
)
app.command("plan")(plan)
app.command("convert")(convert)
app.command("distill")(distill)
app.command("eval")(evaluate)
app.command("doctor")(doctor)
app.command("trace")(trace)
app.command("tune")(tune)
app.add_typer(bench, name="bench")


@dataclass
class Settings:
    """Options that stand before the command."""

    traceback: bool = False


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fxskip {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    show_traceback: Annotated[
        bool,
        typer.Option("--traceback", envvar="FXSKIP_TRACEBACK", help="Show where in the code an error arose."),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.obj.traceback = show_traceback


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command, with the arguments of the process by default, and exit."""
    settings = Settings()
    try:
        app(args=arguments, prog_name="fxskip", obj=settings)
    except FxskipError as error:
        sys.exit(_failed(str(error), exit_code_of(error), settings))
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        sys.exit(_failed(f"fxskip: {error.strerror or error}{place}", ExitCode.FILES, settings))
    except Exception:  # a defect, which must not look like exit code 1
        traceback.print_exc()
        sys.exit(ExitCode.DEFECT)
    raise AssertionError("the command line returned without an exit code")


def _failed(message: str, code: ExitCode, settings: Settings) -> ExitCode:
    if settings.traceback:
        traceback.print_exc()
    else:
        typer.echo(message, err=True)
    return code
