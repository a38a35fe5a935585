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


def in_a_folder(out: Path) -> Path:
    """Refuses before the first measurement what could not be written after it."""
    if not out.parent.is_dir():
        raise typer.BadParameter(f"the folder {out.parent} does not exist: make it, or name a file elsewhere")
    return out


ReportFile = Annotated[
    Path,
    typer.Option("--out", dir_okay=False, callback=in_a_folder, help="JSON file with all samples."),
]


@bench.command("loss")
def loss(
    out: ReportFile,
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
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--tokens",
            min=1,
            help="With --ranks: this number of tokens only; can be given several times. Default: 4K to 256K.",
        ),
    ] = None,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Check that everything runs, at sizes whose times mean nothing. Without a GPU set TRITON_INTERPRET=1.",
        ),
    ] = False,
) -> None:
    """Time, memory and errors of the distillation loss, beside the bare matrix products and other forms.

    Needs a CUDA GPU; the dense form takes 64 GiB above its inputs at the largest size. The parts of one GPU are errors,
    sweep (of launch parameters), and times by vocabulary and tokens: v65536-32k, v131072-32k, v32000-4k,
    online-v131072-32k, v131072-64k, v131072-128k, v131072-256k. What fails is in the file with its message; the rest is
    measured all the same, and the exit status is not 0. Goals are judged, in the file and in the end; one that is
    missed is no failure.

    \b
    Examples:
      fxskip bench loss --out loss.json
      fxskip bench loss --part errors --part v32000-4k --out loss.json
      fxskip bench loss --ranks 2 --out loss-two-gpus.json
      fxskip bench loss --tiny --out check.json
    """
    if tiny:
        require_kernels()
    if ranks > 1:
        if part:
            raise FxskipError(
                "bench loss",
                "--part is given with --ranks",
                hint="the parts are of one GPU: give one of the two",
            )
        from fxskip.bench.loss_ranks import TOKENS, run_ranks

        # Nothing here may ask for the GPUs: a process that has, cannot fork others that use them.
        run_ranks(out, ranks, tokens or TOKENS, is_tiny=tiny)
        return
    if tokens:
        raise FxskipError(
            "bench loss", "--tokens is given without --ranks", hint="the parts have their own sizes"
        )
    import torch

    if not (tiny or torch.cuda.is_available()):
        raise FxskipError("bench loss", "no CUDA GPU found", hint="run it on a machine with one")
    from fxskip.bench.loss import PARTS, run

    unknown = [name for name in part or [] if name not in PARTS]
    if unknown:
        raise FxskipError("bench loss", f"--part {unknown[0]}: unknown", hint=f"parts are {', '.join(PARTS)}")
    run(out, part or list(PARTS), is_tiny=tiny)


def require_kernels() -> None:
    """A tiny run without a GPU has Triton's interpreter; Triton reads the switch when it is imported, with torch."""
    import torch

    from fxskip.loss.implementation import is_interpreted

    # Unlike is_available, device_count leaves GPUs to processes that are forked later.
    if torch.cuda.device_count() == 0 and not is_interpreted():
        raise FxskipError(
            "bench loss",
            "no CUDA GPU found, and Triton's interpreter is off",
            hint="set TRITON_INTERPRET=1 before --tiny",
        )


