"""`fxskip bench`: what fxskip's parts cost on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from fxskip.errors import FxskipError

bench = typer.Typer(
    help="Measure what parts of fxskip cost on this machine.", no_args_is_help=True, rich_markup_mode=None
)


@bench.callback()
def group() -> None:
    """Measure what parts of fxskip cost on this machine."""


@bench.command("loss")
def loss(
    out: Annotated[Path, typer.Option("--out", dir_okay=False, help="JSON file with all samples.")],
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part", help="Run this part only; can be given several times. Default: all, in order."
        ),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks", min=1, help="Spread the vocabulary over this many GPUs, and sweep the tokens."
        ),
    ] = 1,
) -> None:
    """Time, memory and errors of the distillation loss, beside the bare matrix products and other forms.

    Needs a CUDA GPU of 80 GiB or more. The parts of one GPU are errors, sweep, middle, large, small, online, long.

    \b
    Examples:
      fxskip bench loss --out loss.json
      fxskip bench loss --part errors --part small --out loss.json
      fxskip bench loss --ranks 2 --out loss-two-gpus.json
    """
    if ranks > 1:
        if part:
            raise FxskipError(
                "bench loss",
                "--part is given with --ranks",
                hint="the parts are of one GPU: give one of the two",
            )
        from fxskip.bench.loss_ranks import TOKENS, run_ranks

        # Nothing here may ask for the GPUs: a process that has, cannot fork others that use them.
        run_ranks(out, ranks, TOKENS)
        return
    import torch

    if not torch.cuda.is_available():
        raise FxskipError("bench loss", "no CUDA GPU found", hint="run it on a machine with one")
    from fxskip.bench.loss import PARTS, run

    unknown = [name for name in part or [] if name not in PARTS]
    if unknown:
        raise FxskipError("bench loss", f"--part {unknown[0]}: unknown", hint=f"parts are {', '.join(PARTS)}")
    run(out, part or list(PARTS))


@bench.command("plot")
def plot(
    report: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, metavar="REPORT", help="JSON of --ranks.")
    ],
    out: Annotated[Path, typer.Option("--out", dir_okay=False, help="Image: .svg, .png or .pdf.")],
) -> None:
    """Draw speed and memory by number of tokens, from a report of `fxskip bench loss --ranks`.

    \b
    Example:
      fxskip bench plot loss-two-gpus.json --out loss-two-gpus.svg
    """
    from fxskip.bench.loss_plot import plot as draw

    draw(report, out)
