"""`fxskip doctor`: whether a saved model is intact, and what it is."""

from pathlib import Path
from typing import Annotated

import typer

from fxskip.cli.arguments import AsJson
from fxskip.cli.exit_code import ExitCode
from fxskip.cli.output import quiet_stdout


def doctor(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, metavar="DIR", help="Folder of a saved model.")
    ],
    values: Annotated[
        bool, typer.Option("--values", help="Also read all weights, and look for infinities and NaNs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what the folder DIR holds, and whether it would load as it was saved.

    A rewired checkpoint, a stock one or neither; of a rewired one, the type of the original, the spec with all its
    rules and the versions it was saved with. Each check is a line, ok, FAIL or skipped, with the remedy. Weights are
    not loaded: their names and shapes are read from the headers of the files.

    \b
    Example:
      fxskip doctor models/rewired --json

    \b
    Exit codes: 0 all checks passed, 1 one failed. An intact stock checkpoint passes; its "kind" is "stock".
    """
    with quiet_stdout():
        from fxskip.checkpoint.doctor import examine

        diagnosis = examine(folder, values=values)
    typer.echo(diagnosis.to_json() if as_json else str(diagnosis))
    if not diagnosis.is_intact:
        raise typer.Exit(ExitCode.NOT_INTACT)