@bench.command("overlap")
def overlap(
    out: ReportFile,
    layers: Annotated[
        list[int] | None,
        typer.Option("--layers", min=3, help="Can be given several times. Default: 8 and 27."),
    ] = None,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(
            "--micro-batch",
            min=1,
            help="Sequences of each rank; can be given several times. Default: 2.",
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--length", min=2, help="Tokens of a sequence. Default: 4096.")
    ] = None,
    choices: Annotated[
        int | None,
        typer.Option(
            "--choices",
            min=1,
            max=6,
            help="Experts of a token, and so what is sent. Default: 6, as the model has.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Times that each variant is timed. Default: 12.")
    ] = None,
    slow_link: Annotated[
        bool,
        typer.Option(
            "--slow-link",
            help="Also with NCCL_P2P_DISABLE=1: through the host's memory, a stand-in for a link between hosts.",
        ),
    ] = False,
    measured_costs: Annotated[
        bool,
        typer.Option(
            "--measured-costs", help="Choose orders by costs that are measured first, not by the roofline."
        ),
    ] = False,
    copy_engine: Annotated[
        bool,
        typer.Option(
            "--copy-engine", help="Also with runtime.transport: copy_engine, which a CPU does not have."
        ),
    ] = False,
    mirror: Annotated[
        bool,
        typer.Option(
            "--mirror",
            help="Only one process and its mirror image, whose rows come from the host's memory: one GPU is enough.",
        ),
    ] = False,
    measured_transport: Annotated[
        bool,
        typer.Option(
            "--measured-transport",
            help="Also with runtime.transport: measured: what moves rows faster is found out first.",
        ),
    ] = False,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Only student against original in one process: one GPU is enough."),
    ] = False,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny", help="Check that everything runs, on a CPU too, at sizes whose times mean nothing."
        ),
    ] = False,
) -> None:
    """Hidden communication on two GPUs: stock and FarSkip, blocking, scheduled, and with nothing sent.

    Decoders of DeepSeek-V2-Lite's shapes, experts spread over two ranks; then one process without a mesh, student
    against original. Two processes are started for each setting. Real routing and forced balanced routing, real data
    and zero data (for a constant clock), with clocks and power from nvidia-smi. What fails is in the file with its
    message, the rest is measured all the same, and the exit status is not 0.

    \b
    Examples:
      fxskip bench overlap --out overlap.json
      fxskip bench overlap --layers 8 --micro-batch 2 --micro-batch 4 --slow-link --out overlap.json
      fxskip bench overlap --layers 8 --copy-engine --out overlap.json
      fxskip bench overlap --mirror --layers 8 --choices 1 --out mirror.json
      fxskip bench overlap --alone --layers 8 --out one-process.json
      fxskip bench overlap --tiny --out check.json
    """
    transports = {
        "--slow-link": slow_link,
        "--copy-engine": copy_engine,
        "--measured-transport": measured_transport,
    }
    refuse_contradictions(alone=alone, mirror=mirror, transports=transports, measured_costs=measured_costs)
    if not tiny:
        require_gpus(1 if alone or mirror else 2)
    from fxskip.bench.overlap import run
    from fxskip.bench.overlap_model import Setting, ways_to_send

    sizes = (32, 2) if tiny else (4096, 12)
    settings = [
        Setting(
            layers=count,
            micro_batch=batch,
            tokens=tokens or sizes[0],
            rounds=rounds or sizes[1],
            traced_steps=1 if tiny else 2,
            link=link,
            measured_costs=measured_costs,
            is_tiny=tiny,
            transport=transport,
            choices=choices,
        )
        for link, transport in ways_to_send(
            mirror=mirror,
            slow_link=slow_link,
            copy_engine=copy_engine,
            measured_transport=measured_transport,
        )
        for count in layers or ([3] if tiny else [8, 27])
        for batch in micro_batch or ([1] if tiny else [2])
    ]
    run(out, settings, alone=alone)


def refuse_contradictions(
    *, alone: bool, mirror: bool, transports: dict[str, bool], measured_costs: bool
) -> None:
    """Refuses options that would do nothing beside `--alone` or `--mirror`, which measure one thing by itself."""
    if mirror and (alone or any(transports.values())):
        raise FxskipError(
            "bench overlap",
            "--mirror is given with another choice of what is measured",
            hint=f"it is measured by itself: leave out --alone, {', '.join(transports)}",
        )
    given = [
        name for name, is_given in {**transports, "--measured-costs": measured_costs}.items() if is_given
    ]
    if alone and given:
        raise FxskipError(
            "bench overlap",
            f"--alone is given with {', '.join(given)}",
            hint="one process exchanges nothing, so these would change nothing: leave out one or the other",
        )


def require_gpus(needed: int) -> None:
    """Refuses a machine that has fewer CUDA devices."""
    import torch

    # Unlike is_available, device_count leaves GPUs to processes that are started later.
    seen = torch.cuda.device_count()
    if seen < needed:
        raise FxskipError(
            "bench overlap",
            f"CUDA devices needed: {needed}; seen by this PyTorch: {seen}",
            hint="run it on a machine with two GPUs, or give --mirror or --alone for one, or --tiny for none",
        )


@bench.command("plot")
def plot(
    reports: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, metavar="REPORT...", help="JSON of --ranks.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", dir_okay=False, callback=in_a_folder, help="Image: .svg, .png or .pdf."),
    ],
) -> None:
    """Draw speed and memory by number of tokens, from reports of `fxskip bench loss --ranks`.

    \b
    Examples:
      fxskip bench plot loss-two-gpus.json --out loss-two-gpus.svg
      fxskip bench plot loss-4k-to-32k.json loss-64k-to-256k.json --out loss-two-gpus.svg
    """
    from fxskip.bench.loss_plot import plot as draw

    draw(reports, out)
