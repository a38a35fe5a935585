"""What a GPU and its links can do, for estimates: one YAML file a machine, each figure with its source.

    hardware: 1                      # version of this format
    name: ...
    matrix_flop_per_s:               # dense, by the type of the operands
      bfloat16:
        peak: {value: 989.5e+12, kind: vendor, source: ...}
        achievable: {value: 0.7, kind: measured, source: ...}
    hbm_bytes_per_s: ...             # the same two figures each
    domain: {gpus: 8, topology: switch, link_bytes_per_s: ...}
    network: {link_bytes_per_s: ...}
    kernel_start_s: {value: ..., kind: ..., source: ...}
    collective_start_s: ...
    contention:                      # how a collective and the kernels beside it disturb each other, by transport;
      nccl: {start_behind_long_s: ..., matrix_stretch: ..., ...}    # absent: not modelled

Nothing here imports torch.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, PositiveFloat

from fxskip import strict_yaml
from fxskip.errors import SpecError
from fxskip.spec import specs_folder
from fxskip.strict_model import Strict, problem, validate
from fxskip.strict_yaml import shown
from fxskip.transport import Transport

MatrixType = Literal["float32", "bfloat16", "float16", "float8"]
"""Operand types of a matrix product. float32 means the matrix units (TF32 where there is one)."""

DEFAULT_HARDWARE = "h200"
"""What estimates are for where nobody says."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Bytes of an element of each MatrixType."""


class Figure(Strict):
    """One number, and where it comes from."""

    value: PositiveFloat
    kind: Literal["vendor", "measured", "published", "assumed"] = Field(
        description="vendor: a data sheet; measured: by this project; published: measured by others; "
        "assumed: nobody measured it, `source` says why it is believed"
    )
    source: str = Field(min_length=8, description="a URL, the name of a data sheet, or a file of results")


class Delay(Figure):
    """A time that may be 0."""

    value: float = Field(ge=0)


class Stretch(Figure):
    """A time beside something else, in times alone."""

    value: float = Field(ge=1)


class Fraction(Figure):
    """A Figure that is a part of a peak."""

    value: float = Field(gt=0, le=1)


class Rate(Strict):
    """A peak rate and the part of it that good kernels reach."""

    peak: Figure
    achievable: Fraction

    @property
    def per_s(self) -> float:
        """What is reached, each second."""
        return self.peak.value * self.achievable.value


class Domain(Strict):
    """GPUs that reach each other over fast links (NVLink, Infinity Fabric)."""

    gpus: int = Field(ge=1, le=65536, description="GPUs in one domain")
    topology: Literal["switch", "mesh"] = Field(
        description="switch: a GPU reaches any other at full rate; mesh: over one link of its own for each other GPU"
    )
    link_bytes_per_s: Rate = Field(
        description="what one GPU sends to all others of its domain; one direction"
    )

    def bytes_per_s(self, group: int) -> float:
        """What a GPU sends to `group - 1` others of its domain; in a mesh the other links stay idle."""
        used = (group - 1) / (self.gpus - 1) if self.topology == "mesh" else 1.0
        return used * self.link_bytes_per_s.per_s


class Network(Strict):
    """What leads out of a domain."""

    link_bytes_per_s: Rate = Field(description="what one GPU sends to other domains; one direction")


class Contention(Strict):
    """How a collective of one transport and the kernels beside it disturb each other."""

    start_behind_long_s: Delay = Field(
        description="what a collective loses that becomes ready while a GEMM or attention runs, at most"
    )
    start_behind_short_s: Delay = Field(description="the same behind a residual add, a norm, an activation")
    matrix_stretch: Stretch = Field(description="time of a GEMM beside the collective, in times alone")
    attention_stretch: Stretch = Field(description="the same of attention")
    elementwise_stretch: Stretch = Field(description="the same of elementwise kernels")
    collective_stretch: Stretch = Field(description="time of the collective beside compute, in times alone")


def _by_type(written: object) -> object:
    if isinstance(written, dict) and not written:
        raise problem(f"names no type; write one or more of {', '.join(get_args(MatrixType))}")
    return written


class Hardware(Strict):
    """A machine, for estimates. `load_hardware` makes one."""

    hardware: Literal[1] = Field(description="version of this format")
    name: str = Field(min_length=1, max_length=200)
    matrix_flop_per_s: Annotated[dict[MatrixType, Rate], BeforeValidator(_by_type)] = Field(
        description="dense matrix products, by the type of their operands"
    )
    hbm_bytes_per_s: Rate = Field(description="memory of one GPU, reads and writes together")
    domain: Domain
    network: Network
    kernel_start_s: Figure = Field(description="time from one kernel of a stream to the next")
    collective_start_s: Figure = Field(description="time of a collective that carries next to nothing")
    contention: dict[Transport, Contention] = Field(
        default={}, description="by transport; one that is absent is not modelled"
    )

    def transfer_us(self, ranks: int, sent_bytes: float) -> float:
        """Estimated microseconds of a collective of `ranks` neighbours, each of which sends so many bytes to others."""
        inside = ranks <= self.domain.gpus
        rate = self.domain.bytes_per_s(ranks) if inside else self.network.link_bytes_per_s.per_s
        return 1e6 * (sent_bytes / rate + self.collective_start_s.value)


def load_hardware(source: str | PathLike[str] | Hardware) -> Hardware:
    """Read and check a hardware file: its path, the name of one in specs/hardware ("h200"), or a Hardware.

    SpecError lists all problems, each with its line in the file and what would be right.
    """
    if isinstance(source, Hardware):
        return source
    if not isinstance(source, str | PathLike):
        raise SpecError(
            "load_hardware",
            f"found {shown(source)}",
            hint=f"give a path, or one of {', '.join(hardware_names())}",
        )
    if isinstance(source, str) and source in hardware_names():
        return validate(Hardware, strict_yaml.read(_folder() / f"{source}.yaml"))
    names = ", ".join(hardware_names())
    return validate(Hardware, strict_yaml.read(Path(source), if_missing=f"known by name are {names}"))


def hardware_names() -> tuple[str, ...]:
    """The files of specs/hardware, which `load_hardware` knows by name."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def _folder() -> Path:
    return specs_folder() / "hardware"
