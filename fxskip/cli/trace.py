"""`fxskip trace`: how much of a student's communication is hidden, estimated beside measured."""

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


def trace(
    model: RandomModel,
    spec: SpecName,
    sequences: BatchSize = 2,
    tokens: SequenceLength = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured of each kind.")] = 3,
    dtype: StudentDtype = Dtype.auto,
    forward_only: ForwardOnly = False,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            metavar="FOLDER",
            help="Also write timeline.txt, .json, .html, perfetto.json (for ui.perfetto.dev) and costs.json.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a few steps of MODEL, rewired and spread as SPEC says, and show estimated beside measured times.

    The processes that SPEC needs are started here, one a GPU, or on the CPU where there is none. Under torchrun this
    is one of them instead. Tokens are random, and nothing is trained. costs.json is what schedule: {costs: FILE} in a
    spec reads.

    \b
    Examples:
      fxskip trace models/original farskip-ep2.yaml --out trace
      torchrun --nproc-per-node 8 -m fxskip trace models/original farskip-ep8.yaml --length 4096 --out trace

    \b
    Exit codes: 2 the spec is wrong, 3 the model cannot be rewired like that, 4 the model cannot be loaded.
    """
    with quiet_stdout():
        import fxskip
        from fxskip.cli.students import Request, traced

        request = Request(model, fxskip.load_spec(spec), sequences, tokens, steps, dtype, not forward_only)
        if out is not None:
            make_folder(out)
        if model.is_file():
            note(f"{model}: a config alone, so weights are random")
        found = list(traced(request, out))
        if out is not None and found:
            note(f"written: {out}")
    for timeline in found:  # none on other ranks than 0
        typer.echo(timeline.to_json() if as_json else str(timeline))


def make_folder(out: Path) -> None:
    """Refuses before the first step what could not be written after the last."""
    from fxskip.errors import FxskipError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FxskipError(
            "trace", f"--out {out}: {error.strerror}", hint="name a folder that is there or can be made"
        ) from None
