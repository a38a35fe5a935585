"""`fxskip tune`: which order of a student's tasks is fastest on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fxskip.cli.arguments import (
    AsJson,
    BatchSize,
    Dtype,
    ForwardOnly,
    RandomModel,
    SequenceLength,
    SpecName,
    StudentDtype,
)
from fxskip.cli.output import note, quiet_stdout


def tune(
    model: RandomModel,
    spec: SpecName,
    out: Annotated[
        Path,
        typer.Option(
            dir_okay=False,
            metavar="FILE",
            help="Where the measured costs are written, if the fastest order is by them.",
        ),
    ] = Path("costs.json"),
    sequences: BatchSize = 2,
    tokens: SequenceLength = 128,
    steps: Annotated[int, typer.Option(min=1, help="Rounds; in each, every order runs once.")] = 5,
    dtype: StudentDtype = Dtype.auto,
    forward_only: ForwardOnly = False,
    as_json: AsJson = False,
) -> None:
    """Time steps of MODEL, rewired and spread as SPEC says, by several orders of its tasks, and say which is fastest.

    Orders are those by estimated and by measured costs, with a mirrored and with an explicit backward. The last line is
    what SPEC should say. Give the batch that the model trains with. Processes are started as by fxskip trace.

    \b
    Examples:
      fxskip tune models/original farskip-ep2.yaml --batch-size 4 --length 4096
      torchrun --nproc-per-node 8 -m fxskip tune models/original farskip-ep8.yaml --length 4096 --out ./ep8.json

    \b
    Exit codes: 2 the spec is wrong, 3 the model cannot be rewired like that, 4 the model cannot be loaded.
    """
    with quiet_stdout():
        import fxskip
        from fxskip.cli.students import Request, tuned

        request = Request(model, fxskip.load_spec(spec), sequences, tokens, steps, dtype, not forward_only)
        if model.is_file():
            note(f"{model}: a config alone, so weights are random")
        found = list(tuned(request, out))
        if found and found[0].chosen.is_new:
            note(f"written: {out}")
    for tuning in found:  # none on other ranks than 0
        typer.echo(json.dumps(tuning.as_data(), indent=1) if as_json else str(tuning))
