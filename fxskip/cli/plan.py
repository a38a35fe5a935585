"""`fxskip plan`: what a spec would do to a model."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fxskip.cli.arguments import AsJson, SpecName
from fxskip.cli.output import note, quiet_stdout


class PlannedDtype(StrEnum):
    """Types that an estimate can be for."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float8 = "float8"


class Copies(StrEnum):
    """What a token crosses the network for."""

    expert = "expert"
    domain = "domain"


def plan(
    model: Annotated[
        Path,
        typer.Argument(exists=True, metavar="MODEL", help="Folder of a saved model, or its config file."),
    ],
    spec: SpecName,
    hardware: Annotated[
        str,
        typer.Option(metavar="NAME", help="h200, mi300x, b200, or the path of a hardware file."),
    ] = "h200",
    tokens_per_rank: Annotated[
        int, typer.Option(min=1, help="Tokens of one rank in one forward pass.")
    ] = 4096,
    context: Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")] = 4096,
    ep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks that share the routed experts. Default: as the spec says, else one domain of the hardware.",
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks that share attention, dense and shared experts. Default: as the spec says, else 1.",
        ),
    ] = None,
    dtype: Annotated[
        PlannedDtype | None,
        typer.Option(help="Type of weights, activations and what travels. Default: bfloat16."),
    ] = None,
    copies_per: Annotated[
        Copies,
        typer.Option(help="A token crosses the network once for each expert, or once for each other domain."),
    ] = Copies.expert,
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
    """Show what SPEC would do to MODEL, sub-block by sub-block, and estimate what it can hide. Nothing is changed.

    Of MODEL only config.json is read; weights need not be there. Times are estimates: docs/plan.md says of what.

    \b
    Example:
      fxskip plan examples/configs/deepseek-v3.json farskip --ep 8 --hardware h200 --html plan.html

    \b
    Exit codes: 2 the spec is wrong, 3 the model cannot be rewired like that, 4 config.json cannot be read.
    """
    with quiet_stdout():
        import fxskip
        from fxskip.cli.models import read_config

        loaded = fxskip.load_spec(spec)
        result = fxskip.plan(
            read_config(model),
            loaded,
            hardware=hardware,
            tokens_per_rank=tokens_per_rank,
            context_tokens=context,
            expert_size=ep,
            tensor_size=tp,
            dtype=dtype.value if dtype else None,
            copies_per=copies_per.value,
        )
        if html is not None:
            note(f"written: {result.to_html(html)}")
    typer.echo(result.to_json() if as_json else str(result))
