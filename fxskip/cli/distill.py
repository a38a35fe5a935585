"""`fxskip distill`: train a rewired model on what its original says."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxskip.cli.arguments import AsJson, DataFiles, Device, Dtype, WindowLength
from fxskip.cli.output import note, quiet_stdout

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from fxskip.distill import Result


def distill(
    student: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, metavar="STUDENT", help="Folder of the rewired model."),
    ],
    teacher: Annotated[
        Path, typer.Option(exists=True, file_okay=False, metavar="MODEL", help="Folder of its original.")
    ],
    data: DataFiles,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run.")],
    eval_data: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, metavar="FILE", help="Files to measure on, like --data."),
    ] = None,
    config: Annotated[
        str, typer.Option(metavar="RECIPE", help="A recipe file, or the name of a preset in specs/distill.")
    ] = "fcsd",
    length: WindowLength = 256,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Distil MODEL into STUDENT, and save the result as DIR/model. STUDENT itself stays as it is.

    Run again with the same arguments, an interrupted run goes on from its last checkpoint and ends with the same
    result. DIR also gets results.json and curves.png. Training is in float32; DIR/model is stored in the type that
    STUDENT is stored in.

    \b
    Example:
      fxskip distill models/rewired --teacher models/original --data train.txt --eval-data held-out.txt --out runs/1

    \b
    Exit codes: 2 the recipe or the data is wrong, 4 a model cannot be loaded or DIR belongs to another run.
    """
    with quiet_stdout():
        import fxskip
        from fxskip.cli.data import read_windows
        from fxskip.cli.models import checked_device, load_model
        from fxskip.cli.saving import require_free, require_rewired, save_with_tokenizer
        from fxskip.distill.config import load_config

        recipe, place = load_config(config), checked_device(device)
        require_rewired(student)
        require_free(out / "model", teacher, tokenizer=student)
        model, original = load_model(student, device=place), load_model(teacher, Dtype.float32, place)
        stored = _to_float32(model)
        result = fxskip.distill.distill(
            model,
            read_windows(data, student, length),
            teacher=original,
            config=recipe,
            out=out,
            eval_data=None if eval_data is None else read_windows(eval_data, student, length),
        )
        _to_stored(model, stored)
        save_with_tokenizer(model, student, out / "model")
    note(f"saved: {out / 'model'}")
    typer.echo(json.dumps(_summary(result, out), indent=2) if as_json else _as_text(result))


def _to_float32(model: "PreTrainedModel") -> "dict[str, torch.dtype]":
    """Make all weights float32, and return the types that they had."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    stored = {name: tensor.dtype for name, tensor in tensors}
    model.float()
    return stored


def _to_stored(model: "PreTrainedModel", stored: "dict[str, torch.dtype]") -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data = tensor.data.to(stored[name])


def _summary(result: "Result", out: Path) -> dict[str, Any]:
    values = result.to_dict()
    values.pop("curve")  # long, and in results.json
    return values | {"model": str(out / "model")}


def _as_text(result: "Result") -> str:
    lines = [f"{result.steps} steps, {result.tokens:,} tokens, {result.wall_seconds:.0f} s"]
    if len(result.evaluations) > 1:
        lines.append(f"{'':<18}{'before':>10}{'after':>10}")
        first, last = result.evaluations[0].metrics, result.evaluations[-1].metrics
        for label, name in (("cross-entropy", "cross_entropy"), ("KL", "kl"), ("agreement", "agreement")):
            lines.append(f"{label:<18}{getattr(first, name):>10.4f}{getattr(last, name):>10.4f}")
    return "\n".join(lines)
