"""`fxskip convert`: an original in, a rewired model out."""

from pathlib import Path
from typing import Annotated

import typer

from fxskip.cli.arguments import AsJson, Dtype, ModelFolder, SpecName
from fxskip.cli.output import note, quiet_stdout


def convert(
    model: ModelFolder,
    spec: SpecName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the rewired model.")],
    dtype: Annotated[
        Dtype, typer.Option(help="Type of the weights in OUT; auto is that in which they are stored.")
    ] = Dtype.auto,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Also write into an OUT that holds something else than a rewired model: weights are replaced, other "
            "files stay.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rewire MODEL as SPEC says and save it, with tokenizer and generation config, as OUT.

    OUT is replaced in one step at the end: killed at any moment, the command leaves what OUT held, and can be run
    again. The whole model is held in memory.

    \b
    Example:
      fxskip convert models/original farskip models/rewired
      fxskip doctor models/rewired

    \b
    Exit codes: 2 the spec is wrong, 3 the model cannot be rewired like that, 4 MODEL cannot be loaded or OUT is in
    the way.
    """
    with quiet_stdout():
        import fxskip

        loaded = fxskip.load_spec(spec)
        from fxskip.api import rewire
        from fxskip.cli.models import load_model
        from fxskip.cli.saving import require_free, save_with_tokenizer

        require_free(out, tokenizer=model, overwrite=overwrite)
        student = rewire(load_model(model, dtype), loaded, inplace=True)
        result = fxskip.explain(student)
        save_with_tokenizer(student, model, out)
    note(f"saved: {out}")
    typer.echo(result.to_json() if as_json else str(result))
