"""How far models are from the original, on the same text. The original runs over it only once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

# N windows, L tokens in one, B windows in a batch, T predicted tokens of a batch, D width, V vocabulary


@dataclass(frozen=True)
class Figures:
    """Means over every position that predicts a token of the text."""

    cross_entropy: float
    kl: float
    agreement: float


class Yardstick:
    """Holds the original's last hidden states: D numbers a token, where its probabilities would be V."""

    def __init__(self, original: PreTrainedModel, windows_NL: Tensor, *, batch: int = 16) -> None:
        self.original, self.batches = original, windows_NL.split(batch)
        self.hidden_TD = [self._hidden(original, ids_BL) for ids_BL in self._progress("original")]

    def measure(self, model: PreTrainedModel, name: str) -> Figures:
        """Cross-entropy of the text and KL(original || model) in nats a token, and how often both prefer one token."""
        sums = torch.zeros(3, dtype=torch.float64)
        for ids_BL, hidden_TD in zip(self._progress(name), self.hidden_TD, strict=True):
            ours_TD = hidden_TD if model is self.original else self._hidden(model, ids_BL)
            sums += self._sums(model, ours_TD, hidden_TD, ids_BL[:, 1:].flatten())
        tokens = sum(ids_BL[:, 1:].numel() for ids_BL in self.batches)
        return Figures(*(sums / tokens).tolist())

    @torch.no_grad()
    def _sums(
        self, model: PreTrainedModel, ours_TD: Tensor, original_TD: Tensor, targets_T: Tensor
    ) -> Tensor:
        sums = torch.zeros(3, dtype=torch.float64)
        for ours, original, targets in zip(
            *(x.split(1024) for x in (ours_TD, original_TD, targets_T)), strict=True
        ):
            logq_TV = model.get_output_embeddings()(ours).log_softmax(dim=-1)
            logp_TV = self.original.get_output_embeddings()(original).log_softmax(dim=-1)
            cross_entropy_T = -logq_TV.gather(1, targets[:, None])
            kl_T = (logp_TV.exp() * (logp_TV - logq_TV)).sum(dim=-1)
            same_T = logq_TV.argmax(dim=-1) == logp_TV.argmax(dim=-1)
            sums += torch.stack([part.double().sum() for part in (cross_entropy_T, kl_T, same_T)])
        return sums

    @torch.no_grad()
    def _hidden(self, model: PreTrainedModel, ids_BL: Tensor) -> Tensor:
        model.eval()
        hidden_BLD: Tensor = model.get_decoder()(input_ids=ids_BL, use_cache=False).last_hidden_state
        return hidden_BLD[:, :-1].flatten(
            0, 1
        )  # the last position of a window predicts nothing that is known

    def _progress(self, name: str):
        console = Console(stderr=True)
        return track(self.batches, f"held-out text: {name}", console=console, disable=not console.is_terminal)
