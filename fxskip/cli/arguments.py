"""Arguments that several commands take."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

ModelFolder = Annotated[
    Path,
    typer.Argument(exists=True, file_okay=False, metavar="MODEL", help="Folder of a saved model."),
]
SpecName = Annotated[
    str,
    typer.Argument(metavar="SPEC", help="A spec file, or the name of a preset, such as farskip."),
]
RandomModel = Annotated[
    Path,
    typer.Argument(
        exists=True,
        metavar="MODEL",
        help="Folder of a saved model, or a config file: weights are random then.",
    ),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sequences of each process in one step.")]
SequenceLength = Annotated[int, typer.Option("--length", min=2, help="Tokens of a sequence.")]
ForwardOnly = Annotated[
    bool, typer.Option("--forward-only", help="The model in eval mode, without a backward.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DataFiles = Annotated[
    list[Path],
    typer.Option(
        "--data",
        exists=True,
        dir_okay=False,
        metavar="FILE",
        help="A UTF-8 text file, or a .safetensors file with windows of token ids, an integer tensor input_ids "
        "[windows, length]. Can be given several times.",
    ),
]
WindowLength = Annotated[
    int,
    typer.Option(
        "--length", min=2, help="Tokens in a window of text. The last window of a file may be shorter."
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1.")]


class Dtype(StrEnum):
    """Types of weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


StudentDtype = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        help="Type of the weights; auto is that in which they are stored, for random ones bfloat16 on a GPU and "
        "float32 elsewhere.",
    ),
]
