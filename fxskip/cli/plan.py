"""`fxskip plan`: what a spec would do to a model."""

from pathlib import Path
from typing import Annotated

import typer

from fxskip.cli.arguments import AsJson, ModelFolder, SpecName
from fxskip.cli.output import note, quiet_stdout


def plan(
    model: ModelFolder,
    spec: SpecName,
    html: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            metavar="FILE",
            help="Also write a page with pictures of the wiring before and after.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what SPEC would do to MODEL, sub-block by sub-block. Nothing is changed.

    Of MODEL only config.json is read; weights need not be there.

    \b
    Example:
      fxskip plan models/deepseek-v3 farskip --html plan.html

    \b
    Exit codes: 2 the spec is wrong, 3 the model cannot be rewired like that, 4 config.json cannot be read.
    """
    with quiet_stdout():
        import fxskip
        from fxskip.cli.models import read_config

        loaded = fxskip.load_spec(spec)
        result = fxskip.plan(read_config(model), loaded)
        if html is not None:
            note(f"written: {result.to_html(html)}")
    typer.echo(result.to_json() if as_json else str(result))
