"""`fxskip eval`: figures of a model on text."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxskip.cli.arguments import AsJson, DataFiles, Device, Dtype, ModelFolder, WindowLength
from fxskip.cli.exit_code import ExitCode
from fxskip.cli.output import note, quiet_stdout

if TYPE_CHECKING:
    from fxskip.distill import Metrics


def evaluate(
    model: ModelFolder,
    data: DataFiles,
    teacher: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            metavar="MODEL",
            help="Folder of the original, for KL and agreement.",
        ),
    ] = None,
    length: WindowLength = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in one forward.")] = 8,
    device: Device = "cpu",
    dtype: Annotated[
        Dtype, typer.Option(help="Type to compute in; auto is that of the stored weights.")
    ] = Dtype.auto,
    max_cross_entropy: Annotated[
        float | None, typer.Option(min=0, help="Exit with 1 if the cross-entropy is above this.")
    ] = None,
    max_kl: Annotated[float | None, typer.Option(min=0, help="Exit with 1 if the KL is above this.")] = None,
    min_agreement: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit with 1 if the agreement is below this (0 to 1).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure MODEL on whole files: cross-entropy, and with --teacher KL(teacher || model) and top-1 agreement.

    Cross-entropy and KL are in nats a token, agreement is a fraction of the tokens. The tokenizer is
    MODEL's.

    \b
    Example:
      fxskip eval models/rewired --teacher models/original --data held-out.txt --max-kl 0.5

    \b
    Exit codes: 1 a bound was missed, 2 the data is wrong, 4 a model cannot be loaded.
    """
    if teacher is None and (max_kl is not None or min_agreement is not None):
        raise typer.BadParameter("--max-kl and --min-agreement compare with a teacher; give --teacher")
    with quiet_stdout():
        found, original = _measure(model, teacher, data, length, batch_size, device, dtype)
    missed = _missed(found, max_cross_entropy=max_cross_entropy, max_kl=max_kl, min_agreement=min_agreement)
    typer.echo(_as_json(model, teacher, found, original, missed) if as_json else _as_text(found, original))
    for line in missed:
        note(f"missed: {line}")
    if missed:
        raise typer.Exit(ExitCode.NOT_INTACT)


def _measure(
    model: Path,
    teacher: Path | None,
    data: list[Path],
    length: int,
    batch_size: int,
    device: str,
    dtype: Dtype,
) -> "tuple[Metrics, Metrics | None]":
    import fxskip
    from fxskip.cli.data import read_windows
    from fxskip.cli.models import checked_device, load_model

    place = checked_device(device)
    windows = read_windows(data, model, length)
    student = load_model(model, dtype, place)
    original = None if teacher is None else load_model(teacher, dtype, place)
    found = fxskip.distill.evaluate(student, windows, teacher=original, batch_size=batch_size)
    if original is None:
        return found, None
    return found, fxskip.distill.evaluate(original, windows, batch_size=batch_size)


def _missed(found: "Metrics", **bounds: float | None) -> list[str]:
    lines = []
    for name, bound in bounds.items():
        side, _, metric = name.partition("_")
        value = getattr(found, metric)
        # Written so that a NaN misses every bound.
        if bound is not None and not (value <= bound if side == "max" else value >= bound):
            lines.append(f"{metric} is {value:.6g}, the bound {bound:g}")
    return lines


def _as_json(
    model: Path, teacher: Path | None, found: "Metrics", original: "Metrics | None", missed: list[str]
) -> str:
    values: dict[str, Any] = {"model": str(model), "teacher": None if teacher is None else str(teacher)}
    values |= {"tokens": found.tokens, "cross_entropy": found.cross_entropy}
    values |= {"kl": found.kl, "agreement": found.agreement}
    values |= {
        "teacher_cross_entropy": None if original is None else original.cross_entropy,
        "missed": missed,
    }
    return json.dumps(values, indent=2)


def _as_text(found: "Metrics", original: "Metrics | None") -> str:
    lines = [f"{'tokens':<22}{found.tokens:>12,}", f"{'cross-entropy':<22}{found.cross_entropy:>12.4f} nats"]
    if original is not None:
        lines.append(f"{'  of the teacher':<22}{original.cross_entropy:>12.4f} nats")
    if found.kl is not None and found.agreement is not None:
        lines.append(f"{'KL to the teacher':<22}{found.kl:>12.4f} nats")
        lines.append(f"{'top-1 agreement':<22}{100 * found.agreement:>12.2f} %")
    return "\n".join(lines)
