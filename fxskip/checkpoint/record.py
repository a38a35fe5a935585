"""What a checkpoint says about its wiring: the spec, the sub-blocks it was applied to, versions and a hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from fxskip.errors import CheckpointError, FxskipError
from fxskip.spec import Spec, load_spec
from fxskip.version import __version__
from fxskip.wiring import ModelWiring, SubBlock, connect


@dataclass(frozen=True)
class WiringRecord:
    """The entry `fxskip` of a saved config.json. The wiring itself is derived from it, never stored."""

    spec: Mapping[str, Any]
    blocks: tuple[SubBlock, ...]
    wiring_hash: str
    versions: Mapping[str, str]
    leaves: tuple[str, ...] = ()
    """Paths of the modules that run as they are (`fxskip.leaf`); the sub-blocks were found with these."""

    @classmethod
    def of(
        cls, spec: Spec, blocks: Sequence[SubBlock], wiring: ModelWiring, leaves: Sequence[str] = ()
    ) -> WiringRecord:
        """The record of a transform that has just been made."""
        versions = {
            "fxskip": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        return cls(spec.to_dict(), tuple(blocks), wiring.digest(), versions, tuple(leaves))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        blocks = [asdict(block) | {"addends": list(block.addends)} for block in self.blocks]
        return {
            "spec": dict(self.spec),
            "blocks": blocks,
            "wiring_hash": self.wiring_hash,
            "versions": dict(self.versions),
            "leaves": list(self.leaves),
        }

    @classmethod
    def from_dict(cls, data: object, *, where: str = "config.json") -> WiringRecord:
        """Read the entry; raises CheckpointError for anything else than what `to_dict` writes."""
        try:
            if not isinstance(data, Mapping):
                raise TypeError(f"expected a mapping, found {type(data).__name__}")
            blocks = tuple(
                SubBlock(**{**block, "addends": tuple(block["addends"])}) for block in data["blocks"]
            )
            if not blocks:
                raise ValueError("it lists no sub-blocks")
            leaves = tuple(map(str, data.get("leaves", ())))  # models saved by earlier versions lack it
            return cls(dict(data["spec"]), blocks, str(data["wiring_hash"]), dict(data["versions"]), leaves)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "checkpoint",
                f"the entry 'fxskip' is damaged or missing: {error}",
                where=where,
                hint="restore config.json from a copy, or convert the original model again",
            ) from None

    def wiring(self, *, where: str = "config.json") -> ModelWiring:
        """The wiring that spec and sub-blocks give; raises CheckpointError if its hash is not the saved one."""
        try:
            wiring = connect(load_spec(self.spec), self.blocks)
        except FxskipError as error:
            raise CheckpointError(
                "checkpoint",
                f"the saved spec does not fit the saved sub-blocks: {error}",
                where=where,
                hint="restore config.json from a copy, or convert the original model again",
            ) from error
        if wiring.digest() != self.wiring_hash:
            raise CheckpointError(
                "checkpoint",
                f"spec and sub-blocks give the wiring {wiring.digest()[:12]}, but {self.wiring_hash[:12]} was saved",
                where=where,
                hint=f"the entry 'fxskip' was edited, or this fxskip ({__version__}) reads specs differently from the "
                f"one that saved it ({self.versions.get('fxskip')}): install that one, or convert the model again",
            )
        return wiring
