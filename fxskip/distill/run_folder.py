"""The folder of a run: which run it belongs to, its last checkpoint, and its results once it is finished.

run.json         what the run is (identity.py); written first
checkpoint.pt    the state after some step; replaced as a whole
curves.png
results.json     written last: its presence says that the run is finished
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from fxskip.distill.files import write_text, write_whole
from fxskip.distill.identity import differences
from fxskip.distill.result import Result
from fxskip.errors import CheckpointError, first_line

FORMAT = 1


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoint.exists()

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @classmethod
    def open(cls, path: str | PathLike[str], identity: Mapping[str, Any]) -> Self:
        """The folder for this run, made if it is new; CheckpointError if it belongs to another run."""
        folder = cls(Path(path))
        if folder.path.exists() and not folder.path.is_dir():
            raise CheckpointError("distill", f"out={str(path)!r} is a file", hint="give a folder")
        folder.path.mkdir(parents=True, exist_ok=True)
        card = folder.path / "run.json"
        if card.exists():
            folder._require_same_run(card, identity)
        elif folder.checkpoint.exists() or folder.results.exists():
            raise CheckpointError(
                "distill",
                "the folder holds a checkpoint or results, but no run.json that says whose they are",
                where=str(path),
                hint="give another folder for out, or empty this one",
            )
        else:
            write_text(card, json.dumps({"format": FORMAT, "identity": dict(identity)}, indent=2))
        return folder

    def _require_same_run(self, card: Path, identity: Mapping[str, Any]) -> None:
        kept = self._read_json(card)
        if kept.get("format") != FORMAT:
            raise CheckpointError(
                "distill",
                f"run.json has format {kept.get('format')}, this version reads {FORMAT}",
                where=str(self.path),
                hint="give another folder for out",
            )
        if found := differences(kept["identity"], identity):
            raise CheckpointError(
                "distill",
                "the folder belongs to another run",
                where="\n".join([str(self.path), *found]),
                hint="start with the arguments of that run to continue it, or give another folder for out",
            )

    def save(self, state: Mapping[str, Any]) -> None:
        write_whole(self.checkpoint, lambda file: torch.save(dict(state), file))

    def load(self) -> dict[str, Any]:
        """The last state that was saved, on the CPU."""
        try:
            state: dict[str, Any] = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise self._damaged(self.checkpoint, error) from error
        return state

    def finished(self) -> Result | None:
        """The result of a run that went to its end; None while there is something left to do."""
        if not self.results.exists():
            return None
        if not self.checkpoint.exists():
            raise CheckpointError(
                "distill",
                "results.json says that the run is finished, but its weights (checkpoint.pt) are missing",
                where=str(self.path),
                hint="restore checkpoint.pt, or give another folder for out",
            )
        try:
            return Result.from_dict(self._read_json(self.results), self.path)
        except (KeyError, TypeError) as error:
            raise self._damaged(self.results, error) from error

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._damaged(path, error) from error
        return content

    def _damaged(self, path: Path, error: Exception) -> CheckpointError:
        return CheckpointError(
            "distill",
            f"{path.name} cannot be read: {type(error).__name__}: {first_line(error)}",
            where=str(path),
            hint="restore the file, or give another folder for out",
        )
